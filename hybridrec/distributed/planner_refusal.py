"""What is said when no plan fits: which tables, which tier, needed, available, and the nearest setting that would fit.

The settings of a tier belong together: with all of them it has room. They change as few tables as can be, the largest.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torchrec.distributed.planner.types import ShardingOption, Storage

from hybridrec.distributed.placement import Placement, ShardPlacement
from hybridrec.distributed.planner_demand import TableDemand, TierBytes

MAX_LISTED = 12
MAX_RANKS_LISTED = 4
_MAX_RANKS = 1 << 20
_BISECTIONS = 40


@dataclass(frozen=True, kw_only=True)
class Need:
    """One hashed table as the plan that failed would have placed it."""

    demand: TableDemand
    option: ShardingOption
    batch_rows: int
    storage: Storage
    """Of the shard: TorchRec's inputs and outputs too."""
    is_owned: bool
    """One rank has all rows: more ranks do not make it smaller."""
    accounted: TierBytes
    """Of one rank."""
    is_size_free: bool
    """Nobody gave the cache a size: it is at its smallest."""

    @property
    def num_bytes(self) -> int:
        """Of both tiers."""
        return self.accounted.device + self.accounted.host

    def num_ranks(self, world_size: int) -> int:
        """That share the rows."""
        return 1 if self.is_owned else world_size

    @property
    def kernel(self) -> str:
        return str(self.option.compute_kernel)


@dataclass(frozen=True, kw_only=True)
class Room:
    """What one rank has for hashed tables: capacities less reservations and TorchRec's own tables."""

    device: int
    host: int
    device_type: str
    is_host_memory: bool
    """The device tier is a part of ``host``."""
    world_size: int


def describe_refusal(ranks: Sequence[tuple[Sequence[Need], Room]], spread: Sequence[Need]) -> str | None:
    """The message; None if the hashed tables fit, so that something else is wrong.

    Args:
        ranks: What each would need, and what it has.
        spread: All tables, were they row-wise.
    """
    # Of row-wise tables every rank says the same.
    too_small = list(dict.fromkeys(found for needs, room in ranks if (found := _lines(needs, room))))
    if not too_small:
        return None
    room = ranks[0][1]
    which = "one rank" if len(too_small) == 1 else f"each rank that is too small ({len(too_small)})"
    lines = [line for of_rank in too_small[:MAX_RANKS_LISTED] for line in of_rank]
    return "\n".join(
        [
            f"the hashed tables do not fit {room.world_size} ranks of a {room.device_type!r} topology. Of {which}:",
            *aligned([("table", "kernel", "tier", "needed", "available", "nearest setting that fits"), *lines]),
            f"{_other_ways(ranks, spread)}, or a Topology with larger hbm_cap and ddr_cap if the machine has more. "
            "(available: what is left of the capacity after reservations and the other tables; the settings of a tier "
            "fit together.)",
        ]
    )


def _lines(needs: Sequence[Need], room: Room) -> tuple[tuple[str, ...], ...]:
    """Of one rank: what has to change; empty if all fits."""
    lines = []
    by_device = {need.demand.name: need.accounted.device for need in needs}
    by_host = {need.demand.name: need.accounted.host for need in needs}
    if room.is_host_memory:
        by_host = {name: n + by_device[name] for name, n in by_host.items()}
    elif sum(by_device.values()) > room.device:
        lines += _tier_lines("device", needs, by_device, room.device, room, _slots_that_fit)
    if sum(by_host.values()) > room.host:
        lines += _tier_lines("host", needs, by_host, room.host, room, _rows_that_fit)
    return tuple(lines)


def _other_ways(ranks: Sequence[tuple[Sequence[Need], Room]], spread: Sequence[Need]) -> str:
    """More ranks, which share row-wise tables alone."""
    now = ranks[0][1].world_size
    needed = _ranks_that_fit(spread, min((room for _, room in ranks), key=lambda room: (room.host, room.device)))
    if needed is None:
        return "No number of ranks would do"
    is_any_owned = any(need.is_owned for needs, _ in ranks for need in needs)
    ways = ["shard all tables 'row_wise'"] * is_any_owned
    if needed > now or not ways:
        ways.append(f"use W >= {needed:,} ranks")
    return f"Or {' and '.join(ways)}"


def human(num_bytes: float) -> str:
    """As 1.50 GiB; whole bytes below 1 KiB."""
    units = ["B", "KiB", "MiB", "GiB", "TiB"]
    while num_bytes >= 1024 and len(units) > 1:
        num_bytes /= 1024
        del units[0]
    return f"{num_bytes:,.2f} {units[0]}" if units[0] != "B" else f"{int(num_bytes)} B"


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Lines with columns of equal width."""
    widths = [max(len(row[c]) for row in rows) for c in range(len(rows[0]))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


def _tier_lines(
    tier: str,
    needs: Sequence[Need],
    needed: dict[str, int],
    room: int,
    all_room: Room,
    setting: Callable[[Need, float, Room], tuple[str, int]],
) -> list[tuple[str, ...]]:
    """One line a table that has to change, and the sum."""
    can_shrink = [n for n in needs if setting(n, 0.0, all_room)[1] < needed[n.demand.name]]
    order = sorted(can_shrink or needs, key=lambda n: (-needed[n.demand.name], n.demand.name))
    total = sum(needed.values())
    changed: list[Need] = []
    rest = room - total
    for need in order:
        changed.append(need)
        rest += needed[need.demand.name]
        if rest >= sum(setting(n, 0.0, all_room)[1] for n in changed):
            break
    # The largest common factor at which those that change fit what the others leave.
    low, high = 0.0, 1.0
    for _ in range(_BISECTIONS):
        middle = (low + high) / 2
        if sum(setting(n, middle, all_room)[1] for n in changed) <= rest:
            low = middle
        else:
            high = middle
    is_feasible = sum(setting(n, low, all_room)[1] for n in changed) <= rest
    lines: list[tuple[str, ...]] = []
    for need in changed[:MAX_LISTED]:
        name = need.demand.name
        text, _ = setting(need, low, all_room)
        left = max(0, room - (total - needed[name]))
        of = f" of table {need.demand.table.name!r}" if need.demand.shard_name else ""
        advice = text + of if is_feasible else "none at this W"
        lines.append((repr(name), need.kernel, tier, human(needed[name]), human(left), advice))
    if len(changed) > MAX_LISTED:
        lines.append((f"and {len(changed) - MAX_LISTED} more", "", tier, "", "", ""))
    lines.append(
        (
            f"all {len(needs)} hashed {'shards' if any(n.is_owned for n in needs) else 'tables'}",
            "",
            tier,
            human(total),
            human(room),
            "",
        )
    )
    return lines


def _slots_that_fit(need: Need, factor: float, room: Room) -> tuple[str, int]:
    """A cache of ``factor`` of the rows that the table has slots for now: (what to set, device bytes)."""
    demand, now = need.demand, _placed(need, room.world_size)
    slots = max(1, math.floor(now.num_slots * factor))
    staging = demand.staging_bytes(now, need.batch_rows).device
    share = math.floor(slots / now.planned_rows * 1e6) / 1e6
    if now.placement is Placement.HOST or need.is_size_free:
        return "a smaller batch: its rows are all that is on the device", need.accounted.device
    if now.placement is Placement.CACHED and demand.table.device_rows is not None:
        return f"device_rows <= {slots:,}", slots * demand.layout.slot_bytes + staging
    text = f"load_factor <= {share:g}" if share >= 1e-6 else f"device_rows <= {slots:,}"
    if now.placement is Placement.DEVICE:
        text = f"'fused_uvm_caching' with {text}"
    return text, slots * demand.layout.slot_bytes + staging


def _rows_that_fit(need: Need, factor: float, room: Room) -> tuple[str, int]:
    """``factor`` of the planned rows: (what to set, bytes of host memory)."""
    table = need.demand.table
    rows = max(1, math.floor(table.planned_rows * factor))
    fewer = dataclasses.replace(need.demand, table=dataclasses.replace(table, planned_rows=rows))
    accounted = _accounted(fewer, need, room, room.world_size)
    host = accounted.host + (accounted.device if room.is_host_memory else 0)
    field = "planned_rows" if table.max_rows is None or table.max_rows > rows else "max_rows"
    return f"{field} <= {rows:,}", host


def _ranks_that_fit(needs: Sequence[Need], room: Room) -> int | None:
    """The fewest ranks on each of which all tables as they are fit; None if batches alone are too much."""

    def fits(world_size: int) -> bool:
        taken = [_accounted(need.demand, need, room, world_size) for need in needs]
        device, host = sum(t.device for t in taken), sum(t.host for t in taken)
        return device + host <= room.host if room.is_host_memory else device <= room.device and host <= room.host

    low = high = room.world_size
    if fits(high):
        return high
    while not fits(high):
        low, high = high, 2 * high
        if high > _MAX_RANKS:
            return None
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if fits(middle) else (middle, high)
    return high


def _placed(need: Need, world_size: int) -> ShardPlacement:
    return need.demand.placed(need.kernel, need.num_ranks(world_size), need.option.cache_load_factor, need.batch_rows)


def _accounted(demand: TableDemand, need: Need, room: Room, world_size: int) -> TierBytes:
    return demand.accounted(
        need.kernel,
        need.num_ranks(world_size),
        need.option.cache_load_factor,
        batch_rows=need.batch_rows,
        is_host_memory=room.is_host_memory,
    )
