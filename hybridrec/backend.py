"""The device contract, and how a device's backend is found.

hybridrec names no device. A backend is an object that satisfies `DeviceBackend`, published under the entry point
group ``hybridrec.device_backends`` with the device type as its name. docs/backends.md shows one from a package of its
own.
"""

from __future__ import annotations

import functools
import importlib.metadata
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from hybridrec.errors import BackendError, ConfigError

ENTRY_POINT_GROUP = "hybridrec.device_backends"

HOST = torch.device("cpu")
"""Host memory, in torch's words: where ids, stores and staging live, whatever the device."""


@dataclass(frozen=True, kw_only=True)
class KernelRequest:
    """What a table needs of a lookup kernel: what a device's library may have or lack. Never sizes."""

    optimizer: str
    """``"none"`` (lookups alone), ``"sgd"``, ``"adagrad"``, ``"rowwise_adagrad"``, ``"adam"``."""
    dim: int
    is_weighted: bool
    pooling: str = "sum"
    """Kernels add; MEAN is divided after the sums of all ranks are added."""
    dtype: torch.dtype = torch.float32
    """Of rows and optimizer states."""


@dataclass(frozen=True, kw_only=True)
class TbePlacement:
    """How FBGEMM's table-batched embedding, its "TBE", is built for a device, in FBGEMM's words."""

    location: str
    """Name of an ``EmbeddingLocation``: where the rows are."""
    compute_device: str
    """Name of a ``ComputeDevice``: whose operators are called. FBGEMM has no names but its own; any device whose
    library registers operators under the same names is reached through one of them."""


@dataclass(frozen=True, kw_only=True)
class PlanningRates:
    """What plans assume of a device: constants of its kind, so that every rank plans the same, on any machine."""

    memory_bytes: int
    """Of one device."""
    memory_bytes_per_second: float
    """Between the device's cores and its memory."""
    link_bytes_per_second: float
    """Between host and device memory, one way."""


@runtime_checkable
class DeviceBackend(Protocol):
    """What hybridrec needs of a device type. All methods may be called from any thread.

    **Copies** between host and device are torch's own, ``copy_`` and ``to`` with ``non_blocking=True``, inside
    `use_stream`, between device memory and memory of `empty_staging`. A backend promises what torch's devices keep:

    - a copy is work of that stream, in order with its other work; the call may return before it is done;
    - the host reads what a copy brings, or writes over what it reads, only after ``synchronize`` of an event that was
      recorded behind it;
    - work of two streams is ordered by ``wait_event`` and ``wait_stream`` alone;
    - memory that the host lets go while a stream of `record_stream` uses it is not given to others before.

    ``is_host_memory`` backends have no copies: their calls are done when they return.
    """

    device_type: str
    """As in ``torch.device(...).type``."""
    is_host_memory: bool
    """True: slots are ordinary host memory that the native core reads and writes directly, without staging."""
    collective_backend: str
    """The process group backend of this device's collectives."""
    planner_alias: str
    """The device type, known to TorchRec's planner, that plans account this one as; itself if it is known there."""

    def unavailable_reason(self) -> str | None:
        """None if the device can be used now, else why not and what to do. May import what teaches torch its name."""

    def tbe_placement(self, request: KernelRequest) -> TbePlacement | str:
        """How FBGEMM's tables serve such a table here; or, as a str, why not, and then plain operators do.

        May import what registers FBGEMM's operators for the device. An offer is tried with known values before rows
        are trained with it, and not used if they come out wrong.
        """

    def planning_rates(self) -> PlanningRates | None:
        """None: TorchRec's own constants for the alias."""

    def self_test(self, device: torch.device) -> None:
        """Copies, streams and events with known values; called before a collection's slots are made.

        Raises:
            BackendError: Something else arrived; names what and where.
        """

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


_CONTRACT = (
    *DeviceBackend.__annotations__,
    *(name for name, value in vars(DeviceBackend).items() if callable(value) and not name.startswith("_")),
)


@functools.cache
def known_backends() -> dict[str, importlib.metadata.EntryPoint]:
    """Device type -> entry point, of every backend that is installed. Nothing is imported.

    Raises:
        ConfigError: Two packages publish different backends for one device type.
    """
    known: dict[str, importlib.metadata.EntryPoint] = {}
    for entry in importlib.metadata.entry_points(group=ENTRY_POINT_GROUP):
        other = known.setdefault(entry.name, entry)
        if other.value != entry.value:
            raise ConfigError(
                f"device {entry.name!r}: two backends are installed, {_origin(other)} and {_origin(entry)}. Uninstall "
                "one."
            )
    return known


@functools.cache
def load_backend(device_type: str) -> DeviceBackend:
    """The backend of a device type, whether or not the device can be used here.

    Raises:
        ConfigError: No backend of that name is installed; lists the known ones.
        BackendError: It cannot be imported, or is no `DeviceBackend`; names the package.
    """
    entry = known_backends().get(device_type)
    if entry is None:
        known = ", ".join(repr(n) for n in sorted(known_backends())) or "none: is hybridrec installed?"
        raise ConfigError(
            f"device {device_type!r}: no backend of that name. Known: {known}. Pass one of them, or install a package "
            f"that publishes an entry point {device_type!r} in the group {ENTRY_POINT_GROUP!r}."
        )
    try:
        backend: DeviceBackend = entry.load()
    except Exception as e:  # a third party's module may raise anything
        raise BackendError(
            f"device {device_type!r}: its backend {_origin(entry)} cannot be imported ({type(e).__name__}: {e}). "
            "Repair or uninstall that package."
        ) from e
    missing = [name for name in _CONTRACT if not hasattr(backend, name)]
    if missing:
        raise BackendError(
            f"device {device_type!r}: its backend {_origin(entry)} lacks {', '.join(missing)} of "
            "hybridrec.backend.DeviceBackend. Install a version of that package for this version of hybridrec."
        )
    return backend


@functools.cache
def resolve_backend(device_type: str) -> DeviceBackend:
    """The backend of a device type that can be used here.

    Raises:
        ConfigError: See `load_backend`.
        BackendError: See `load_backend`; or the device cannot be used here: says why.
    """
    backend = load_backend(device_type)
    reason = backend.unavailable_reason()
    if reason is not None:
        raise BackendError(f"device {device_type!r}: {reason}")
    return backend


def _origin(entry: importlib.metadata.EntryPoint) -> str:
    return f"{entry.value!r} of {entry.dist.name if entry.dist is not None else 'an unknown package'}"


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
