"""The device contract, and how a device's backend is found.

hybridrec names no device. A backend is an object that satisfies `DeviceBackend`, published under the entry point
group ``hybridrec.device_backends`` with the device type as its name.
"""

from __future__ import annotations

import functools
import importlib.metadata
from contextlib import AbstractContextManager
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from hybridrec.errors import BackendError, ConfigError

ENTRY_POINT_GROUP = "hybridrec.device_backends"

HOST = torch.device("cpu")
"""Host memory, in torch's words: where ids, stores and staging live, whatever the device."""


@runtime_checkable
class DeviceBackend(Protocol):
    """What hybridrec needs of a device type. All methods may be called from any thread."""

    device_type: str
    """As in ``torch.device(...).type``."""
    is_host_memory: bool
    """True: slots are ordinary host memory that the native core reads and writes directly, without staging."""
    collective_backend: str
    """The process group backend of this device's collectives."""

    def unavailable_reason(self) -> str | None:
        """None if the device can be used now, else why not and what to do."""

    def kernel_name(self, *, optimizer: str, dim: int, is_weighted: bool) -> str:
        """``"tbe"`` or ``"torch"``: the lookup kernel for such a table. Must not depend on sizes."""

    def empty_staging(self, num: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """Uninitialised [num] host memory from and to which copies of the device need not block (pinned)."""

    def make_stream(self, device: torch.device) -> Any:
        """A new queue of work of the device; has ``wait_event`` and ``wait_stream``, as `torch.Stream` does."""

    def current_stream(self, device: torch.device) -> Any:
        """The queue that this thread's operations go to."""

    def use_stream(self, stream: Any) -> AbstractContextManager[Any]:
        """Inside, this thread's operations go to ``stream``."""

    def record_event(self, stream: Any) -> Any:
        """A new event behind all that was given to ``stream``: ``synchronize`` and ``query``, as `torch.Event` has."""

    def record_stream(self, tensor: Tensor, stream: Any) -> None:
        """``tensor`` is used on ``stream`` too: its memory is given to nobody before that use is over."""

    def indexed(self, device: torch.device) -> torch.device:
        """The device with an index, where devices have one: this thread's current one if it has none."""

    def use_device(self, device: torch.device) -> None:
        """Make it this thread's current device. A new thread starts with the first one."""

    def synchronize(self, device: torch.device) -> None:
        """Wait for all work that was given to the device."""

    def memory_bytes(self, device: torch.device) -> tuple[int, int]:
        """(free, total) bytes of the memory that slots of this device are in."""


@functools.cache
def known_backends() -> dict[str, importlib.metadata.EntryPoint]:
    """Device type -> entry point, of every backend that is installed. Nothing is imported."""
    return {e.name: e for e in importlib.metadata.entry_points(group=ENTRY_POINT_GROUP)}


@functools.cache
def resolve_backend(device_type: str) -> DeviceBackend:
    """The backend of a device type.

    Raises:
        ConfigError: No backend of that name is installed; lists the known ones.
        BackendError: It is installed but cannot be used here; says why.
    """
    entry = known_backends().get(device_type)
    if entry is None:
        known = ", ".join(repr(n) for n in sorted(known_backends())) or "none: is hybridrec installed?"
        raise ConfigError(
            f"device {device_type!r}: no backend of that name. Known: {known}. Pass one of them, or install a package "
            f"that publishes an entry point {device_type!r} in the group {ENTRY_POINT_GROUP!r}."
        )
    backend: DeviceBackend = entry.load()
    reason = backend.unavailable_reason()
    if reason is not None:
        raise BackendError(f"device {device_type!r}: {reason}")
    return backend


def parse_device(device: str | torch.device | None) -> torch.device | None:
    """A torch.device from what users pass; None stays None.

    Raises:
        ConfigError: The string is no device that torch or an installed backend knows.
    """
    if device is None or isinstance(device, torch.device):
        return device
    if not isinstance(device, str):
        raise ConfigError(f"device={device!r} has type {type(device).__name__}. Pass a str or a torch.device.")
    device_type = device.partition(":")[0]
    if device_type != "meta" and device_type in known_backends():
        resolve_backend(device_type)  # may import what teaches torch the name
    try:
        return torch.device(device)
    except RuntimeError as e:
        known = ", ".join(repr(n) for n in sorted(known_backends()))
        raise ConfigError(f"device={device!r} is not a device: {e}. Known device types: {known}.") from e
