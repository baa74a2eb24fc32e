"""What each device's backend says of FBGEMM's tables."""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from device_backends import cpu, cuda, fbgemm_owner, npu
from device_backends.base import AcceleratorBackend
from hybridrec.backend import KernelRequest, TbePlacement

ON_HOST = TbePlacement(location="HOST", compute_device="CPU")
ON_DEVICE = TbePlacement(location="DEVICE", compute_device="CUDA")


def ask(backend: Any, optimizer: str = "sgd", dim: int = 64, *, is_weighted: bool = False, **more: Any) -> Any:
    return backend.tbe_placement(KernelRequest(optimizer=optimizer, dim=dim, is_weighted=is_weighted, **more))


@pytest.fixture(autouse=True)
def _fresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A process in which nobody has used FBGEMM, on a machine with fbgemm-ascend."""
    monkeypatch.setattr(fbgemm_owner, "_is_taken_for_host", False)
    for variable in npu._CHIP_VARIABLES:
        monkeypatch.delenv(variable, raising=False)
    npu._import_fbgemm_ascend.cache_clear()
    yield
    npu._import_fbgemm_ascend.cache_clear()


@pytest.mark.parametrize(
    ("optimizer", "dim", "expected"),
    [
        ("sgd", 4, ON_HOST),
        ("adagrad", 64, ON_HOST),
        ("rowwise_adagrad", 8, ON_HOST),
        ("none", 8, ON_HOST),
        ("sgd", 6, "dim=6 is no multiple of 4, which FBGEMM needs on the host"),
        ("adagrad", 1, "dim=1 is no multiple of 4, which FBGEMM needs on the host"),
        ("adam", 64, "FBGEMM has no optimizer 'adam' on the host"),
    ],
)
def test_host(optimizer: str, dim: int, expected: TbePlacement | str) -> None:
    for is_weighted in (False, True):
        assert ask(cpu.backend, optimizer, dim, is_weighted=is_weighted) == expected


@pytest.mark.parametrize("backend", [cpu.backend, cuda.backend, npu.backend])
def test_fbgemm_s_tables_add_float32(backend: Any) -> None:
    assert ask(backend, pooling="none") == "FBGEMM's tables add float32 rows here, not 'none' of torch.float32"
    assert "not 'sum' of torch.float16" in ask(backend, dtype=torch.float16)


def test_cuda() -> None:
    for optimizer in ("sgd", "adagrad", "rowwise_adagrad", "none"):
        assert ask(cuda.backend, optimizer, 4, is_weighted=True) == ON_DEVICE
    assert ask(cuda.backend, "sgd", 6) == "dim=6 is no multiple of 4, which FBGEMM needs on GPUs"
    assert ask(cuda.backend, "adam") == "FBGEMM's 'adam' counts forwards, not trained batches"


def test_another_accelerator_has_none() -> None:
    class Other(AcceleratorBackend):
        device_type = "other"

        def unavailable_reason(self) -> str | None:
            return None

    assert ask(Other()) == "FBGEMM has no tables on device 'other'"


# ---- fbgemm-ascend ---------------------------------------------------------------------------------------------------


class Machine:
    """An NPU machine on which fbgemm_ascend can be imported; what its import saw."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, device_name: str, error: Exception | None = None) -> None:
        self.seen: list[dict[str, str]] = []

        def load(name: str) -> ModuleType:
            self.seen.append({v: os.environ[v] for v in npu._CHIP_VARIABLES if v in os.environ})
            if error is not None:
                raise error
            monkeypatch.setitem(sys.modules, name, ModuleType(name))
            return sys.modules[name]

        device = SimpleNamespace(get_device_name=lambda: device_name)
        monkeypatch.setattr(torch, "get_device_module", lambda device_type: device)
        monkeypatch.setattr(importlib.util, "find_spec", lambda name: SimpleNamespace())
        monkeypatch.setattr(importlib, "import_module", load)


@pytest.mark.parametrize(
    ("device_name", "chip"), [("Ascend910B3", "A2"), ("Ascend910_9391", "A3"), ("Ascend950PR_957c", "A5")]
)
def test_the_chip_is_named_while_it_is_imported(monkeypatch: pytest.MonkeyPatch, device_name: str, chip: str) -> None:
    machine = Machine(monkeypatch, device_name)
    assert ask(npu.backend, dim=8) == ON_DEVICE
    assert ask(npu.backend, "adagrad", 16) == ON_DEVICE
    assert machine.seen == [{"FBGEMM_ASCEND_FORCE_BUILD_VER": chip}]
    assert "FBGEMM_ASCEND_FORCE_BUILD_VER" not in os.environ


@pytest.mark.parametrize("variable", ["FBGEMM_ASCEND_FORCE_BUILD_VER", "SOC_VERSION"])
def test_what_the_user_says_of_the_chip_counts(monkeypatch: pytest.MonkeyPatch, variable: str) -> None:
    machine = Machine(monkeypatch, "Ascend910")  # what some A3 machines say
    monkeypatch.setenv(variable, "A3")
    assert ask(npu.backend) == ON_DEVICE
    assert machine.seen == [{variable: "A3"}]
    assert os.environ[variable] == "A3"


def test_a_chip_is_not_guessed(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(monkeypatch, "Ascend910")
    assert ask(npu.backend) == (
        "fbgemm_ascend would guess the chip of 'Ascend910'. Set FBGEMM_ASCEND_FORCE_BUILD_VER to A2, A3, A5, whichever "
        "it is"
    )
    assert machine.seen == []


def test_an_import_that_fails_leaves_the_environment_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(monkeypatch, "Ascend910B3", OSError("libtorch_npu.so: undefined symbol"))
    reason = "fbgemm_ascend cannot be imported (OSError: libtorch_npu.so: undefined symbol)"
    assert [ask(npu.backend), ask(npu.backend, "adagrad")] == [reason, reason]
    assert len(machine.seen) == 1
    assert "FBGEMM_ASCEND_FORCE_BUILD_VER" not in os.environ


@pytest.mark.parametrize(
    ("request_", "reason"),
    [
        ({"dim": 12}, "dim=12 is no multiple of 8, which FBGEMM needs on NPUs"),
        ({"is_weighted": True}, "FBGEMM takes no weights on NPUs"),
        ({"optimizer": "adam"}, "FBGEMM's 'adam' counts forwards, not trained batches"),
    ],
)
def test_nothing_is_imported_for_what_it_lacks(
    monkeypatch: pytest.MonkeyPatch, request_: dict[str, Any], reason: str
) -> None:
    machine = Machine(monkeypatch, "Ascend910B3")
    assert ask(npu.backend, **request_) == reason
    assert machine.seen == []


def test_who_comes_first_keeps_fbgemm_s_operators(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(monkeypatch, "Ascend910B3")
    assert ask(cpu.backend) == ON_HOST
    assert "tables on the host use FBGEMM in this process" in ask(npu.backend)
    assert machine.seen == []
    monkeypatch.setattr(fbgemm_owner, "_is_taken_for_host", False)
    assert ask(npu.backend) == ON_DEVICE
    assert "fbgemm_ascend is imported, which breaks FBGEMM's tables on the host" in ask(cpu.backend)
    assert ask(npu.backend) == ON_DEVICE
