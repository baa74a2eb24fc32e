"""The host's backend, and what the others say on a machine that lacks them."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch

from device_backends import cpu, cuda, npu
from device_backends.base import AcceleratorBackend
from hybridrec.backend import HOST, DeviceBackend, known_backends, resolve_backend
from hybridrec.errors import BackendError


@pytest.mark.parametrize(
    ("backend", "device_type", "is_host_memory", "collectives"),
    [(cpu.backend, "cpu", True, "gloo"), (cuda.backend, "cuda", False, "nccl"), (npu.backend, "npu", False, "hccl")],
)
def test_backends_satisfy_the_contract(
    backend: DeviceBackend, device_type: str, is_host_memory: bool, collectives: str
) -> None:
    assert isinstance(backend, DeviceBackend)
    assert backend.device_type == device_type
    assert backend.is_host_memory is is_host_memory
    assert backend.collective_backend == collectives


def test_entry_points_lead_to_them() -> None:
    assert {"cpu", "cuda", "npu"} <= set(known_backends())
    assert resolve_backend("cpu") is cpu.backend


def test_host_backend() -> None:
    assert cpu.backend.unavailable_reason() is None
    staging = cpu.backend.empty_staging(10)
    assert (staging.shape, staging.dtype, staging.device) == ((10,), torch.float32, HOST)
    cpu.backend.synchronize(HOST)
    cpu.backend.self_test(HOST)
    free, total = cpu.backend.memory_bytes(HOST)
    assert 1 << 20 < free <= total


def test_host_memory_is_what_machine_and_cgroup_allow(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    meminfo, v1, v2 = tmp_path / "meminfo", tmp_path / "v1", tmp_path / "v2"
    monkeypatch.setattr(cpu, "_MEMINFO", meminfo)
    monkeypatch.setattr(cpu, "_CGROUP_LIMITS", (v2, v1))
    with pytest.raises(BackendError, match=r"device 'cpu': .*meminfo does not say how much memory.*Run on Linux"):
        cpu.backend.memory_bytes(HOST)
    meminfo.write_text("MemTotal:    2000 kB\nMemFree:     10 kB\nMemAvailable:    1000 kB\nHugePages_Total:  0\n")
    assert cpu.backend.memory_bytes(HOST) == (1000 * 1024, 2000 * 1024)
    v2.write_text("max\n")
    v1.write_text("9223372036854771712\n")
    assert cpu.backend.memory_bytes(HOST) == (1000 * 1024, 2000 * 1024)
    v2.write_text("1500000\n")
    assert cpu.backend.memory_bytes(HOST) == (1000 * 1024, 1500000)
    v1.write_text("4096\n")
    assert cpu.backend.memory_bytes(HOST) == (4096, 4096)


def test_rates_that_plans_assume() -> None:
    assert cpu.backend.planning_rates() is None
    assert cuda.backend.planning_rates() is None
    rates = npu.backend.planning_rates()
    assert rates is not None
    assert rates.link_bytes_per_second < rates.memory_bytes_per_second
    assert rates.memory_bytes == 64 * 10**9


@pytest.fixture
def _fresh_reasons() -> None:
    cuda._unavailable_reason.cache_clear()
    npu._unavailable_reason.cache_clear()


def test_cuda_without_cuda_build(monkeypatch: pytest.MonkeyPatch, _fresh_reasons: None) -> None:
    monkeypatch.setattr(torch.version, "cuda", None)
    reason = cuda.backend.unavailable_reason()
    assert reason is not None
    assert "built without CUDA. Install hybridrec[cuda]" in reason
    with pytest.raises(BackendError, match="device 'cuda': torch .* is built without CUDA"):
        cuda.backend.memory_bytes(torch.device("cuda"))
    cuda._unavailable_reason.cache_clear()


def test_cuda_without_gpu(monkeypatch: pytest.MonkeyPatch, _fresh_reasons: None) -> None:
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    reason = cuda.backend.unavailable_reason()
    assert reason is not None
    assert "finds no usable GPU. Check that nvidia-smi" in reason
    cuda._unavailable_reason.cache_clear()


def test_npu_without_torch_npu(monkeypatch: pytest.MonkeyPatch, _fresh_reasons: None) -> None:
    monkeypatch.setattr(torch.version, "cuda", None)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert npu._import_torch_npu() == (
        "torch_npu is not installed. Install hybridrec[npu] in a fresh environment, or use device 'cpu'."
    )


def test_npu_with_a_cuda_build_is_not_even_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    monkeypatch.setitem(sys.modules, "torch_npu", ModuleType("torch_npu"))
    reason = npu._import_torch_npu()
    assert reason is not None
    assert "is a CUDA build, with which torch_npu does not work" in reason


@pytest.mark.parametrize("error", [ImportError("libhccl.so: cannot open"), OSError("libhccl.so"), RuntimeError("x")])
def test_npu_without_cann(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    def fail(name: str) -> ModuleType:
        raise error

    monkeypatch.setattr(torch.version, "cuda", None)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: SimpleNamespace())
    monkeypatch.setattr(importlib, "import_module", fail)
    reason = npu._import_torch_npu()
    assert reason is not None
    assert str(error) in reason
    assert "Source CANN's environment" in reason
    assert "TORCH_DEVICE_BACKEND_AUTOLOAD=0" in reason


def test_accelerator_uses_the_device_module(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    module = SimpleNamespace(
        synchronize=lambda device: calls.append(device),
        mem_get_info=lambda device: (1, 2),
    )

    class Fake(AcceleratorBackend):
        device_type = "fake"
        collective_backend = "fake"
        planner_alias = "fake"

        def unavailable_reason(self) -> str | None:
            return None

    monkeypatch.setattr(torch, "get_device_module", lambda name: module)
    backend, device = Fake(), torch.device("meta")
    backend.synchronize(device)
    assert calls == [device]
    assert backend.memory_bytes(device) == (1, 2)
