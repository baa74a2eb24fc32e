"""Counters that users read. Values are frozen: a snapshot of one table on one rank."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class TableStats:
    """One table on one rank, since the model was sharded. Accesses and hits count committed training batches only."""

    table: str
    rank: int
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
