"""Puts the simulated device in place of torch_npu. It cannot be taken away again: never in pytest's own process."""

from __future__ import annotations

import importlib.machinery
import os
import sys
import types
from typing import Any

import torch
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

from tests.simnpu.collectives import register_hccl
from tests.simnpu.kernels import register_kernels
from tests.simnpu.memory import DEVICE_TYPE, allocate_bytes, set_memory_bytes
from tests.simnpu.ordering import carry_stream_into_backward, timeline
from tests.simnpu.streams import make_module

MEMORY_VARIABLE = "SIMNPU_MEMORY_BYTES"
"""Environment: memory of the device, unless `install` is told."""

_libraries: list[torch.library.Library] = []


def install(*, memory_bytes: int | None = None) -> None:
    """Teach this process the device "npu" and the collectives "hccl"; ``import torch_npu`` succeeds from now on.

    Args:
        memory_bytes: Of the device; by default what the environment says, else 64 GiB.

    Raises:
        RuntimeError: torch_npu itself is there.
    """
    if not _libraries:
        if hasattr(torch, DEVICE_TYPE):
            raise RuntimeError("torch.npu is there already: the simulated device cannot be installed beside torch_npu.")
        module = make_module()
        _setup_privateuseone_for_python_backend(DEVICE_TYPE, backend_module=module)
        _libraries.extend(register_kernels())
        _patch_storage()
        _patch_accelerator(module)
        carry_stream_into_backward()
        register_hccl()
        torch_npu = types.ModuleType("torch_npu")
        torch_npu.__spec__ = importlib.machinery.ModuleSpec("torch_npu", None)  # for importlib.util.find_spec
        torch_npu.npu = module  # type: ignore[attr-defined]
        sys.modules["torch_npu"] = torch_npu
        memory_bytes = memory_bytes or int(os.environ.get(MEMORY_VARIABLE, 0)) or None
    if memory_bytes is not None:
        set_memory_bytes(memory_bytes)


def _patch_storage() -> None:
    """Storages on the device by Python, as `torch.load` makes them: their constructor asks a C++ allocator."""
    make_storage = torch.UntypedStorage.__new__

    def new(cls: type, *args: Any, device: Any = None, **kwargs: Any) -> Any:
        if device is not None and torch.device(device).type == DEVICE_TYPE:
            with timeline.lock:
                return allocate_bytes(args[0] if args else 0, "storage").untyped_storage()
        return make_storage(cls, *args, **({} if device is None else {"device": device}), **kwargs)

    def tag(storage: Any) -> str | None:
        return f"{DEVICE_TYPE}:0" if storage.device.type == DEVICE_TYPE else None

    def restore(storage: Any, location: str) -> Any:
        if not location.startswith(DEVICE_TYPE):
            return None
        return torch.UntypedStorage(storage.nbytes(), device=DEVICE_TYPE).copy_(storage)

    torch.UntypedStorage.__new__ = staticmethod(new)  # type: ignore[assignment]
    torch.serialization.register_package(19, tag, restore)


def _patch_accelerator(module: types.ModuleType) -> None:
    """The calls of `torch.accelerator` that ask a C++ guard or allocator."""
    for name in (
        "synchronize",
        "current_stream",
        "set_stream",
        "memory_allocated",
        "max_memory_allocated",
        "empty_cache",
    ):
        setattr(torch.accelerator, name, getattr(module, name))
