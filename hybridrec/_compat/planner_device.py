"""TorchRec's planner on devices that it does not know: they are accounted like one that it knows.

A backend's ``planner_alias`` names that device type. Wherever the planner compares a topology's device with its own
short list, the topology shows the alias for the length of the call; everything else, the plan above all, has the
true name. Devices that TorchRec knows pass through unchanged.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import torch

from hybridrec._compat.torchrec import _fail, _symbol
from hybridrec.backend import HOST, known_backends, load_backend, parse_device, resolve_backend
from hybridrec.errors import BackendError

_PLANNER = "torchrec.distributed.planner"


@functools.cache
def planner_alias(device_type: str) -> str:
    """The device type, known to TorchRec's planner, that this one is accounted like; itself without a backend."""
    return load_backend(device_type).planner_alias if device_type in known_backends() else device_type


def _rates_of(device_type: str) -> dict[str, float]:
    """Arguments of a topology, in bytes and bytes a millisecond, that its maker need not give."""
    rates = load_backend(device_type).planning_rates() if device_type in known_backends() else None
    if rates is None:
        return {}
    return {
        "hbm_cap": rates.memory_bytes,
        "hbm_mem_bw": rates.memory_bytes_per_second / 1e3,
        "hbm_to_ddr_mem_bw": rates.link_bytes_per_second / 1e3,
    }


def install_device_wraps() -> None:
    """Wrap what compares device names. Call once a process.

    Raises:
        BackendError: TorchRec's internals moved; names the symbol.
    """
    _wrap_topology()
    _wrap_kernel_config()
    _wrap_enumerator()
    _wrap_default_device()
    _wrap_placement()
    reservations = importlib.import_module(f"{_PLANNER}.storage_reservations")
    _show_alias(reservations, "_reserve_dense_storage")
    # TorchRec 1.5 reserves what 1.8 asks its own function about
    _show_alias(
        reservations, "_get_kjt_storage" if hasattr(reservations, "_get_kjt_storage") else "_reserve_kjt_storage"
    )
    _show_alias(_symbol(f"{_PLANNER}.stats", "EmbeddingStats"), "_log_rank_mem_usage_and_perf")


@contextlib.contextmanager
def shown_as_alias(topology: Any) -> Iterator[None]:
    """Within: the topology's device has the alias's name."""
    device_type = topology._compute_device
    topology._compute_device = planner_alias(device_type)
    try:
        yield
    finally:
        topology._compute_device = device_type


def _show_alias(owner: Any, name: str) -> None:
    """Wrap a function that is given a topology by keyword or position."""
    inner = getattr(owner, name, None)
    if inner is None:
        raise _fail(f"{getattr(owner, '__module__', owner.__name__)}.{name}", "does not exist")
    signature = inspect.signature(inner)
    if "topology" not in signature.parameters:
        raise _fail(f"{inner.__module__}.{name}", "has no parameter 'topology'")

    @functools.wraps(inner)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        with shown_as_alias(signature.bind(*args, **kwargs).arguments["topology"]):
            return inner(*args, **kwargs)

    setattr(owner, name, wrapped)


def _wrap_topology() -> None:
    topology = _symbol(
        f"{_PLANNER}.types",
        "Topology",
        parameters=("world_size", "compute_device", "hbm_cap", "ddr_cap", "hbm_mem_bw", "hbm_to_ddr_mem_bw"),
    )
    inner = topology.__init__
    signature = inspect.signature(inner)

    @functools.wraps(inner)
    def init(self: Any, world_size: int, compute_device: str, *args: Any, **kwargs: Any) -> None:
        alias = planner_alias(compute_device)
        if alias != compute_device:
            _teach_name(compute_device)
        bound = signature.bind(self, world_size, alias, *args, **kwargs)
        for name, value in _rates_of(compute_device).items():
            if bound.arguments.get(name) is None:
                bound.arguments[name] = value
        inner(*bound.args, **bound.kwargs)
        if self._compute_device != alias:
            raise _fail("planner.types.Topology._compute_device", "is not where the topology keeps its device")
        self._compute_device = compute_device

    topology.__init__ = init


def _teach_name(device_type: str) -> None:
    """A plan's placements are torch devices: let the backend import what makes torch know the name."""
    try:
        torch.device(device_type)
    except RuntimeError:
        parse_device(device_type)


def _wrap_kernel_config() -> None:
    """TorchRec 1.8's other way to a topology; 1.5 has none."""
    config = getattr(importlib.import_module(f"{_PLANNER}.types"), "KernelConfig", None)
    if config is None:
        return
    inner: Callable[..., None] = config.validate

    @functools.wraps(inner)
    def validate(self: Any) -> None:
        alias = planner_alias(self.compute_device)
        inner(self if alias == self.compute_device else dataclasses.replace(self, compute_device=alias))

    config.validate = validate


def _wrap_enumerator() -> None:
    """Its constructor decides by the device which capacities of a custom topology bound the shards."""
    enumerator = _symbol(f"{_PLANNER}.enumerators", "EmbeddingEnumerator", parameters=("topology",))
    inner = enumerator.__init__
    signature = inspect.signature(inner)

    @functools.wraps(inner)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        topology = signature.bind(self, *args, **kwargs).arguments["topology"]
        with shown_as_alias(topology):
            inner(self, *args, **kwargs)
        self._compute_device = topology.compute_device

    enumerator.__init__ = init


def _wrap_default_device() -> None:
    """A planner without topology plans for the machine's accelerator, also where TorchRec knows none and says CPU."""
    planners = importlib.import_module(f"{_PLANNER}.planners")
    inner = _symbol(f"{_PLANNER}.planners", "get_device_type")

    @functools.wraps(inner)
    def get_device_type() -> str:
        device_type = str(inner())
        return (_aliased_accelerator() or device_type) if device_type == HOST.type else device_type

    planners.get_device_type = get_device_type  # type: ignore[attr-defined]  # a module from importlib


def _aliased_accelerator() -> str | None:
    """The device type of a backend with an alias that can be used on this machine."""
    for device_type in sorted(known_backends()):
        if planner_alias(device_type) != device_type:
            with contextlib.suppress(BackendError):  # says why it cannot be used here, which is no error here
                resolve_backend(device_type)
                return device_type
    return None


def _wrap_placement() -> None:
    """Placements name the device's index, as TorchRec's do for the devices that it knows."""
    planners = importlib.import_module(f"{_PLANNER}.planners")
    inner = _symbol(f"{_PLANNER}.planners", "placement", parameters=("compute_device", "rank", "local_size"))

    @functools.wraps(inner)
    def placement(compute_device: str, rank: int, local_size: int) -> str:
        alias = planner_alias(compute_device)
        placed = str(inner(alias, rank, local_size))
        return placed if alias == compute_device else placed.replace(f"/{alias}", f"/{compute_device}")

    planners.placement = placement  # type: ignore[attr-defined]  # a module from importlib
