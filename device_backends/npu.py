"""Ascend NPUs, through torch-npu.

Every table is served by plain PyTorch operators here. fbgemm-ascend is not used: importing it replaces FBGEMM's
autograd kernels for every device, which breaks host tables in the same process. Nothing in this module was run on an
NPU; it uses only what torch-npu documents to be there under the names of `torch.get_device_module`.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util

import torch

from device_backends.base import AcceleratorBackend
from hybridrec.backend import PlanningRates


class NpuBackend(AcceleratorBackend):
    """Ascend NPUs through torch-npu and CANN."""

    device_type = "npu"
    collective_backend = "hccl"
    planner_alias = "cuda"  # TorchRec's planner knows no NPU; tiers are accounted as on this device

    def unavailable_reason(self) -> str | None:
        """None if an NPU can be used now, else why not and what to do. Imports torch_npu, which teaches torch "npu"."""
        return _unavailable_reason()

    def planning_rates(self) -> PlanningRates | None:
        """Of an Atlas 800T A2 (Ascend 910B), as published, not measured: 64 GB at 1.6 TB/s, PCIe 5.0 x16.

        Half of the link's 64 GB/s is assumed, as TorchRec does for GPUs.
        """
        return PlanningRates(memory_bytes=64 * 10**9, memory_bytes_per_second=1.6e12, link_bytes_per_second=32e9)


@functools.cache
def _unavailable_reason() -> str | None:
    # torch_npu may have been imported by torch itself (autoload), or by nobody yet.
    if not hasattr(torch, "npu"):
        reason = _import_torch_npu()
        if reason is not None:
            return reason
    if not torch.get_device_module("npu").is_available():
        return (
            "torch_npu is imported but finds no usable NPU. Check that npu-smi info lists one and that "
            "ASCEND_RT_VISIBLE_DEVICES does not hide it, or use device 'cpu'."
        )
    return None


def _import_torch_npu() -> str | None:
    if torch.version.cuda is not None:
        # torch_npu in a CUDA build of torch can abort the process at import: do not even try.
        return (
            f"torch {torch.__version__} is a CUDA build, with which torch_npu does not work. Install hybridrec[npu], "
            "which brings torch's CPU build, in a fresh environment."
        )
    if importlib.util.find_spec("torch_npu") is None:
        return "torch_npu is not installed. Install hybridrec[npu] in a fresh environment, or use device 'cpu'."
    try:
        importlib.import_module("torch_npu")
    except (ImportError, OSError, RuntimeError) as e:
        return (
            f"torch_npu cannot be imported ({e}). Source CANN's environment (set_env.sh of the toolkit, CANN 9.1) in "
            "this shell and check that torch and torch_npu have the same version. To use device 'cpu' on this "
            "machine without CANN, set TORCH_DEVICE_BACKEND_AUTOLOAD=0 before torch is imported."
        )
    return None


backend = NpuBackend()
