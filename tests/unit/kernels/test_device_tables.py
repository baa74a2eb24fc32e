"""FBGEMM's tables for a device: what its module is built with, and the trial before it is used."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hybridrec._compat import fbgemm
from hybridrec.backend import HOST, DeviceBackend, KernelRequest, TbePlacement, resolve_backend
from hybridrec.errors import BackendError
from hybridrec.kernels import factory, probe, tbe_kernel
from hybridrec.kernels.factory import kernel_choice, make_kernel
from hybridrec.kernels.optimizer import OptimizerKind, OptimizerSpec
from hybridrec.kernels.tbe_kernel import TbeKernel
from tests.unit.kernels.kernel_cases import make_spec


class OnDevice:
    """The host's backend, as if it were a device whose tables FBGEMM builds like those of a GPU."""

    is_host_memory = False

    def __init__(self, placement: TbePlacement | str) -> None:
        self._host, self._placement = resolve_backend("cpu"), placement

    def tbe_placement(self, request: KernelRequest) -> TbePlacement | str:
        return self._placement

    def __getattr__(self, name: str) -> Any:
        return getattr(self._host, name)


def use(monkeypatch: pytest.MonkeyPatch, placement: TbePlacement | str) -> None:
    backend: DeviceBackend = OnDevice(placement)
    for module in (factory, tbe_kernel):
        monkeypatch.setattr(module, "resolve_backend", lambda device_type: backend)
    probe.why_tbe_fails.cache_clear()
    factory._log_once.cache_clear()


ON_GPU = TbePlacement(location="DEVICE", compute_device="CUDA")


class Recorded:
    """In place of FBGEMM's module: keeps its arguments, and has what `TbeKernel` asks of it."""

    def __init__(self, **arguments: Any) -> None:
        self.arguments = arguments
        self.specs = arguments["embedding_specs"]

    def split_embedding_weights(self) -> list[torch.Tensor]:
        return [torch.zeros(rows, dim) for rows, dim, _, _ in self.specs]

    def split_optimizer_states(self) -> list[list[torch.Tensor]]:
        return [[torch.zeros(rows)] for rows, _, _, _ in self.specs]

    def set_learning_rate(self, value: float) -> None:
        """Not asked."""


def test_arguments_of_fbgemm_s_module_for_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, ON_GPU)
    monkeypatch.setattr(tbe_kernel, "SplitTableBatchedEmbeddingBagsCodegen", Recorded)
    kernel = TbeKernel(make_spec("rowwise_adagrad", (8, 16), num_slots=5, feature_table=(0, 0, 1)))
    given = kernel._tbe.arguments
    where = (fbgemm.EmbeddingLocation.DEVICE, fbgemm.ComputeDevice.CUDA)
    assert given["embedding_specs"] == [(5, 8, *where), (5, 16, *where)]
    assert given["feature_table_map"] == [0, 0, 1]
    assert given["device"] == HOST
    assert given["bounds_check_mode"] == fbgemm.BoundsCheckMode.NONE
    assert given["pooling_mode"] == fbgemm.PoolingMode.SUM
    assert given["optimizer"] == fbgemm.EmbOptimType.EXACT_ROWWISE_ADAGRAD
    assert "preallocated_host_buffers" not in given
    assert [a.shape for a in kernel.slot_arrays(1).row_wise_states] == [(5,)]


def test_rows_and_states_are_views_of_fbgemm_s_buffers_for_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, ON_GPU)
    kernel = TbeKernel(make_spec("adagrad", (8, 16), num_slots=5))
    for t, dim in enumerate((8, 16)):
        arrays = kernel.slot_arrays(t)
        assert [a.shape for a in (arrays.weights, *arrays.row_states)] == [(5, dim), (5, dim)]
        assert not arrays.weights.any() and not arrays.row_states[0].any()
        arrays.weights.fill_(t + 1.0)
        arrays.row_states[0].fill_(t + 10.0)
    assert kernel._tbe.weights_dev.tolist() == [1.0] * 40 + [2.0] * 80
    assert kernel._tbe.momentum1_dev.tolist() == [10.0] * 40 + [11.0] * 80
    kernel.resize([7, 5])
    assert kernel.slot_arrays(0).weights[:, 0].tolist() == [1.0] * 5 + [0.0] * 2
    assert kernel.slot_arrays(1).row_states[0][:, 0].tolist() == [11.0] * 5
    assert kernel._tbe.momentum1_dev.shape == (56 + 80,)


def test_names_that_fbgemm_does_not_have() -> None:
    with pytest.raises(BackendError, match="EmbeddingLocation has no 'MOON'"):
        fbgemm.table_placement("MOON", "CPU")
    with pytest.raises(BackendError, match="ComputeDevice has no 'TPU'"):
        fbgemm.table_placement("HOST", "TPU")


# ---- the trial -------------------------------------------------------------------------------------------------------


def choice(kind: OptimizerKind, **more: Any) -> factory.KernelChoice:
    return kernel_choice(OptimizerSpec(kind=kind, **more), dim=8, is_weighted=False, device=HOST)


@pytest.mark.parametrize("kind", ["sgd", "adagrad", "rowwise_adagrad"])
@pytest.mark.parametrize("is_weighted", [False, True])
@pytest.mark.parametrize("dim", [4, 8, 64, 132])
def test_fbgemm_s_kernels_on_the_host_pass(kind: OptimizerKind, is_weighted: bool, dim: int) -> None:
    """The trial asks for nothing that a right kernel does not have."""
    assert probe.why_tbe_fails(kind, dim=dim, is_weighted=is_weighted, device=HOST) == ""


def test_without_fbgemm_s_cuda_operators_plain_ones_serve(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """FBGEMM's CPU build lets itself be built for a GPU, and raises when it is called."""
    use(monkeypatch, ON_GPU)
    with caplog.at_level("INFO", "hybridrec"):
        found = [choice("adagrad"), choice("adagrad"), choice("sgd")]
    assert [c.name for c in found] == ["torch"] * 3
    assert "FBGEMM's 'adagrad', dim 8: RuntimeError: " in found[0].reason
    assert [r.levelname for r in caplog.records] == ["WARNING"] * 2  # one an optimizer
    assert "tables with optimizer 'adagrad' use plain operators: FBGEMM's 'adagrad'" in caplog.records[0].getMessage()


def test_a_limit_that_a_backend_names_is_told_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    use(monkeypatch, "there is no library")
    with caplog.at_level("INFO", "hybridrec"):
        assert [choice("sgd"), choice("sgd")] == [factory.KernelChoice("torch", "there is no library")] * 2
    assert [(r.levelname, "there is no library" in r.getMessage()) for r in caplog.records] == [("INFO", True)]


def test_weight_decay_is_not_even_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(factory, "resolve_backend", SimpleNamespace())
    assert choice("sgd", weight_decay=0.1) == factory.KernelChoice("torch", "FBGEMM's kernels ignore weight_decay")


def test_a_kernel_is_made_as_the_ranks_agreed() -> None:
    assert type(make_kernel(make_spec("sgd", (8,)), "torch")).__name__ == "TorchKernel"
    assert type(make_kernel(make_spec("sgd", (8,)), "tbe")).__name__ == "TbeKernel"
