"""Device, ranks and warnings of the Little Demo."""

from __future__ import annotations

import importlib
import logging
import warnings
from types import SimpleNamespace

import pytest
import torch
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from examples.little_demo import launch
from examples.little_demo.options import parse_args


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--device", "cpu", "--batch-size", "1"], "less than one row for each of 2 ranks"),
        (["--device", "cuda", "--ranks", "3"], "local rank 2 needs cuda device 2"),
    ],
)
def test_options_that_do_not_fit_the_machine_start_nothing(
    options: list[str], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[list[str]] = []
    monkeypatch.setattr(launch, "torchrun", started.append)
    monkeypatch.setattr(torch, "get_device_module", lambda name: SimpleNamespace(device_count=lambda: 2))
    with pytest.raises(SystemExit, match=message):
        launch.start_ranks(parse_args(options), options)
    assert started == []


def test_options_reach_the_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[list[str]] = []
    monkeypatch.setattr(launch, "torchrun", started.append)
    options = ["--device", "cpu", "--ranks", "3", "--seed", "7"]
    assert launch.start_ranks(parse_args(options), options) == 0
    assert started == [["--standalone", "--nproc-per-node=3", "-m", "examples.little_demo", *options]]


@pytest.mark.parametrize(("exitcode", "status"), [(1, 1), (2, 2), (-9, 1)])
def test_status_is_that_of_the_rank_that_failed(exitcode: int, status: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_: list[str]) -> None:
        failure = ProcessFailure(local_rank=1, pid=2**22 + 1, exitcode=exitcode, error_file="<N/A>")
        raise ChildFailedError("demo", {1: failure})

    monkeypatch.setattr(launch, "torchrun", fail)
    assert launch.start_ranks(parse_args(["--device", "cpu"]), []) == status


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--ranks", "3"], "torchrun started 2 processes"),
        (["--batch-size", "1"], "less than one row for each of 2 ranks"),
    ],
)
def test_options_that_do_not_fit_the_ranks_are_refused(
    options: list[str], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(SystemExit, match=message):
        launch.join_ranks(parse_args(options))


@pytest.mark.parametrize(
    ("found", "expected"), [(None, "cpu"), ("mps", "cpu"), ("cuda", "cuda:1")], ids=["none", "unknown", "cuda"]
)
def test_auto_takes_a_device_that_is_known(found: str | None, expected: str, monkeypatch: pytest.MonkeyPatch) -> None:
    accelerator = None if found is None else torch.device(found)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available: accelerator)
    monkeypatch.setattr(torch, "get_device_module", lambda name: SimpleNamespace(device_count=lambda: 2))
    assert launch.choose_device("auto", local_rank=1) == torch.device(expected)


@pytest.mark.parametrize(
    ("count", "message"),
    [
        (0, "--device cuda: torch .* finds none on this machine. Pass --device cpu"),
        (2, "local rank 2 needs cuda device 2, but this machine has 2 of them. Pass --ranks 2, or --device cpu"),
    ],
)
def test_missing_device_is_refused(count: int, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "get_device_module", lambda name: SimpleNamespace(device_count=lambda: count))
    with pytest.raises(SystemExit, match=message):
        launch.choose_device("cuda", local_rank=2)


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (
            ModuleNotFoundError("No module named 'torch_npu'", name="torch_npu"),
            r"^--device npu: torch_npu is not installed\. Install hybridrec\[npu\] .* or pass --device cpu\.$",
        ),
        (
            ImportError("libhccl.so: cannot open shared object file"),
            r"^--device npu: torch_npu cannot be imported \(libhccl\.so: .*set_env\.sh .* or pass --device cpu\.$",
        ),
    ],
    ids=["missing", "broken"],
)
def test_npu_without_its_package_is_refused(error: ImportError, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(name: str) -> None:
        assert name == "torch_npu"
        raise error

    started: list[list[str]] = []
    monkeypatch.setattr(launch, "torchrun", started.append)
    monkeypatch.setattr(importlib, "import_module", fail)
    with pytest.raises(SystemExit, match=message):
        launch.start_ranks(parse_args(["--device", "npu"]), ["--device", "npu"])
    assert started == []


def test_only_the_libraries_are_quietened(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("torchrec", "torch.fx._symbolic_trace"):  # put their levels back afterwards
        monkeypatch.setattr(logging.getLogger(name), "level", logging.getLogger(name).level)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        launch.quiet_libraries()
        for module in ("torchrec.distributed.model_parallel", "torch.nn", "hybridrec.config", "torchlike"):
            warnings.warn_explicit("text", FutureWarning, f"{module}.py", 1, module=module)
    assert [warning.filename for warning in seen] == ["hybridrec.config.py", "torchlike.py"]
    assert not logging.getLogger("torchrec.distributed.planner").isEnabledFor(logging.WARNING)
    assert logging.getLogger("hybridrec").isEnabledFor(logging.WARNING)
