"""Counters that users read. Values are frozen: a snapshot of one table on one rank."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class TableStats:
    """One table on one rank, since the model was sharded. Accesses and hits count committed training batches only."""

    table: str
    rank: int
    kernel: str
    """What looks its rows up and steps them, on all ranks: ``"tbe"`` (FBGEMM) or ``"torch"`` (plain operators);
    ``"tbe+torch"`` if column shards differ; empty if the rank holds nothing of it."""
    rows: int
    """Live rows of this rank's shard."""
    resident: int
    """Of them, rows that are in a slot of the device tier now."""
    slots: int
    """Rows that the device tier can hold."""
    accesses: int
    """Ids looked up, with repetitions."""
    access_hits: int
    """Of them, ids whose row was in a slot when the batch was mapped."""
    uniques: int
    """Distinct ids, summed over batches."""
    unique_hits: int
    """Of them, ids whose row was in a slot when the batch was mapped."""
    inserted: int
    """New rows."""
    loads: int
    """Rows moved from the store to a slot."""
    victims: int
    """Rows that left their slot to make room."""
    write_backs: int
    """Of them, rows that were newer than the store and were moved there."""
    load_bytes: int
    write_back_bytes: int
    grown: int
    """Rows inserted beyond ``planned_rows``."""
    evicted: int
    """Rows dropped from the table by ``full_policy="evict"``."""
    rejected: int
    """Batches refused because this table could not take them."""
    oversized: int
    """Trained batches for which this table had too few slots, so that they went in passes over transient slots."""
    oversized_bytes: int
    """Rows that such batches moved between the store and transient slots."""
    pins: int
    """Pins of batches in flight; 0 when none is."""
    host_bytes: int
    """Host memory of the shard: index, bookkeeping and allocated row chunks."""

    @property
    def access_hit_rate(self) -> float:
        """Share of accesses whose row was in a slot; NaN before the first batch."""
        return self.access_hits / self.accesses if self.accesses else float("nan")

    @property
    def unique_hit_rate(self) -> float:
        """Share of unique rows that were in a slot: what host traffic depends on; NaN before the first batch."""
        return self.unique_hits / self.uniques if self.uniques else float("nan")


def sum_stats(shards: Sequence[TableStats], *, table: str, rank: int) -> TableStats:
    """The counters of a table's shards on one rank together; zeros if there are none."""
    counters = [f.name for f in dataclasses.fields(TableStats) if f.name not in ("table", "rank", "kernel")]
    kernel = "+".join(sorted({s.kernel for s in shards}))
    sums = {name: sum(getattr(s, name) for s in shards) for name in counters}
    return TableStats(table=table, rank=rank, kernel=kernel, **sums)


@dataclass(frozen=True, kw_only=True)
class PipelineStats:
    """One train pipeline on one rank, since it was made. ``str`` of it is a table.

    Stages: "load", "copy", "forward", "backward" and "optimizer" run on the caller's thread; "dist", "wait" (for the
    ids of other ranks), "map" and "swap" on the host thread, ahead of training. Training stalls in a stage while it
    can only wait for it, and in "queue" while the host thread works for batches before.
    """

    depth: int
    """Batches taken and not yet released, the computing one included, that the pipeline aims at."""
    batches_taken: int
    """From all iterators, in any mode."""
    batches_committed: int
    """Training batches whose step is over."""
    batches_dropped: int
    """Taken and never computed: refused, failed, reset, or left when an iterator ended without execute_all_batches."""
    batches_in_flight: int
    """Taken, and neither computed nor dropped yet."""
    stage_seconds: Mapping[str, float]
    """Stage -> seconds it worked: "load", "copy", "forward", "backward" and "optimizer" on the caller's thread; "dist",
    "wait" (for ids of other ranks), "map" and "swap" on the host thread."""
    stall_seconds: Mapping[str, float]
    """Stage -> seconds in which the caller's thread did nothing but wait for it; "queue": for batches before."""
    load_bytes: int
    """Rows that moved from the host's store to the device."""
    write_back_bytes: int
    """Rows that moved from the device to the host's store."""
    copied_bytes: int
    """Ids that came on the device and were copied to the host."""

    def __str__(self) -> str:
        lines = [
            f"depth {self.depth}: {self.batches_committed:,} batches committed, {self.batches_in_flight} in flight, "
            f"{self.batches_dropped} dropped",
            f"{'stage':10} {'worked, s':>10} {'stalled, s':>10}",
        ]
        for stage in dict.fromkeys([*self.stage_seconds, *self.stall_seconds]):
            worked, stalled = (seconds.get(stage, 0.0) for seconds in (self.stage_seconds, self.stall_seconds))
            lines.append(f"{stage:10} {worked:10.2f} {stalled:10.2f}")
        lines.append(
            f"{self.load_bytes:,} bytes of rows to the device, {self.write_back_bytes:,} to the host; "
            f"{self.copied_bytes:,} bytes of ids came on the device"
        )
        return "\n".join(lines)


@dataclass(frozen=True, kw_only=True)
class CollectionReport:
    """One sharded collection of a pipeline's model."""

    name: str
    """Its path in the model that was sharded."""
    is_hashed: bool
    """False: one of TorchRec's own."""
    is_prefetched: bool
    """Whether the pipeline prepares it ahead. If not, its forward does all by itself, with the same result."""
    reason: str
    """How the pipeline knows what it is called with, or why it does not."""
    ordinary_calls: int
    """Calls inside `progress` that could not use what was prepared, or had nothing prepared for them."""


@dataclass(frozen=True, kw_only=True)
class PipelineReport:
    """What a train pipeline prepares ahead, on this rank. ``str`` of it is a table."""

    collections: tuple[CollectionReport, ...]
    """In the model's order."""

    def __str__(self) -> str:
        width = max((len(c.name) for c in self.collections), default=0)
        return "\n".join(
            f"{c.name:{width}}  {'hashed' if c.is_hashed else 'plain':6}  "
            f"{'prefetched' if c.is_prefetched else 'NOT prefetched'}: {c.reason}"
            + (f" ({c.ordinary_calls:,} ordinary calls)" if c.ordinary_calls else "")
            for c in self.collections
        )
