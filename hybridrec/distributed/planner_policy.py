"""Which tier a hashed table goes to, and how large its cache is: decided around one run of TorchRec's planner.

`PlanningSession.select` narrows the options that TorchRec enumerated to one a hashed table, before its proposers try
combinations: a table without a constraint is ``fused`` if it fits, else ``fused_uvm_caching``. `PlanningSession.fill`
then enlarges the caches whose size nobody gave until the fullest rank is full. Both are pure functions of options and
topology, so every host makes the same plan.
"""

from __future__ import annotations

import copy
import dataclasses
import heapq
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from torch import nn
from torchrec.distributed.planner.types import ParameterConstraints, PlannerError, ShardingOption, Storage, Topology
from torchrec.distributed.types import CacheParams

from hybridrec._compat.planner import PLANNING_ATTRIBUTE, TIERS_ATTRIBUTE, PlanCapacityError, option_batch_rows
from hybridrec.backend import HOST
from hybridrec.distributed.placement import MAX_SLOTS, Placement, placement_of
from hybridrec.distributed.planner_demand import TableDemand, TierBytes, load_factor_of, slot_index_bytes
from hybridrec.distributed.planner_refusal import Need, Room, describe_refusal
from hybridrec.distributed.routing import COLUMN_WISE, ROW_WISE, SHARDING_TYPES, check_sharding_type, no_columns
from hybridrec.errors import ConfigError

_PREFERENCE = (Placement.DEVICE.value, Placement.CACHED.value, Placement.HOST.value)
CACHE_SHARE = 0.5
"""Of the device memory that tables without constraint share, at least what caches get if there are any: otherwise small
tables would fill it to the last row, and the caches of large ones hold a batch."""
_BISECTIONS = 60  # of a factor between 0 and 1: to the last slot of any table


def demand_of(option: ShardingOption) -> TableDemand | None:
    """Of a hashed table's option; None for tables that are TorchRec's own."""
    demand: TableDemand | None = getattr(option.tensor, TIERS_ATTRIBUTE, None)
    return demand


class PlanningSession:
    """One call of ``EmbeddingShardingPlanner.plan``."""

    def __init__(self, topology: Topology, constraints: Mapping[str, ParameterConstraints] | None) -> None:
        """
        Args:
            topology: Of the planner; its capacities before anything is reserved.
            constraints: Of the planner.
        """
        self.topology = topology
        self.constraints = constraints
        self.is_host_memory = topology.compute_device == HOST.type
        self.available: Topology | None = None
        """After TorchRec's reservations; None until it enumerates."""
        self.options: list[ShardingOption] = []
        """What `select` left."""
        self._free_caches: set[str] = set()

    def check(self, module: nn.Module, sharders: Sequence[Any]) -> None:
        """
        Raises:
            ConfigError: A constraint leaves a hashed table no sharding type, or no compute kernel.
        """
        types = tuple(sharder.module_type for sharder in sharders if hasattr(sharder, PLANNING_ATTRIBUTE))
        collections: list[Any] = [m for m in module.modules() if type(m) in types]
        for table in [table for collection in collections for table in collection.table_configs]:
            constraint = self.constraints.get(table.name) if self.constraints else None
            named = (constraint and constraint.sharding_types) or []
            if named and not set(named) & set(SHARDING_TYPES):
                check_sharding_type(table.name, named[0], "its constraint asks for")
            kernels = (constraint and constraint.compute_kernels) or []
            if kernels and not set(kernels) & {placement.value for placement in Placement}:
                placement_of(table.name, kernels[0], "of its constraint")

    def to_estimate(self, options: Sequence[ShardingOption]) -> list[ShardingOption]:
        """All options of other tables, and each hashed table's first choice: TorchRec's estimates take their time."""
        first = {id(of_type[0]) for of_type in _by_type(options).values()}
        return [option for option in options if demand_of(option) is None or id(option) in first]

    def select(
        self,
        options: Sequence[ShardingOption],
        available: Topology,
        partition: Callable[[list[ShardingOption], Topology], object],
        estimate: Callable[[list[ShardingOption]], None],
    ) -> list[ShardingOption]:
        """One option a hashed table and sharding type that it may have; all options of other tables.

        Args:
            options: All that TorchRec enumerated; those of `to_estimate` with their estimates.
            available: The topology less reservations.
            partition: TorchRec's partitioner: places options, raises PlannerError if they do not fit.
            estimate: Writes TorchRec's estimates into options.
        """
        self.available = available
        by_type = self._allowed_types(options)
        for first, *others in by_type.values():
            for option in others:
                self._derive_storages(option, first)
            for option in (first, *others):
                self._start_small(option)
        by_table: dict[str, list[ShardingOption]] = {}  # of the preferred type, which decides the kernel
        for (fqn, _), of_type in by_type.items():
            by_table.setdefault(fqn, of_type)
        chosen = {fqn: self._addressable(table_options)[0] for fqn, table_options in by_table.items()}
        if not self.is_host_memory:  # there, a cache takes more of the same memory than all rows in slots do
            plain = _fastest([option for option in options if demand_of(option) is None], available)
            for fqn in self._to_demote(by_table, chosen, plain, available, partition):
                chosen[fqn] = _demoted(by_table[fqn])
        selected = {key: _like(chosen[key[0]], of_type) for key, of_type in by_type.items()}
        estimate([option for key, option in selected.items() if option is not by_type[key][0]])
        kept = {id(option) for option in selected.values()}
        self.options = [option for option in options if demand_of(option) is None or id(option) in kept]
        return self.options

    def fill(self, options: list[ShardingOption]) -> list[ShardingOption]:
        """Enlarge the caches whose size nobody gave, in proportion to their tables' planned rows.

        Args:
            options: The plan; `Shard.rank` is decided.

        Returns:
            ``options``, whose ``cache_params`` and storages were changed in place.
        """
        free = [option for option in options if option.fqn in self._free_caches and _is_cached(option)]
        if not free or self.available is None:
            return options
        hbm, ddr = self._rest(options, self.available)
        rows = np.array([self._sizes(option)[0] for option in free], dtype=np.float64)
        now = np.array([self._sizes(option)[1] for option in free], dtype=np.float64)
        device = np.zeros((len(hbm), len(free)))  # bytes of a slot, on each rank
        shards = np.zeros((len(hbm), len(free)))
        for f, option in enumerate(free):
            for shard in option.shards:
                demand, _ = _demand(option).of_shard(option.sharding_type, shard.size[1], self.topology.world_size)
                device[shard.rank, f] += demand.layout.slot_bytes
                shards[shard.rank, f] += slot_index_bytes()

        def slots(factor: float) -> Any:
            return np.minimum(np.maximum(now, np.floor(rows * factor)), np.minimum(rows, MAX_SLOTS))

        def fits(factor: float) -> bool:
            more = slots(factor) - now
            return bool((device @ more <= hbm).all() and (shards @ more <= ddr).all())

        low, high = 0.0, 1.0
        if fits(high):
            low = high
        for _ in range(_BISECTIONS if low < high else 0):
            middle = (low + high) / 2
            low, high = (middle, high) if fits(middle) else (low, middle)
        for option, num_slots in zip(free, slots(low).tolist(), strict=True):
            self._resize(option, int(num_slots))
        return options

    def refusal(self, error: PlannerError) -> Exception:
        """The table of needs, if hashed tables are what does not fit; else TorchRec's own error."""
        theirs: Exception = error
        if self.available is None:
            return theirs
        lead = dict[str, ShardingOption]()
        for (fqn, _), of_type in _by_type(self.options).items():
            lead.setdefault(fqn, of_type[0])
        ranks = list[tuple[Sequence[Need], Room]]()
        for needs in self._dealt_out(list(lead.values())):
            room = self._room(needs, self.available)
            if room is None:
                return theirs
            ranks.append((needs, room))
        message = describe_refusal(ranks, [self._row_wise_need(option) for option in lead.values()])
        if message is None:
            return theirs
        refused: Exception = PlanCapacityError(message)
        return refused

    def _dealt_out(self, options: Sequence[ShardingOption]) -> list[list[Need]]:
        """What each rank would need, if shards of single ranks were dealt out, the largest first."""
        shared, owned = list[Need](), list[Need]()
        for option in options:
            if option.sharding_type == ROW_WISE:
                shared.append(self._row_wise_need(option))
            else:
                owned += self._owned_needs(option)
        dealt: list[tuple[int, int, list[Need]]] = [(0, rank, []) for rank in range(self.topology.world_size)]
        owned.sort(key=lambda need: (-need.num_bytes, need.demand.name))
        for need in owned:
            taken, rank, theirs = heapq.heappop(dealt)
            heapq.heappush(dealt, (taken + need.num_bytes, rank, [*theirs, need]))
        return [[*shared, *theirs] for _, _, theirs in sorted(dealt, key=lambda entry: (-entry[0], entry[1]))]

    def _row_wise_need(self, option: ShardingOption) -> Need:
        """Of every rank, if the table is row-wise."""
        return self._need(option, _demand(option), option.shards[0].storage, self.accounted(option)[0], is_owned=False)

    def _owned_needs(self, option: ShardingOption) -> list[Need]:
        """Of the rank of each of its shards."""
        needs = []
        for shard, accounted in zip(option.shards, self.accounted(option), strict=True):
            demand, _ = _demand(option).of_shard(option.sharding_type, shard.size[1], self.topology.world_size)
            if len(option.shards) > 1:
                first, dim = shard.offset[1], shard.size[1]
                demand = dataclasses.replace(demand, shard_name=f"{option.name}[{first}:{first + dim}]")
            needs.append(self._need(option, demand, shard.storage, accounted, is_owned=True))
        return needs

    def _need(
        self, option: ShardingOption, demand: TableDemand, storage: Storage, accounted: TierBytes, *, is_owned: bool
    ) -> Need:
        constraints = self.constraints.get(option.name) if self.constraints else None
        return Need(
            demand=demand,
            option=option,
            storage=storage,
            is_owned=is_owned,
            batch_rows=option_batch_rows(option, constraints) * (int(self.topology.world_size) if is_owned else 1),
            accounted=accounted,
            is_size_free=option.fqn in self._free_caches and _is_cached(option),
        )

    def _room(self, needs: Sequence[Need], available: Topology) -> Room | None:
        """What is left for rows of hashed tables: not their inputs and outputs, and not TorchRec's tables, spread.

        None if that is less than nothing: hashed tables are not to blame then.
        """
        world_size = self.topology.world_size
        plain = [o.total_storage for o in _fastest([o for o in self.options if demand_of(o) is None], available)]
        hbm = min(device.storage.hbm for device in available.devices) - sum(s.hbm for s in plain) // world_size
        ddr = min(device.storage.ddr for device in available.devices) - sum(s.ddr for s in plain) // world_size
        for need in needs:
            storage = need.storage
            hbm -= storage.hbm - (0 if self.is_host_memory else need.accounted.device)
            ddr -= storage.ddr - need.accounted.host - (need.accounted.device if self.is_host_memory else 0)
        if hbm < 0 or ddr < 0:
            return None
        return Room(
            device=hbm,
            host=ddr,
            device_type=self.topology.compute_device,
            is_host_memory=self.is_host_memory,
            world_size=world_size,
        )

    # ---- one option ----------------------------------------------------------------------------------------------

    def batch_rows(self, option: ShardingOption) -> int:
        """Ids of all ranks' batches that one rank owns: of a table that all share as many as it sends, on average."""
        constraints = self.constraints.get(option.name) if self.constraints else None
        ranks_each = int(self.topology.world_size) // self.num_ranks(option)
        return option_batch_rows(option, constraints) * ranks_each

    def num_ranks(self, option: ShardingOption) -> int:
        """That share the rows of a shard."""
        return int(self.topology.world_size) if option.sharding_type == ROW_WISE else 1

    def accounted(self, option: ShardingOption) -> list[TierBytes]:
        """What each of the option's shards takes of its rank."""
        return [self._accounted_dim(option, shard.size[1]) for shard in option.shards]

    def _accounted_dim(self, option: ShardingOption, dim: int) -> TierBytes:
        demand, num_ranks = _demand(option).of_shard(option.sharding_type, dim, self.topology.world_size)
        return demand.accounted(
            option.compute_kernel,
            num_ranks,
            option.cache_load_factor,
            batch_rows=self.batch_rows(option),
            is_host_memory=self.is_host_memory,
        )

    def _sizes(self, option: ShardingOption) -> tuple[int, int]:
        """(planned rows, slots) of one shard."""
        placed = _demand(option).placed(option.compute_kernel, self.num_ranks(option), option.cache_load_factor)
        return placed.planned_rows, placed.num_slots

    def _allowed_types(self, options: Sequence[ShardingOption]) -> dict[tuple[str, str], list[ShardingOption]]:
        """By table and sharding type: those that the table's constraint names, else the preferred one alone.

        Raises:
            ConfigError: A table can have none of them.
        """
        by_type = _by_type(options)
        seen: set[str] = set()
        allowed, refused = {}, dict[str, ConfigError]()
        for (fqn, sharding_type), of_type in by_type.items():
            option = of_type[0]
            named = self.constraints.get(option.name) if self.constraints else None
            if fqn in seen and not (named and named.sharding_types):
                continue
            if sharding_type == COLUMN_WISE and len(option.shards) > 1:
                states = _demand(option).layout.row_wise_states
                if states:
                    refused[fqn] = no_columns(option.name, [state.name for state in states])
                    continue
            seen.add(fqn)
            allowed[fqn, sharding_type] = of_type
        for fqn, error in refused.items():
            if fqn not in seen:
                raise error
        return allowed

    def _derive_storages(self, option: ShardingOption, from_option: ShardingOption) -> None:
        """Of another kernel of the same table, whose inputs and outputs are the same. Speed is estimated if chosen."""
        for shard, other in zip(option.shards, from_option.shards, strict=True):
            shard.storage, shard.perf = other.storage, other.perf
        self._shift_storages(option, self.accounted(from_option))

    def _shift_storages(self, option: ShardingOption, before: Sequence[TierBytes]) -> None:
        """From an option that was accounted as ``before`` to what it is now."""
        for shard, old, new in zip(option.shards, before, self.accounted(option), strict=True):
            device, host = new.device - old.device, new.host - old.host
            if self.is_host_memory:
                device, host = 0, device + host
            shard.storage = shard.storage + Storage(hbm=device, ddr=host)

    def _start_small(self, option: ShardingOption) -> None:
        """Account a cache whose size nobody gave as the smallest that serves: what is left of memory is added later."""
        if self.is_host_memory or not _is_cached(option) or option.cache_load_factor is not None:
            return
        demand = _demand(option)
        if demand.table.device_rows is not None:
            return
        self._free_caches.add(option.fqn)
        self._resize(option, demand.smallest_cache(self.num_ranks(option), self.batch_rows(option)))

    def _resize(self, option: ShardingOption, num_slots: int) -> None:
        """Write the load factor that gives so many slots, and what it takes, into the option."""
        before = self.accounted(option)
        rows, _ = self._sizes(option)
        params = option.cache_params or CacheParams()
        option.cache_params = dataclasses.replace(params, load_factor=load_factor_of(num_slots, rows))
        self._shift_storages(option, before)

    # ---- the choice ----------------------------------------------------------------------------------------------

    def _addressable(self, options: list[ShardingOption]) -> list[ShardingOption]:
        """Those whose slots can be numbered, if there are any."""
        return [option for option in options if self._sizes(option)[1] <= MAX_SLOTS] or options

    def _to_demote(
        self,
        by_table: Mapping[str, list[ShardingOption]],
        chosen: Mapping[str, ShardingOption],
        plain: list[ShardingOption],
        available: Topology,
        partition: Callable[[list[ShardingOption], Topology], object],
    ) -> list[str]:
        """The fewest tables, largest first, that must leave the device so that the rest and ``plain`` fit it.

        Once any must, the tables that stay leave `CACHE_SHARE` of the room to the caches of those that do not.
        """
        order = [fqn for fqn in chosen if _demoted(by_table[fqn]) is not chosen[fqn]]
        world_size = self.topology.world_size
        order.sort(key=lambda fqn: (-_device_share(chosen[fqn], world_size), fqn))
        room = _with_endless_host(available)
        smallest_room = min(device.storage.hbm for device in available.devices)

        def fits(num_demoted: int) -> bool:
            gone = set(order[:num_demoted])
            hashed = [_demoted(by_table[fqn]) if fqn in gone else option for fqn, option in chosen.items()]
            taken = sum(_device_share(option, world_size) for option in hashed)
            stay = sum(_device_share(chosen[fqn], world_size) for fqn in order[num_demoted:])
            if taken > smallest_room or (gone and stay > (1 - CACHE_SHARE) * (smallest_room - taken + stay)):
                return False
            is_even = not plain and all(option.sharding_type == ROW_WISE for option in hashed)
            return is_even or _is_partitionable([*hashed, *plain], room, partition)

        low, high = 0, len(order)  # invariant: more than `low - 1` must go, `high` are enough or all there are
        while low < high:
            middle = (low + high) // 2
            low, high = (low, middle) if fits(middle) else (middle + 1, high)
        return order[:low]

    def _rest(self, options: Sequence[ShardingOption], available: Topology) -> tuple[Any, Any]:
        """What each rank has left of device and host memory."""
        hbm = np.array([device.storage.hbm for device in available.devices], dtype=np.float64)
        ddr = np.array([device.storage.ddr for device in available.devices], dtype=np.float64)
        for option in options:
            for shard in option.shards:
                hbm[shard.rank] -= shard.storage.hbm
                ddr[shard.rank] -= shard.storage.ddr
        return np.maximum(hbm, 0), np.maximum(ddr, 0)


def _by_type(options: Sequence[ShardingOption]) -> dict[tuple[str, str], list[ShardingOption]]:
    """Options of hashed tables by table and sharding type: preferred types first, and kernels in each."""
    ours = [option for option in options if demand_of(option) is not None]
    ours.sort(key=lambda o: (SHARDING_TYPES.index(o.sharding_type), _PREFERENCE.index(o.compute_kernel)))
    by_type: dict[tuple[str, str], list[ShardingOption]] = {}
    for option in ours:
        by_type.setdefault((option.fqn, option.sharding_type), []).append(option)
    return by_type


def _like(chosen: ShardingOption, options: list[ShardingOption]) -> ShardingOption:
    """Of one table's options of another sharding type, the one with the same kernel."""
    return next((o for o in options if o.compute_kernel == chosen.compute_kernel), options[0])


def _device_share(option: ShardingOption, world_size: int) -> float:
    """Device memory of one rank: exact of a table that all ranks share, a mean of others."""
    if option.sharding_type == ROW_WISE:
        return float(option.shards[0].storage.hbm)
    return float(sum(shard.storage.hbm for shard in option.shards)) / world_size


def _demand(option: ShardingOption) -> TableDemand:
    demand = demand_of(option)
    assert demand is not None  # asked of hashed tables alone
    return demand


def _is_cached(option: ShardingOption) -> bool:
    return bool(option.compute_kernel == Placement.CACHED.value)


def _demoted(options: list[ShardingOption]) -> ShardingOption:
    """Of one table's options, in order of preference: the first that does not keep all rows on the device."""
    return next((o for o in options if o.compute_kernel != Placement.DEVICE.value), options[0])


def _fastest(options: list[ShardingOption], available: Topology) -> list[ShardingOption]:
    """The best option of each table by TorchRec's estimate, of those whose shards fit an empty device, if any do."""
    room = max(device.storage.hbm for device in available.devices)

    def cost(option: ShardingOption) -> tuple[bool, float]:
        shards = option.shards
        return any(shard.storage.hbm > room for shard in shards), max(float(shard.perf.total) for shard in shards)

    best: dict[str, ShardingOption] = {}
    for option in options:
        if option.fqn not in best or cost(option) < cost(best[option.fqn]):
            best[option.fqn] = option
    return list(best.values())


def _with_endless_host(available: Topology) -> Topology:
    """More host memory can only be needed when fewer tables are on the device: it is the planner's to check."""
    topology = copy.deepcopy(available)
    for device in topology.devices:
        device.storage = device.storage + Storage(hbm=0, ddr=1 << 62)
    return topology


def _is_partitionable(
    options: list[ShardingOption], room: Topology, partition: Callable[[list[ShardingOption], Topology], object]
) -> bool:
    try:
        partition(options, room)
    except PlannerError:
        return False
    finally:
        for option in options:
            for shard in option.shards:
                shard.rank = None
    return True
