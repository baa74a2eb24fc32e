"""What the backends of accelerators share: everything that `torch.get_device_module` offers by the same name."""

from __future__ import annotations

import abc
from contextlib import AbstractContextManager
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from hybridrec.backend import KernelRequest, PlanningRates, TbePlacement
from hybridrec.errors import BackendError

_TEST_ROWS, _TEST_DIM = 4096, 64
"""One MiB: more than a driver copies through a buffer of its own."""


_TBE_OPTIMIZERS = frozenset({"none", "sgd", "adagrad", "rowwise_adagrad"})


def tbe_limit(request: KernelRequest, *, where: str, dim_multiple: int, takes_weights: bool) -> str:
    """What FBGEMM's tables lack for a request, whatever the device; empty: nothing.

    Args:
        request: Of a table.
        where: For the message: "on the host".
        dim_multiple: Dims must be a multiple of it.
        takes_weights: Whether ids may carry weights.
    """
    if (request.pooling, request.dtype) != ("sum", torch.float32):
        return f"FBGEMM's tables add float32 rows here, not {request.pooling!r} of {request.dtype}"
    if request.optimizer not in _TBE_OPTIMIZERS:
        return f"FBGEMM has no optimizer {request.optimizer!r} {where}"
    if request.dim % dim_multiple:
        return f"dim={request.dim} is no multiple of {dim_multiple}, which FBGEMM needs {where}"
    if request.is_weighted and not takes_weights:
        return f"FBGEMM takes no weights {where}"
    return ""


class AcceleratorBackend(abc.ABC):
    """A device with memory of its own, reached through torch's device module. Satisfies `DeviceBackend`.

    All methods may be called from any thread.
    """

    device_type: str
    is_host_memory = False
    collective_backend: str
    planner_alias: str

    @abc.abstractmethod
    def unavailable_reason(self) -> str | None:
        """None if the device can be used now, else why not and what to do."""

    def tbe_placement(self, request: KernelRequest) -> TbePlacement | str:
        """None of FBGEMM's: plain PyTorch operators need nothing that a device's own library may lack."""
        return f"FBGEMM has no tables on device {self.device_type!r}"

    def planning_rates(self) -> PlanningRates | None:
        """TorchRec's constants for the alias."""
        return None

    def self_test(self, device: torch.device) -> None:
        """Rows go to the device on one stream, are added to and taken by number on another, and come back on the first.

        Raises:
            BackendError: Other values came back.
        """
        rows = torch.arange(_TEST_ROWS * _TEST_DIM, dtype=torch.float32).view(_TEST_ROWS, _TEST_DIM)
        sent, received = self.empty_staging(rows.numel()), self.empty_staging(rows.numel())
        sent.copy_(rows.view(-1))
        received.fill_(-1.0)
        side, current = self.make_stream(device), self.current_stream(device)
        with self.use_stream(side):
            there = sent.to(device, non_blocking=True)
            arrived = self.record_event(side)
        current.wait_event(arrived)
        self.record_stream(there, current)
        order = torch.arange(_TEST_ROWS - 1, -1, -1, device=device)
        turned = there.view(_TEST_ROWS, _TEST_DIM).add(1.0).index_select(0, order).view(-1)
        side.wait_event(self.record_event(current))
        with self.use_stream(side):
            received.copy_(turned, non_blocking=True)
            self.record_stream(turned, side)
            back = self.record_event(side)
        back.synchronize()
        expected = rows.flip(0).view(-1) + 1.0
        wrong = (received != expected).nonzero().flatten()
        if wrong.numel():
            first = int(wrong[0])
            raise BackendError(
                f"device {str(device)!r}: self-test of copies, streams and events: {wrong.numel():,} of "
                f"{expected.numel():,} values came back wrong; value {first} is {received[first].item():g}, not "
                f"{expected[first].item():g}. Do not train on this device: check its driver and the versions of torch "
                "and of the device's library (python -m hybridrec.doctor)."
            )

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
