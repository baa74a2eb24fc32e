"""A table at a point, ascending by id: ids ascend in the files of all ranks and deltas, which are merged by chunks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from hybridrec.checkpoint.files import read_ids, read_rows_apart
from hybridrec.checkpoint.points import Point
from hybridrec.store.row_export import RowChunk
from hybridrec.store.row_state_layout import RowStateLayout

Wanted = Literal["ids", "weights", "rows"]
"""What is read of a row: its id; that and its weights; everything."""


def sorted_rows(
    point: Point, collection: str, table: str, layout: RowStateLayout, wanted: Wanted = "rows"
) -> Iterator[RowChunk]:
    """The rows of a table at a point, each id once, ascending by id; its files were verified.

    In memory are a chunk (256 KiB) of each of its files, as many as ranks and deltas wrote.

    Args:
        point: Where.
        collection: Of the table.
        table: Its name, or that of columns.
        layout: Of its records.
        wanted: Of each row; the rest is empty.
    """
    streams: list[Iterator[RowChunk]] = []
    is_removed: list[bool] = []
    for layer in reversed(point.layers):  # of an id the first counts: of later layers, and in one what it puts in
        entry = layer.table(collection, table)
        for file in entry.files:
            chunks = read_rows_apart(layer.folder, entry, file, layout, ids_only=wanted == "ids")
            streams.append(map(_without_states, chunks) if wanted == "weights" else chunks)
            is_removed.append(False)
        for file in layer.removed_files(collection, table):
            streams.append(read_ids(layer.folder, file))
            is_removed.append(True)
    for parts in in_step(streams):
        rows = _newest([part for _, part in parts], [is_removed[stream] for stream, _ in parts])
        if rows is not None:
            yield rows


def in_step(streams: Sequence[Iterator[RowChunk]]) -> Iterator[list[tuple[int, RowChunk]]]:
    """Several streams, each ascending by id, range of ids by range of ids: (stream, its rows) of those that have some.

    A range is as large as one chunk has ids for, so that a chunk of each stream is in memory.
    """
    chunks = [(chunk for chunk in stream if len(chunk.ids_N)) for stream in streams]
    firsts, lasts = np.zeros(len(chunks), dtype=np.int64), np.zeros(len(chunks), dtype=np.int64)
    heads: dict[int, RowChunk] = {}

    def put(stream: int, head: RowChunk | None) -> None:
        heads.pop(stream, None)
        if head is not None:
            heads[stream], firsts[stream], lasts[stream] = head, int(head.ids_N[0]), int(head.ids_N[-1])

    for stream, of_stream in enumerate(chunks):
        put(stream, next(of_stream, None))
    while heads:
        left = np.fromiter(sorted(heads), dtype=np.int64)
        bound = lasts[left].min()
        found: list[tuple[int, RowChunk]] = []
        for stream in left[firsts[left] <= bound].tolist():
            head = heads[stream]
            n = int(np.searchsorted(head.ids_N.numpy(), bound, side="right"))
            found.append((stream, head.part(0, n)))
            put(stream, head.part(n, len(head.ids_N)) if n < len(head.ids_N) else next(chunks[stream], None))
        yield found


def _newest(parts: list[RowChunk], is_removed: list[bool]) -> RowChunk | None:
    """Ascending by id, of each id the row of the first part that has it; none if that part says it was removed."""
    if len(parts) == 1:
        return None if is_removed[0] else parts[0]
    lengths = [len(part.ids_N) for part in parts]
    ids = torch.cat([part.ids_N for part in parts]).numpy()
    order = np.argsort(ids, kind="stable")
    is_first = np.append(True, ids[order][1:] != ids[order][:-1])
    kept = order[is_first & ~np.repeat(is_removed, lengths)[order]]
    if not len(kept):
        return None
    place = np.full(len(ids), -1, dtype=np.int64)
    place[kept] = np.arange(len(kept))
    places = [torch.from_numpy(place[end - n : end]) for n, end in zip(lengths, np.cumsum(lengths), strict=True)]
    taken = [(part, at) for part, at, gone in zip(parts, places, is_removed, strict=True) if not gone]
    columns = {
        name: _gathered([(part.states[name], at) for part, at in taken], len(kept)) for name in taken[0][0].states
    }
    return RowChunk(
        ids_N=torch.from_numpy(ids[kept]),
        scores_N=_gathered([(part.scores_N, at) for part, at in taken], len(kept)),
        weights_ND=_gathered([(part.weights_ND, at) for part, at in taken], len(kept)),
        states=columns,
    )


def _gathered(columns: list[tuple[Tensor, Tensor]], n: int) -> Tensor:
    """Rows of several arrays in one, each where it is said to be; -1: left out."""
    out = columns[0][0].new_empty((n, *columns[0][0].shape[1:]))
    for values, at in columns:
        which = (at >= 0).nonzero().flatten()
        out[at[which]] = values[which]
    return out


def _without_states(chunk: RowChunk) -> RowChunk:
    return replace(chunk, states={})
