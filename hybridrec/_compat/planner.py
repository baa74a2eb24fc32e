"""TorchRec's planner taught two tiers: wraps around its functions, nothing replaced.

A hashed table's nominal parameter carries ``_hybrid_tiers``, a `Tiers`. Where it is present the planner accounts what
that says instead of bytes that follow from the nominal shape; the bytes of inputs and outputs stay TorchRec's.
Parameters without it are untouched, and so are planners that are given none of our sharders.
"""

from __future__ import annotations

import functools
import importlib
import math
from collections.abc import Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist

from hybridrec._compat.default_sharders import default_sharders
from hybridrec._compat.planner_device import install_device_wraps, planner_alias
from hybridrec._compat.torchrec import _fail, _symbol
from hybridrec.backend import HOST
from hybridrec.errors import BackendError, CapacityError, ConfigError, HybridRecError

TIERS_ATTRIBUTE = "_hybrid_tiers"
PLANNING_ATTRIBUTE = "_hybrid_planning"
"""What the wraps know our sharders by."""
_PLANNER = "torchrec.distributed.planner"
# Relative to the same device's "fused": what decides when memory allows several kernels. Only the order matters.
_BANDWIDTH_SHARE = {"fused_uvm_caching": 0.5, "fused_uvm": 0.25}

_installed = False
_PlannerError = _symbol(f"{_PLANNER}.types", "PlannerError", parameters=("message", "error_type"))


class PlanCapacityError(CapacityError, _PlannerError):  # type: ignore[valid-type, misc]  # looked up by name
    """No plan fits: ours, and TorchRec's for scripts that catch that."""

    def __init__(self, message: str) -> None:
        types = importlib.import_module(f"{_PLANNER}.types")
        _PlannerError.__init__(self, message, types.PlannerErrorType.INSUFFICIENT_STORAGE)


# What another rank's error is raised as; anything else as the base class.
_CLASSES: tuple[type[HybridRecError], ...] = (
    HybridRecError,
    BackendError,
    CapacityError,
    ConfigError,
    PlanCapacityError,
)


class Tiers(Protocol):
    """What the planner asks of a hashed table."""

    def of_shard(self, sharding_type: str, dim: int, world_size: int) -> tuple[Tiers, int]:
        """The same of a shard of so many columns, and the number of ranks that share its rows."""

    def accounted(
        self,
        compute_kernel: str,
        world_size: int,
        load_factor: float | None,
        *,
        batch_rows: int,
        is_host_memory: bool,
    ) -> Any:
        """A value with ``device`` and ``host``, bytes of one rank."""


class Session(Protocol):
    """One run of a planner."""

    def check(self, module: Any, sharders: Sequence[Any]) -> None:
        """Refuse constraints that leave a hashed table no option."""

    def to_estimate(self, options: Sequence[Any]) -> list[Any]:
        """Those whose estimates `select` needs."""

    def select(self, options: Sequence[Any], available: Any, partition: Any, estimate: Any) -> list[Any]:
        """The options that the planner shall combine."""

    def fill(self, options: list[Any]) -> list[Any]:
        """The plan's options, caches enlarged."""

    def refusal(self, error: Exception) -> Exception:
        """What to raise instead of the planner's own error, or that error."""


class Policy(Protocol):
    """What the wraps ask the layers above; they hand it to `install_planner_wraps`."""

    def session(self, topology: Any, constraints: Any) -> Session:
        """For one call of ``plan``."""

    def note(self, plan: Any, module: Any, sharders: Sequence[Any]) -> None:
        """A plan was made in this process."""

    def accept(self, plan: Any, module: Any, sharders: Sequence[Any], topology: Any) -> None:
        """Look at a plan that all ranks have; collective, and raises on all ranks alike."""


def install_planner_wraps(policy: Policy) -> None:
    """Install the wraps, once a process. Idempotent.

    Raises:
        BackendError: TorchRec's internals moved; names the symbol.
    """
    global _installed
    if _installed:
        return
    install_device_wraps()
    _wrap_storages()
    _wrap_bandwidths()
    _wrap_planner(policy)
    _installed = True


def default_capacities(topology: Any) -> bool:
    """Whether every rank of a topology has what TorchRec assumes when nobody says what it has."""
    constants = importlib.import_module(f"{_PLANNER}.constants")
    return all(
        device.storage.hbm in (0, constants.HBM_CAP) and device.storage.ddr == constants.DDR_CAP
        for device in topology.devices
    )


def option_batch_rows(option: Any, constraints: Any) -> int:
    """Ids of one rank's batch that are of a sharding option's table."""
    batch_sizes = getattr(constraints, "batch_sizes", None) or [option.batch_size] * len(option.input_lengths)
    num_poolings = getattr(constraints, "num_poolings", None) or [1.0] * len(option.input_lengths)
    return _batch_rows(batch_sizes, option.input_lengths, num_poolings)


def _batch_rows(batch_sizes: Sequence[int], input_lengths: Sequence[float], num_poolings: Sequence[float]) -> int:
    return math.ceil(sum(b * n * p for b, n, p in zip(batch_sizes, input_lengths, num_poolings, strict=False)))


def _wrap_storages() -> None:
    estimators = importlib.import_module(f"{_PLANNER}.shard_estimators")
    storage_type = importlib.import_module(f"{_PLANNER}.types").Storage
    needed = (
        "tensor",
        "sharding_type",
        "shard_sizes",
        "compute_kernel",
        "compute_device",
        "world_size",
        "caching_ratio",
        "batch_sizes",
    )
    inner = _symbol(f"{_PLANNER}.shard_estimators", "calculate_shard_storages", parameters=needed)

    @functools.wraps(inner)
    def calculate_shard_storages(*args: Any, **kwargs: Any) -> Any:
        tiers: Tiers | None = getattr(kwargs.get("tensor"), TIERS_ATTRIBUTE, None)
        kwargs["compute_device"] = planner_alias(kwargs["compute_device"])
        if tiers is None:
            return inner(*args, **kwargs)
        # With a table of one row a shard TorchRec's own figure is inputs, outputs and that row.
        dims = [size[1] for size in kwargs["shard_sizes"]]
        num_rows = len(dims) * dims[0] // kwargs["tensor"].shape[1]  # column shards share one
        one_row_each = torch.empty((max(1, num_rows), kwargs["tensor"].shape[1]), device="meta")
        shard_sizes = [[1, dim] for dim in dims]
        in_and_out = inner(
            *args, **{**kwargs, "tensor": one_row_each, "shard_sizes": shard_sizes, "compute_kernel": "fused"}
        )
        is_host_memory = kwargs["compute_device"] == HOST.type
        batch_rows = _batch_rows(kwargs["batch_sizes"], kwargs["input_lengths"], kwargs["num_poolings"])

        def rows_of(dim: int) -> Any:
            shard, num_ranks = tiers.of_shard(kwargs["sharding_type"], dim, kwargs["world_size"])
            taken = shard.accounted(
                kwargs["compute_kernel"],
                num_ranks,
                kwargs["caching_ratio"],
                batch_rows=batch_rows * (kwargs["world_size"] // num_ranks),  # of all ranks' batches
                is_host_memory=is_host_memory,
            )
            if is_host_memory:
                return storage_type(hbm=0, ddr=taken.device + taken.host)
            return storage_type(hbm=taken.device, ddr=taken.host)

        # added, since TorchRec 1.8's storages have a third tier and 1.5's have not
        by_dim = {dim: rows_of(dim) for dim in set(dims)}
        return [storage + by_dim[dim] for storage, dim in zip(in_and_out, dims, strict=True)]

    setattr(estimators, "calculate_shard_storages", calculate_shard_storages)  # noqa: B010 - a module from importlib


def _wrap_bandwidths() -> None:
    """Give the two-tier kernels a bandwidth on devices where TorchRec knows "fused" alone."""
    for module_name in (f"{_PLANNER}.constants", f"{_PLANNER}.estimator.types"):
        try:
            module = importlib.import_module(module_name)
        except ImportError:
            continue  # TorchRec 1.5 has no estimator package; its estimators read `shard_estimators`, below
        _wrap_bandwidth_of(module)
    _wrap_bandwidth_of(importlib.import_module(f"{_PLANNER}.shard_estimators"))


def _wrap_bandwidth_of(module: Any) -> None:
    inner = getattr(module, "kernel_bw_lookup", None)
    if inner is None:
        return

    @functools.wraps(inner)
    def kernel_bw_lookup(compute_device: str, compute_kernel: str, *args: Any, **kwargs: Any) -> Any:
        compute_device = planner_alias(compute_device)
        bandwidth = inner(compute_device, compute_kernel, *args, **kwargs)
        if bandwidth is None and compute_kernel in _BANDWIDTH_SHARE:
            fused = inner(compute_device, "fused", *args, **kwargs)
            return None if fused is None else fused * _BANDWIDTH_SHARE[compute_kernel]
        return bandwidth

    module.kernel_bw_lookup = kernel_bw_lookup


def _wrap_planner(policy: Policy) -> None:
    planner = _symbol(f"{_PLANNER}.planners", "EmbeddingShardingPlanner", parameters=("topology", "constraints"))
    plan_inner, collective_inner = planner.plan, planner.collective_plan
    if not hasattr(_symbol(f"{_PLANNER}.types", "StorageReservation"), "last_reserved_topology"):
        raise _fail(f"{_PLANNER}.types.StorageReservation.last_reserved_topology", "does not exist")
    broadcast = _symbol(
        f"{_PLANNER}.planners", "invoke_on_rank_and_broadcast_result", parameters=("pg", "rank", "func")
    )

    @functools.wraps(plan_inner)
    def plan(self: Any, module: Any, sharders: Sequence[Any]) -> Any:
        if not any(map(_plans_tiers, sharders)):
            return plan_inner(self, module, sharders)
        session = policy.session(self._topology, self._constraints)
        enumerator, callbacks = self._enumerator, self._callbacks
        enumerate_inner, estimate = enumerator.enumerate, enumerator.populate_estimates

        def enumerate_and_select(module: Any, sharders: Sequence[Any]) -> list[Any]:
            session.check(module, sharders)
            enumerator.populate_estimates = lambda options: estimate(session.to_estimate(options))
            try:
                options = enumerate_inner(module=module, sharders=sharders)
            finally:
                del enumerator.populate_estimates
            available = self._storage_reservation.last_reserved_topology or self._topology
            return session.select(options, available, self._partitioner.partition, estimate)

        enumerator.enumerate = enumerate_and_select
        self._callbacks = [*callbacks, session.fill]
        try:
            planned = plan_inner(self, module, sharders)
        except _PlannerError as error:
            refusal = session.refusal(error)
            raise refusal from (None if refusal is error else error)
        finally:
            self._callbacks = callbacks
            del enumerator.enumerate  # the class's method again
        policy.note(planned, module, sharders)
        return planned

    @functools.wraps(collective_inner)
    def collective_plan(self: Any, module: Any, sharders: Any = None, pg: Any = None) -> Any:
        sharders = default_sharders() if sharders is None else sharders
        if not any(map(_plans_tiers, sharders)):
            return collective_inner(self, module, sharders, pg)
        group = dist.GroupMember.WORLD if pg is None else pg
        raised: list[Exception] = []

        def plan_or_say_why() -> tuple[Any, int, str]:
            try:
                return self.plan(module, sharders), 0, ""
            except Exception as error:  # travels to the other ranks, which would wait for the broadcast for ever
                raised.append(error)
                code = _CLASSES.index(type(error)) if type(error) in _CLASSES else 0
                text = str(error) if isinstance(error, HybridRecError) else f"{type(error).__name__}: {error}"
                return None, code, text

        planned, code, text = broadcast(group, 0, plan_or_say_why)
        if raised:
            raise raised[0]
        if planned is None:
            raise _CLASSES[code](text)
        policy.note(planned, module, sharders)
        policy.accept(planned, module, sharders, self._topology)
        return planned

    planner.plan, planner.collective_plan = plan, collective_plan


def _plans_tiers(sharder: Any) -> bool:
    return hasattr(sharder, PLANNING_ATTRIBUTE)
