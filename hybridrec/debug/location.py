"""`where`: the place, the values and the optimizer state of one id's row. Reads only."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from hybridrec.backend import HOST
from hybridrec.debug.records import initial_records, read_slots, split_record
from hybridrec.distributed.lookup import PooledLookup
from hybridrec.distributed.sharded_collection import ShardedHashCollection
from hybridrec.errors import ConfigError, IdError, StateError
from hybridrec.modules.hash_collection import HashCollection
from hybridrec.modules.hash_table import HashEmbeddingBag
from hybridrec.native import mix64

PATIENCE_SECONDS = 1.0
"""How long to wait for a batch whose rows move; the ranks may be waiting for this one."""


@dataclass(frozen=True, kw_only=True)
class RowLocation:
    """Where one id's row is, as one rank sees it. ``str`` of it is for reading."""

    table: str
    id: int
    rank: int
    """Who was asked."""
    owner: int
    """The rank whose shard holds the id."""
    world_size: int
    tier: str
    """``"slot"`` (of the device tier), ``"store"`` (host memory), ``"unknown"`` (no row lives: it reads its initial
    row), ``"moving"`` (on its way between the tiers) or ``"other rank"`` (ask there)."""
    columns: tuple[int, int] | None = None
    """First and last of the columns that the shard has, if the table is sharded column-wise; None: all."""
    slot: int | None = None
    """In the device tier."""
    row: int | None = None
    """Row number in the shard; None if it is not sharded."""
    last_used: int | None = None
    """Ordinal of the last training batch that was mapped with it; those in flight count."""
    pins: int | None = None
    """Batches in flight that hold it in its slot."""
    weights: Tensor | None = field(default=None, compare=False)
    """[D] of the table's type, host memory, a copy; the initial row if the id is unknown, None if it moves or is
    elsewhere."""
    states: Mapping[str, Tensor] = field(default_factory=dict, compare=False)
    """Optimizer state by name: float32 [D], or [1] of a state that has one value a row. Copies."""

    def __str__(self) -> str:
        part = "" if self.columns is None else f", columns {self.columns[0]} to {self.columns[1]}"
        head = f"table {self.table!r}, id {self.id}{part} (owner: rank {self.owner} of {self.world_size}): "
        if self.tier == "other rank":
            return head + f"not on rank {self.rank}; ask rank {self.owner}"
        place = {
            "slot": f"slot {self.slot} of the device tier",
            "store": "the host's store",
            "unknown": "no row; it reads its initial row",
            "moving": "on its way between the tiers",
        }[self.tier]
        details = [
            f"{name} {value}"
            for name, value in (("row", self.row), ("last used by batch", self.last_used), ("pins", self.pins))
            if value is not None
        ]
        lines = [head + ", ".join([place, *details])]
        values = {} if self.weights is None else {"weights": self.weights, **self.states}
        lines += [f"  {name}: {_numbers(value)}" for name, value in values.items()]
        return "\n".join(lines)


def where(module: nn.Module, table: str, id: int, *, column: int = 0) -> RowLocation:
    """Where the row of an id is, and what it holds. Changes nothing. Not collective: any rank may ask at any time.

    Takes time linear in the rows of the shard. Under a train pipeline a row may be on its way between the tiers for a
    batch to come; `where` waits a second for it to arrive, and says ``"moving"`` if it does not (its batch then waits
    for other ranks, or for this one).

    Args:
        module: A hashed collection, sharded or not, or a model that has one with the table.
        table: Name of the table.
        id: Any int64, also as a numpy integer.
        column: Of a table that is sharded column-wise: which shard is asked for.

    Raises:
        ConfigError: No collection of the module has the table, or several have; an argument has another type.
        IdError: ``id`` is no int64.
    """
    if not isinstance(module, nn.Module):
        raise ConfigError(f"where: module has type {type(module).__name__}. Pass a model, or a hashed collection.")
    if not isinstance(table, str):
        raise ConfigError(f"where: table={table!r} has type {type(table).__name__}. Pass the name of a table.")
    if isinstance(id, np.integer):
        id = int(id)
    if isinstance(id, bool) or not isinstance(id, int) or not -(2**63) <= id < 2**63:
        raise IdError(f"where(table={table!r}): id={id!r} is no int64. Pass an int from -2**63 to 2**63 - 1.")
    collection = _collection_of(module, table)
    if isinstance(collection, ShardedHashCollection):
        return _where_sharded(collection, table, id, column)
    return _where_unsharded(collection.bag_of(table), id)


def _collection_of(module: nn.Module, table: str) -> ShardedHashCollection | HashCollection:
    kinds = (ShardedHashCollection, HashCollection)
    collections = [m for m in module.modules() if isinstance(m, kinds)]
    found = [c for c in collections if table in _names(c)]
    if len(found) == 1:
        return found[0]
    names = sorted({name for c in collections for name in _names(c)})
    raise ConfigError(
        f"where: {len(found)} hashed collections of {type(module).__name__} have a table {table!r}; its tables are "
        f"{', '.join(map(repr, names)) or 'none'}. Name one of them, or pass the collection."
    )


def _names(collection: ShardedHashCollection | HashCollection) -> list[str]:
    return [table.name for table in collection.table_configs]


def _where_sharded(collection: ShardedHashCollection, table: str, id: int, column: int) -> RowLocation:
    parts = [part for part in collection.routing.parts if part.table.name == table]
    found = [part for part in parts if part.first_column <= column < part.first_column + part.dim]
    if not found:
        raise ConfigError(
            f"where: column={column!r} of table {table!r}. It has {parts[0].table.embedding_dim} columns."
        )
    part = found[0]
    lookup, group = collection.lookup, collection.host_group
    key = int(mix64(torch.tensor([id])))
    fields: dict[str, Any] = {"table": table, "id": id, "rank": group.rank(), "world_size": group.size()}
    if not part.is_whole:
        fields["columns"] = (part.first_column, part.first_column + part.dim - 1)
    owner = key % 2**64 % group.size() if part.owner is None else part.owner
    if owner != group.rank():
        return RowLocation(owner=owner, tier="other rank", **fields)
    t = collection.parts.index(part)
    last = time.monotonic() + PATIENCE_SECONDS
    while True:
        with lookup.log.lock:
            lookup.log.settle()
            place, record = _read(lookup, t, key)
        if place["tier"] != "moving" or time.monotonic() > last:
            break
        time.sleep(0.002)
    values = {} if record is None else split_record(lookup, t, record)
    return RowLocation(owner=owner, weights=values.pop("weights", None), states=values, **fields, **place)


def _read(lookup: PooledLookup, t: int, key: int) -> tuple[dict[str, Any], Tensor | None]:
    """The place of a key and its record float32 [width]; None if it moves. The log's lock is held."""
    group = lookup.log.group
    keys, rows, scores, slots, pins = group.entries(t)
    found = np.flatnonzero(keys == key)
    if not found.size:
        return {"tier": "unknown"}, initial_records(lookup.tables[t].spec, torch.tensor([key]))[0]
    i = found[:1]
    slot = int(slots[i[0]])
    place: dict[str, Any] = {
        "tier": "store" if slot < 0 else "slot",
        "slot": None if slot < 0 else slot,
        "row": int(rows[i[0]]),
        "last_used": int(scores[i[0]]),
        "pins": int(pins[i[0]]),
    }
    try:
        records = group.read_records(t, rows[i] if slot < 0 else rows[:0])  # raises while a batch's rows move
    except StateError:
        return {**place, "tier": "moving"}, None
    if slot < 0:
        return place, torch.from_numpy(records)[0]
    return place, read_slots(lookup, t, torch.tensor([slot], device=HOST))[0]


def _where_unsharded(bag: HashEmbeddingBag, id: int) -> RowLocation:
    everything = bag.get_extra_state()
    found = (everything["ids"] == id).nonzero().flatten().tolist()
    fields: dict[str, Any] = {"table": bag.config.name, "id": id, "rank": 0, "owner": 0, "world_size": 1}
    if not found:
        weights = bag.read(torch.tensor([id]))[0].to(HOST, bag.config.row_type.dtype)
        return RowLocation(tier="unknown", weights=weights, **fields)
    (i,) = found
    states = [state[i].reshape(-1).to(HOST) for state in everything["states"]]
    names = [state.name for state in bag.optimizer()[0].row_states()] if states else []
    return RowLocation(
        tier="store" if bag.rows_device == HOST else "slot",
        last_used=int(everything["scores"][i]),
        weights=everything["rows"][i].to(HOST),
        states=dict(zip(names, states, strict=True)),
        **fields,
    )


def _numbers(values: Tensor) -> str:
    """All of a short row, the ends of a long one; exact, so that two of them can be compared."""
    texts = [f"{v:.9g}" for v in values.tolist()]
    return "[" + ", ".join(texts if len(texts) <= 16 else [*texts[:8], "...", *texts[-4:]]) + "]"
