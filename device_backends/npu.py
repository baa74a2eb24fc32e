"""Ascend NPUs, through torch-npu.

Tables are served by fbgemm-ascend's operators where it has them, by plain PyTorch operators elsewhere. Nothing in this
module was run on an NPU; it uses only what torch-npu documents to be there under the names of
`torch.get_device_module`, and what fbgemm-ascend's wheels and documents say of its operators.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.util
import os
import sys
from collections.abc import Iterator

import torch

from device_backends import fbgemm_owner
from device_backends.base import AcceleratorBackend, tbe_limit
from hybridrec.backend import KernelRequest, PlanningRates, TbePlacement

_TBE = TbePlacement(location="DEVICE", compute_device="CUDA")
"""FBGEMM knows no NPU: tables on "its GPU" call the operators that fbgemm-ascend registers for the rows' device."""
_CHIP_VARIABLES = ("FBGEMM_ASCEND_FORCE_BUILD_VER", "SOC_VERSION")
_CHIPS = {"Ascend910B": "A2", "Ascend910_93": "A3", "Ascend95": "A5"}
"""Beginning of a device's name -> whose kernels fbgemm-ascend has for it."""


class NpuBackend(AcceleratorBackend):
    """Ascend NPUs through torch-npu and CANN."""

    device_type = "npu"
    collective_backend = "hccl"
    planner_alias = "cuda"  # TorchRec's planner knows no NPU; tiers are accounted as on this device

    def unavailable_reason(self) -> str | None:
        """None if an NPU can be used now, else why not and what to do. Imports torch_npu, which teaches torch "npu"."""
        return _unavailable_reason()

    def tbe_placement(self, request: KernelRequest) -> TbePlacement | str:
        """fbgemm-ascend's operators. Imports it, unless tables in host memory use FBGEMM already.

        Source: its documents (1.5): float32, dims that are a multiple of 8, no weights. Its Adam is not used, since
        FBGEMM's counts forwards, not trained batches.
        """
        if request.optimizer == "adam":
            return "FBGEMM's 'adam' counts forwards, not trained batches"
        limit = tbe_limit(request, where="on NPUs", dim_multiple=8, takes_weights=False)
        return limit or fbgemm_owner.why_not_ascend() or _import_fbgemm_ascend() or _TBE

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


@functools.cache
def _import_fbgemm_ascend() -> str:
    """Register its operators; why that is not possible, or nothing."""
    name = fbgemm_owner.ASCEND_MODULE
    if name in sys.modules:
        return ""
    if importlib.util.find_spec(name) is None:
        return f"{name} is not installed"
    device_name = str(torch.get_device_module("npu").get_device_name())
    chip = next((chip for start, chip in _CHIPS.items() if device_name.startswith(start)), "")
    if not chip and not any(os.environ.get(variable) for variable in _CHIP_VARIABLES):
        return (
            f"{name} would guess the chip of {device_name!r}. Set {_CHIP_VARIABLES[0]} to "
            f"{', '.join(_CHIPS.values())}, whichever it is"
        )
    try:
        with _chip_named(chip):
            importlib.import_module(name)
    except Exception as e:  # a library of a driver may raise anything
        return f"{name} cannot be imported ({type(e).__name__}: {e})"
    return ""


@contextlib.contextmanager
def _chip_named(chip: str) -> Iterator[None]:
    """Tell fbgemm-ascend, while it is imported, what it would take for an A5; unless the user says it."""
    if any(os.environ.get(variable) for variable in _CHIP_VARIABLES):
        yield
        return
    os.environ[_CHIP_VARIABLES[0]] = chip
    try:
        yield
    finally:
        del os.environ[_CHIP_VARIABLES[0]]


backend = NpuBackend()
