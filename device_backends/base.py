"""What the backends of accelerators share: everything that `torch.get_device_module` offers by the same name."""

from __future__ import annotations

import abc
from contextlib import AbstractContextManager
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from hybridrec.errors import BackendError


class AcceleratorBackend(abc.ABC):
    """A device with memory of its own, reached through torch's device module. Satisfies `DeviceBackend`.

    All methods may be called from any thread.
    """

    device_type: str
    is_host_memory = False
    collective_backend: str

    @abc.abstractmethod
    def unavailable_reason(self) -> str | None:
        """None if the device can be used now, else why not and what to do."""

    def kernel_name(self, *, optimizer: str, dim: int, is_weighted: bool) -> str:
        """``"torch"``: plain PyTorch operators, which need nothing that a device's own library may lack."""
        return "torch"

    def empty_staging(self, num: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """Uninitialised [num] in pinned host memory, so that copies to and from the device can overlap."""
        return torch.empty(num, dtype=dtype, pin_memory=True)

    def make_stream(self, device: torch.device) -> Any:
        """A new stream of the device."""
        with self._module().device(device):
            return self._module().Stream()

    def current_stream(self, device: torch.device) -> Any:
        """The stream that this thread's operations go to."""
        return self._module().current_stream(device)

    def use_stream(self, stream: Any) -> AbstractContextManager[Any]:
        """Inside, this thread's operations go to ``stream``."""
        context: AbstractContextManager[Any] = self._module().stream(stream)
        return context

    def record_event(self, stream: Any) -> Any:
        """A new event behind all that was given to ``stream``."""
        event = self._module().Event()
        event.record(stream)
        return event

    def record_stream(self, tensor: Tensor, stream: Any) -> None:
        """``tensor``'s memory is given to nobody before what ``stream`` was given so far is done."""
        tensor.record_stream(stream)

    def indexed(self, device: torch.device) -> torch.device:
        """The device with an index: this thread's current one if it has none."""
        return device if device.index is not None else torch.device(device.type, self._module().current_device())

    def use_device(self, device: torch.device) -> None:
        """Make it this thread's current device."""
        self._module().set_device(device)

    def synchronize(self, device: torch.device) -> None:
        """Wait for all work that was given to the device."""
        self._module().synchronize(device)

    def memory_bytes(self, device: torch.device) -> tuple[int, int]:
        """(free, total) bytes of the device's memory, as its driver reports them."""
        free, total = self._module().mem_get_info(device)
        return int(free), int(total)

    def _module(self) -> ModuleType:
        """Raises BackendError, saying why, if the device cannot be used."""
        reason = self.unavailable_reason()
        if reason is not None:
            raise BackendError(f"device {self.device_type!r}: {reason}")
        module: ModuleType = torch.get_device_module(self.device_type)
        return module
