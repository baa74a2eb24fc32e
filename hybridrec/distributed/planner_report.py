"""A plan's hashed tables in both tiers: as text, and against the machine that it is to run on."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torchrec.distributed.planner.types import ParameterConstraints, Topology
from torchrec.distributed.types import ModuleSharder, ShardingPlan

from hybridrec._compat.planner import PLANNING_ATTRIBUTE, TIERS_ATTRIBUTE, default_capacities
from hybridrec.backend import HOST, resolve_backend
from hybridrec.distributed.host_memory import HostBudget, local_world_size
from hybridrec.distributed.placement import Placement, ShardPlacement
from hybridrec.distributed.planner_demand import TableDemand, TierBytes
from hybridrec.distributed.planner_policy import PlanningSession
from hybridrec.distributed.planner_refusal import aligned, human
from hybridrec.distributed.routing import TablePart, parts_of
from hybridrec.errors import BackendError, CapacityError, ConfigError

logger = logging.getLogger("hybridrec")

MAX_LISTED = 50


@dataclass(frozen=True, kw_only=True)
class SharderPlanning:
    """What planning needs of a sharder; hangs at it as `PLANNING_ATTRIBUTE`."""

    host_group: dist.ProcessGroup
    """gloo group of all ranks."""
    budget: HostBudget
    """Of this rank."""


@dataclass(frozen=True, kw_only=True)
class PlannedTable:
    """One hashed table of a plan."""

    collection: nn.Module
    demand: TableDemand
    part: TablePart
    """The columns, and the rank if only one has them."""
    placed: ShardPlacement
    """Of one rank."""
    taken: TierBytes
    """Rows, states and index of one rank once the planned rows live; staging and inputs are beside."""


def planned_tables(plan: ShardingPlan, module: nn.Module, sharders: Iterable[ModuleSharder[Any]]) -> list[PlannedTable]:
    """The hashed tables of a plan, in its order."""
    tables = []
    by_type = {sharder.module_type: sharder for sharder in sharders if hasattr(sharder, PLANNING_ATTRIBUTE)}
    for path, table_plans in plan.plan.items():
        try:
            collection = module.get_submodule(path)
        except AttributeError:
            raise ConfigError(
                f"module has no {path!r}, which the plan names. Pass the model as it was planned, before "
                "DistributedModelParallel wraps it."
            ) from None
        sharder = by_type.get(type(collection))
        if sharder is None:
            continue
        parameters = sharder.shardable_parameters(collection)
        for name, planned in table_plans.items():
            demand: TableDemand = getattr(parameters[name], TIERS_ATTRIBUTE)
            cache = planned.cache_params
            for part in parts_of(demand.table, planned, 1 + max(planned.ranks or [0])):
                shard, num_ranks = demand.of_shard(planned.sharding_type, part.dim, len(planned.ranks or [0]))
                placed = shard.placed(planned.compute_kernel, num_ranks, None if cache is None else cache.load_factor)
                taken = shard.bytes_of(placed)
                tables.append(PlannedTable(collection=collection, demand=shard, part=part, placed=placed, taken=taken))
    return tables


def describe_plan(
    plan: ShardingPlan,
    module: nn.Module,
    sharders: Sequence[ModuleSharder[Any]],
    topology: Topology | None = None,
) -> str:
    """The hashed tables of a plan as a table: kernel, rows and bytes of one rank on the device and on the host.

    Args:
        plan: From ``EmbeddingShardingPlanner``.
        module: The model that was planned, not yet sharded.
        sharders: Those that the planner was given.
        topology: The planner's; adds its capacities.

    Returns:
        Lines; the largest 50 tables and the sum of all. Bytes are those once the planned rows live.

    Raises:
        ConfigError: ``module`` is not what was planned, for example wrapped already.
    """
    tables = planned_tables(plan, module, sharders)
    largest = sorted(tables, key=lambda t: (-t.taken.device - t.taken.host, t.demand.name))[:MAX_LISTED]
    has_owned = any(table.part.owner is not None for table in tables)
    rows = [("table", "kernel", "device rows", "device", "host rows", "host", "on" if has_owned else "")]
    for table in largest:
        device_rows, all_rows = table.placed.num_slots, table.placed.planned_rows
        rows.append(
            (
                repr(table.part.name),
                table.placed.placement.value,
                f"{device_rows:,}" + ("+" if _grows(table.placed) else ""),
                human(table.taken.device),
                f"{0 if device_rows >= all_rows else all_rows:,}",
                human(table.taken.host),
                f"rank {table.part.owner}" if table.part.owner is not None else "all ranks" if has_owned else "",
            )
        )
    if len(tables) > len(largest):
        rows.append((f"and {len(tables) - len(largest)} more", "", "", "", "", "", ""))
    fullest = _fullest_rank(tables)
    total = _total(_of_rank(tables, fullest))
    on = f"rank {fullest}, the fullest" if has_owned else ""
    num_tables = len({id(table.part.table) for table in tables})
    rows.append((f"all {num_tables} hashed tables", "", "", human(total.device), "", human(total.host), on))
    if topology is not None:
        storage = topology.devices[0].storage
        device = "(host)" if topology.compute_device == HOST.type else human(storage.hbm)
        rows.append(("capacity by topology", "", "", device, "", human(storage.ddr), ""))
    lines = ["hashed tables, of one rank:", *aligned(rows)]
    if any(_grows(table.placed) for table in largest):
        lines.append("+ at the start; grows to the rows of the batches in flight, which the plan accounts besides")
    return "\n".join(lines)


def _grows(placed: ShardPlacement) -> bool:
    return placed.placement is Placement.HOST and placed.num_slots < placed.planned_rows


class HybridPlanPolicy:
    """What the wraps around TorchRec's planner ask."""

    def session(self, topology: Topology, constraints: Mapping[str, ParameterConstraints] | None) -> PlanningSession:
        """For one call of ``plan``."""
        return PlanningSession(topology, constraints)

    def note(self, plan: ShardingPlan, module: nn.Module, sharders: Sequence[ModuleSharder[Any]]) -> None:
        """Let the sharders split their host budget as the plan needs it."""
        tables = planned_tables(plan, module, sharders)
        by_collection: dict[nn.Module, int] = {}
        rank = dist.get_rank() if dist.is_initialized() else 0
        for table in _of_rank(tables, rank):
            by_collection[table.collection] = by_collection.get(table.collection, 0) + table.taken.host
        for planning in _plannings(sharders):
            planning.budget.plan(by_collection)

    def accept(
        self, plan: ShardingPlan, module: nn.Module, sharders: Sequence[ModuleSharder[Any]], topology: Topology
    ) -> None:
        """Log the plan, and check it against this machine. Collective over the host group: all ranks raise or none.

        Raises:
            CapacityError: The topology has TorchRec's default capacities, and the tables do not fit this machine.
        """
        plannings = _plannings(sharders)
        group = plannings[0].host_group
        if dist.get_rank(group) == 0:
            logger.info("%s", describe_plan(plan, module, sharders, topology))
        tables = planned_tables(plan, module, sharders)
        try:
            problem = machine_problem(
                _of_rank(tables, dist.get_rank(group)), [p.budget for p in plannings], topology, dist.get_rank(group)
            )
        except Exception as e:  # said by all ranks: one that raises alone leaves the others waiting
            problem = f"the memory of this machine cannot be asked ({type(e).__name__}: {e})"
        problems: list[str | None] = [None] * dist.get_world_size(group)
        dist.all_gather_object(problems, problem, group=group)
        for rank, text in enumerate(problems):
            if text is not None:
                raise CapacityError(f"rank {rank}: {text}")


def machine_problem(
    tables: Sequence[PlannedTable], budgets: Sequence[HostBudget], topology: Topology, rank: int
) -> str | None:
    """Why this machine cannot hold the plan, or None. What the user bounded himself is warned of, not refused."""
    total = _total(tables)
    try:
        backend = resolve_backend(topology.compute_device)
    except (BackendError, ConfigError):
        backend = None  # planned here for another machine
    host = total.host
    if backend is not None and backend.is_host_memory:
        host += total.device
    elif backend is not None:
        seen = max(1, torch.get_device_module(topology.compute_device).device_count())  # a rank may see its own alone
        device = torch.device(topology.compute_device, rank % topology.local_world_size % seen)
        _, memory = backend.memory_bytes(device)
        if total.device > memory:
            return (
                f"the slots of {len(tables)} hashed tables take {human(total.device)} on {device}, which has "
                f"{human(memory)}; the topology says {human(topology.devices[rank].storage.hbm)}. Give the planner "
                f"Topology(hbm_cap={memory}, ...)."
            )
    budget = min(b.total_bytes for b in budgets)
    if host <= budget:
        return None
    text = (
        f"{len(tables)} hashed tables take {human(host)} of host memory once their planned rows live, and a rank's "
        f"budget is {human(budget)} ({local_world_size()} ranks on this machine)"
    )
    if default_capacities(topology) and not any(b.is_given for b in budgets):
        return (
            f"{text}; the topology's {human(topology.devices[rank].storage.ddr)} are TorchRec's default. Give the "
            "tables' planned_rows, use more machines, or say what a rank may take: Topology(ddr_cap=...) or "
            "host_memory_bytes of get_default_hybrid_sharders(...)."
        )
    logger.warning("rank %d: %s: batches that need more will be refused.", rank, text)
    return None


def _plannings(sharders: Iterable[ModuleSharder[Any]]) -> list[SharderPlanning]:
    return [getattr(sharder, PLANNING_ATTRIBUTE) for sharder in sharders if hasattr(sharder, PLANNING_ATTRIBUTE)]


def _total(tables: Sequence[PlannedTable]) -> TierBytes:
    return TierBytes(device=sum(t.taken.device for t in tables), host=sum(t.taken.host for t in tables))


def _of_rank(tables: Sequence[PlannedTable], rank: int) -> list[PlannedTable]:
    """What a rank holds something of."""
    return [table for table in tables if table.part.owner in (None, rank)]


def _fullest_rank(tables: Sequence[PlannedTable]) -> int:
    """Of those that own something, the one with most bytes; 0 if none does."""
    taken: dict[int, int] = {}
    for table in tables:
        if table.part.owner is not None:
            taken[table.part.owner] = taken.get(table.part.owner, 0) + table.taken.device + table.taken.host
    return max(taken, key=lambda rank: (taken[rank], -rank), default=0)
