"""The whole report, in processes as a user starts them: here, patched, without torch, with a torch that hangs."""

from __future__ import annotations

import importlib.metadata
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torchrec

from hybridrec.doctor import collectives, selftest, stack
from hybridrec.doctor.child import Channel, run_children
from hybridrec.doctor.report import Finding, Status, exit_status, render, summary
from hybridrec.errors import BackendError, ConfigError
from tests.ranks import RankFailure, RankPool
from tests.repo.sources import ROOT

SECONDS = 120.0
PATCH = """
import torch, torchrec.distributed.embeddingbag as embeddingbag
from torchrec.distributed.planner import constants, types

def my_input_dist(self, ctx, features):
    raise NotImplementedError

embeddingbag.ShardedEmbeddingBagCollection.input_dist = my_input_dist
constants.BATCH_SIZE = 7

library = torch.library.Library("fbgemm", "IMPL")
library.impl("split_embedding_codegen_lookup_sgd_function_pt2", lambda *args: args[0].new_zeros(0), "Autograd")
"""


def doctor(*arguments: str, python: tuple[str, ...] = (), **environment: str) -> subprocess.CompletedProcess[str]:
    """Run it outside of the checkout, with a loopback group: the host's own name may not resolve where tests run."""
    env = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", **environment}
    command = [sys.executable, *python, "-m", "hybridrec.doctor", *arguments]
    return subprocess.run(command, env=env, cwd=ROOT, capture_output=True, text=True, check=False, timeout=4 * SECONDS)


def findings_of(done: subprocess.CompletedProcess[str]) -> dict[str, list[dict[str, str]]]:
    """What -> its findings."""
    assert done.stdout, done.stderr
    found: dict[str, list[dict[str, str]]] = {}
    for finding in json.loads(done.stdout)["findings"]:
        found.setdefault(finding["what"], []).append(finding)
    return found


@pytest.fixture(scope="module")
def report() -> dict[str, list[dict[str, str]]]:
    done = doctor("--json", "--device", "cpu")
    assert done.returncode == 0, done.stdout + done.stderr
    answer = json.loads(done.stdout)
    assert (answer["device"], answer["exit_status"]) == ("cpu", 0)
    return findings_of(done)


def test_here_training_can_start(report: dict[str, list[dict[str, str]]]) -> None:
    assert [f for fs in report.values() for f in fs if f["status"] == "fail"] == []
    assert report["torch"][0]["value"] == importlib.metadata.version("torch")
    assert report["core"][0]["value"] == "compiled"
    assert report["gloo, 2 ranks"][0]["value"].startswith("exact: all_to_all")
    assert report["cpu"][0]["value"].startswith("usable")
    assert "GiB for" in report["default budget"][0]["value"]


def test_kernels_and_why_not_the_other(report: dict[str, list[dict[str, str]]]) -> None:
    values = {kind: report[kind][0]["value"] for kind in ("sgd", "adagrad", "rowwise_adagrad", "adam")}
    assert values["adam"].startswith("torch for all tables") and "no optimizer 'adam'" in values["adam"]
    for kind in ("sgd", "adagrad", "rowwise_adagrad"):
        assert values[kind].startswith("tbe for dim 64; torch for dim 6.") and "no multiple of 4" in values[kind]


def test_unmodified_libraries(report: dict[str, list[dict[str, str]]]) -> None:
    checks = ("files of torchrec", "code of torchrec", "files of fbgemm_gpu", "code of fbgemm_gpu", "fbgemm operators")
    assert [report[what][0]["status"] for what in checks] == ["ok"] * 5
    assert "nothing is patched" in report["code of torchrec"][0]["value"]


def test_a_device_that_is_not_there_fails_with_the_reason() -> None:
    if torch.accelerator.is_available():
        pytest.skip("this machine has an accelerator")
    done = doctor("--json", "--device", "cuda", "--seconds", "60")
    assert done.returncode == 1
    (finding,) = findings_of(done)["cuda"]
    assert finding["status"] == "fail" and "torch" in finding["value"] and finding["remedy"]


def test_an_unknown_device_fails_and_known_ones_are_listed(tmp_path: Path) -> None:
    found = list(stack.devices("abacus", Channel(str(tmp_path / "out"))))
    assert (found[0].what, found[0].status) == ("abacus", Status.FAIL)
    assert all(repr(name) in found[0].remedy for name in ("cpu", "cuda", "npu"))


def test_an_unknown_device_is_rejected_before_anything_is_tried() -> None:
    done = doctor("--device", "abacus")
    assert (done.returncode, done.stdout) == (2, "")
    assert "argument --device: there is no backend for 'abacus'. Pass one of auto, cpu, cuda, npu, or" in done.stderr


def test_patches_and_overrides_are_named(tmp_path: Path) -> None:
    package = Path(torchrec.__file__).parent
    info = next(package.parent.glob("torchrec-*.dist-info"))
    shutil.copytree(package, tmp_path / "torchrec", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copytree(info, tmp_path / info.name)
    with (tmp_path / "torchrec/distributed/comm_ops.py").open("a") as file:
        file.write("\n# changed on disk\n")
    (tmp_path / "my_patch.py").write_text(PATCH)
    arguments = ("--json", "--device", "cpu", "--import", "my_patch", "--seconds", "400")
    done = doctor(*arguments, PYTHONPATH=str(tmp_path))
    found = findings_of(done)

    (files,) = found["files of torchrec"]
    assert files["status"] == "warn" and "torchrec/distributed/comm_ops.py" in files["value"]
    patched = {f["value"] for f in found["code of torchrec"]}
    assert len(patched) == 2 and all(f["status"] == "warn" for f in found["code of torchrec"])
    name = "torchrec.distributed.embeddingbag.ShardedEmbeddingBagCollection.input_dist is patched: my_input_dist of"
    assert any(text.startswith(f"{name} {tmp_path / 'my_patch.py'}:") for text in patched)
    assert any("constants.BATCH_SIZE is patched: 7 instead of 512" in text for text in patched)
    (operator,) = found["fbgemm operators"]
    assert operator["status"] == "warn" and str(tmp_path / "my_patch.py") in operator["value"]
    assert "split_embedding_codegen_lookup_sgd_function_pt2 [Autograd] replaces" in operator["value"]
    # The override breaks SGD's kernel, and the doctor sees that too.
    assert found["sgd"][0]["status"] == "fail" and found["adam"][0]["status"] == "ok"
    assert done.returncode == 1


def distribution(folder: Path, name: str, version: str, *requirements: str) -> None:
    info = folder / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir()
    lines = [f"Requires-Dist: {requirement}" for requirement in requirements]
    (info / "METADATA").write_text("\n".join(["Metadata-Version: 2.1", f"Name: {name}", f"Version: {version}", *lines]))


def without_site(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """On a Python that sees no installed package but those in ``folder``."""
    distribution(folder, "hybridrec", "0.1.0", *(importlib.metadata.requires("hybridrec") or []))
    path = os.pathsep.join([str(folder), str(ROOT)])
    return doctor(*arguments, python=("-S",), PYTHONPATH=path)


def test_without_torch_it_starts_and_says_how_to_install(tmp_path: Path) -> None:
    done = without_site(tmp_path)
    assert done.returncode == 1 and "Traceback" not in done.stdout + done.stderr
    text = " ".join(done.stdout.split())
    assert "fail torch not installed" in text and "training cannot start: 2 failures" in text
    assert "pip install 'hybridrec[STACK]' with STACK one of cpu, cuda, npu" in text
    assert "host memory" in text and "/dev/shm" in text


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("raise RuntimeError('no libdevice.so: set X=0')", "RuntimeError: no libdevice.so: set X=0"),
        ("import os; os.abort()", "killed by signal 6 while at: import torch"),
        ("import time; time.sleep(600)", "no answer within 10 s while at: import torch"),
    ],
)
def test_a_torch_that_raises_dies_or_hangs(tmp_path: Path, source: str, text: str) -> None:
    (tmp_path / "torch.py").write_text(source)
    distribution(tmp_path, "torch", "2.13.0")
    distribution(tmp_path, "torchrec", "1.8.0")
    started = time.monotonic()
    done = without_site(tmp_path, "--json", "--seconds", "10")
    assert time.monotonic() - started < 250
    assert done.returncode == 1
    fails = [f for fs in findings_of(done).values() for f in fs if f["status"] == "fail"]
    assert any(text in finding["value"] for finding in fails), fails


def test_help() -> None:
    done = doctor("--help")
    assert done.returncode == 0
    assert all(
        option in done.stdout
        for option in ("--device", "--json", "--import", "--seconds", "--npu-checklist", "Exit status")
    )
    assert "about half a minute" in " ".join(done.stdout.split())
    assert doctor("--seconds", "-1").returncode == 2


def test_an_interface_that_is_not_there_is_explained() -> None:
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": "nonesuch0"}
    (finding,) = selftest.host_findings("cpu", seconds=300, environment=environment)
    assert finding.status is Status.FAIL and "It works over lo" in finding.value
    assert "export GLOO_SOCKET_IFNAME=lo" in finding.remedy


def test_device_collectives() -> None:
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo"}
    (finding,) = selftest.device_findings("gloo", "cpu", 1, seconds=300, environment=environment)
    assert finding.what == "gloo, 1 rank" and finding.value.startswith("exact: all_to_all")
    (finding,) = selftest.device_findings("nonesuch", "cpu", 4, seconds=300, environment=environment)
    assert (finding.what, finding.status) == ("nonesuch, 2 ranks", Status.FAIL)
    assert "init_process_group('nonesuch')" in finding.value and "NONESUCH_SOCKET_IFNAME" in finding.remedy


def test_a_rank_whose_peer_never_comes_gives_up(tmp_path: Path) -> None:
    store = ["--store", str(tmp_path / "store")]
    group = ["--device-type", "cpu", "--backend", "gloo", "--world-size", "2", "--rank", "0", "--seconds", "2"]
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo"}
    (outcome,) = run_children("hybridrec.doctor.collectives", [[*store, *group]], seconds=300, environment=environment)
    assert outcome.exit_code == 1 and outcome.last_begun == "init_process_group('gloo')"
    assert "imeout" in outcome.get("error") or "imed out" in outcome.get("error")


def test_children_that_hang_are_ended_and_the_others_not_waited_for(tmp_path: Path) -> None:
    (tmp_path / "child_of_test.py").write_text(
        "import os, sys, time\n"
        "from hybridrec.doctor.child import Channel\n"
        "Channel(sys.argv[2]).begin('what it hangs in')\n"
        "Channel(sys.argv[2]).send(pid=os.getpid())\n"
        "print('last words', flush=True)\n"
        "sys.exit(3) if sys.argv[3] == 'fail' else time.sleep(600)\n"
    )
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"}
    (hung,) = run_children("child_of_test", [["hang"]], seconds=10, environment=environment)
    assert hung.exit_code is None and hung.end == "no answer within 10 s while at: what it hangs in"
    assert hung.tail == "last words"
    with pytest.raises(ProcessLookupError):
        os.kill(hung.get("pid"), 0)
    started = time.monotonic()
    failed, waited = run_children("child_of_test", [["fail"], ["hang"]], seconds=500, environment=environment)
    assert time.monotonic() - started < 250
    assert (failed.exit_code, waited.exit_code) == (3, None)
    assert failed.end == "exit status 3 while at: what it hangs in"


def run_collectives(corrupted_rank: int | None) -> None:
    """One rank of the self-test in a pool; the corrupted one sends something else than it should."""
    rank, world_size = torch.distributed.get_rank(), torch.distributed.get_world_size()
    original = collectives.block

    def corrupted(source: int, target: int, unit: int) -> torch.Tensor:
        values = original(source, target, unit)
        if source == rank:
            values[5] += 1
        return values

    if rank == corrupted_rank:
        collectives.block = corrupted
    try:
        for test in (collectives.all_to_all, collectives.all_gather, collectives.reduce_scatter):
            test(rank, world_size, torch.device("cpu"))
    finally:
        collectives.block = original


@pytest.mark.parametrize("world_size", [1, 3])
def test_collectives_are_exact(pools: Any, world_size: int) -> None:
    assert pools[world_size].run(run_collectives, None) == [None] * world_size


def test_a_wrong_element_is_found(pool_3: RankPool) -> None:
    with pytest.raises(RankFailure) as failure:
        pool_3.run(run_collectives, 1)
    errors = [e for e in failure.value.errors.values() if isinstance(e, BackendError)]
    assert errors and "all_to_all: 1 of" in str(errors[0]) and "element" in str(errors[0])


def test_a_kernel_that_computes_something_else_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    from hybridrec.doctor import kernels
    from hybridrec.kernels.torch_kernel import TorchKernel

    def no_update(self: object, saved: object, grad: torch.Tensor, *, step: int) -> None:
        return None

    monkeypatch.setattr(TorchKernel, "backward", no_update)
    found = {f.what: f for f in kernels.findings(torch.device("cpu"))}
    assert found["adam"].status is Status.FAIL and "rows after step 1: off by" in found["adam"].value


def test_exit_status_and_text() -> None:
    ok = Finding(section="S", what="a", value="1")
    warn = Finding(section="S", what="b", value="2", status=Status.WARN, remedy="do that")
    fail = Finding(section="S", what="c", value="3", status=Status.FAIL, remedy="do this")
    assert [exit_status(fs, is_strict=False) for fs in ([ok, warn], [ok, fail])] == [0, 1]
    assert exit_status([ok, warn], is_strict=True) == 1
    assert render(warn).splitlines()[1].strip() == "-> do that"
    texts = [summary(findings, device="cpu") for findings in ([ok], [fail, warn], [fail, fail, warn, warn])]
    assert texts == [
        "training on 'cpu' can start: 0 failures, 0 warnings",
        "training on 'cpu' cannot start: 1 failure, 1 warning",
        "training on 'cpu' cannot start: 2 failures, 2 warnings",
    ]
    with pytest.raises(ConfigError, match="without a remedy"):
        Finding(section="S", what="d", value="4", status=Status.FAIL)
