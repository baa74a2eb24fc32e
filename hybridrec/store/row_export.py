"""Rows that leave a table part by part: `RowChunk`, `RowExport`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from hybridrec.errors import ConfigError, StateError
from hybridrec.native import ShardGroup
from hybridrec.store.row_state_layout import FLOAT_BYTES, RowStateLayout

CHUNK_BYTES = 2**18
"""Records of a chunk, unless the caller asks for a number of rows: little enough that training hardly waits for it."""


@dataclass(frozen=True, kw_only=True)
class RowChunk:
    """Some rows of a table, ascending by id, in host memory."""

    ids_N: Tensor
    """int64 [N]"""
    scores_N: Tensor
    """int64 [N]: the ordinal of the last committed batch that used the row."""
    weights_ND: Tensor
    """[N, D] of the table's type: float32, bfloat16 or float16."""
    states: Mapping[str, Tensor] = field(default_factory=dict)
    """Optimizer state by name: float32 [N, D], or [N] of a state that has one value a row."""

    @classmethod
    def of_records(cls, ids_N: Tensor, scores_N: Tensor, records: Tensor, layout: RowStateLayout) -> RowChunk:
        """Views of float32 [N, record]: words of the weights, row-sized states, row-wise states."""
        slices = layout.record_slices
        states = {s.name: records[:, slices[s.name]] for s in layout.states}
        for state in layout.row_wise_states:
            states[state.name] = states[state.name].squeeze(1)
        weights_ND = layout.row_type.values(records[:, slices["weights"]], layout.dim)
        return cls(ids_N=ids_N, scores_N=scores_N, weights_ND=weights_ND, states=states)

    def part(self, begin: int, end: int) -> RowChunk:
        """Rows begin to end, as views."""
        rows = slice(begin, end)
        states = {name: state[rows] for name, state in self.states.items()}
        return RowChunk(
            ids_N=self.ids_N[rows], scores_N=self.scores_N[rows], weights_ND=self.weights_ND[rows], states=states
        )

    def records(self, layout: RowStateLayout) -> Tensor:
        """float32 [N, record], contiguous: what `of_records` was given, or a copy."""
        whole = self.weights_ND._base
        if whole is not None and whole.shape == (len(self.ids_N), layout.record_floats) and whole.is_contiguous():
            return whole
        records = torch.empty((len(self.ids_N), layout.record_floats), dtype=torch.float32)
        slices = layout.record_slices
        records[:, slices["weights"]] = layout.row_type.words(self.weights_ND)
        for state in layout.states:
            part = self.states[state.name]
            records[:, slices[state.name]] = part.unsqueeze(1) if state.is_row_wise else part
        return records


def side_by_side(streams: Sequence[Iterator[RowChunk]]) -> Iterator[list[RowChunk]]:
    """Chunks of several streams of equally many rows, cut so that those that come together have equally many.

    Raises:
        StateError: At the end, a stream has rows left that another has not.
    """
    streams = [(chunk for chunk in stream if len(chunk.ids_N)) for stream in streams]
    heads = [next(stream, None) for stream in streams]
    while all(head is not None for head in heads):
        found = [head for head in heads if head is not None]
        n = min(len(head.ids_N) for head in found)
        yield [head.part(0, n) for head in found]
        heads = [
            head.part(n, len(head.ids_N)) if n < len(head.ids_N) else next(stream, None)
            for head, stream in zip(found, streams, strict=True)
        ]
    if any(head is not None for head in heads):
        ended = [i for i, head in enumerate(heads) if head is None]
        raise StateError(
            f"columns of one table have different numbers of rows: of {len(heads)} parts those at {ended} end before "
            "the others. They must have been saved together; load another snapshot."
        )


class RowExport(Iterator[RowChunk]):
    """The committed rows of one table as they were when the export began; chunks can be read once.

    Of a shard: what happens to the table afterwards changes nothing of it; it takes memory until it is read to its end
    or closed. Of an unsharded table: reading on after rows changed raises `StateError`.
    """

    def __init__(
        self, num_rows: int, chunk_rows: int, read: Callable[[int], RowChunk], close: Callable[[], None]
    ) -> None:
        """
        Args:
            num_rows: R.
            chunk_rows: Most rows of a chunk.
            read: The next n rows.
            close: Called once, at the end.
        """
        if chunk_rows < 1:
            close()
            raise ConfigError(f"chunk_rows={chunk_rows}. Pass how many rows a chunk may have, 1 or more.")
        self.num_rows = num_rows
        """R: all of them, those that were read already too."""
        self._chunk_rows, self._read, self._close = chunk_rows, read, close
        self._num_left, self._is_closed = num_rows, False

    def __next__(self) -> RowChunk:
        if self._is_closed or not self._num_left:
            self.close()
            raise StopIteration
        chunk = self._read(min(self._chunk_rows, self._num_left))
        self._num_left -= len(chunk.ids_N)
        return chunk

    def close(self) -> None:
        """Let go of what was not read; legal at any time."""
        if not self._is_closed:
            self._is_closed = True
            self._close()

    def __del__(self) -> None:
        if not getattr(self, "_is_closed", True):
            self.close()


class ShardRows:
    """The committed rows of one table of a shard as they were when this was made; each is read once, ascending by id.

    What happens to the table afterwards changes nothing of them. They take memory until they are closed.
    """

    def __init__(self, group: ShardGroup, table: int, layout: RowStateLayout, *, above_score: int = 0) -> None:
        """
        Args:
            group: Its slots were flushed.
            table: Index.
            layout: Of its rows.
            above_score: Only rows that batches after this ordinal trained.

        Raises:
            StateError: Slots are newer than the store, or rows of a batch are still to be moved.
        """
        self._group, self.layout = group, layout
        self._handle, self.num_rows = group.export_begin(table, above_score=above_score)
        self.num_left = self.num_rows
        """Rows that were not read."""
        self.is_closed = False
        """Whether nobody reads on."""

    def read(self, ids_N: Tensor, scores_N: Tensor, records: Tensor) -> None:
        """The next N rows, without batches in flight.

        Args:
            ids_N: int64 [N], written; N is at most `num_left`.
            scores_N: int64 [N], written.
            records: float32 [N, record], written.
        """
        self._group.export_next(self._handle, ids_N, scores_N, records)
        self.num_left -= len(ids_N)

    def close(self) -> None:
        """Let go of what was not read; legal at any time."""
        if not self.is_closed:
            self.is_closed = True
            self._group.export_end(self._handle)

    def __del__(self) -> None:
        if not getattr(self, "is_closed", True):
            self.close()


def export_shard(rows: ShardRows, *, chunk_rows: int | None = None) -> RowExport:
    """Rows of a shard, chunk by chunk.

    Args:
        rows: Nobody else reads them.
        chunk_rows: Most rows of a chunk; None: as many as make `CHUNK_BYTES`.
    """
    layout = rows.layout

    def read(n: int) -> RowChunk:
        ids_N, scores_N = torch.empty(n, dtype=torch.int64), torch.empty(n, dtype=torch.int64)
        records = torch.empty((n, layout.record_floats), dtype=torch.float32)
        rows.read(ids_N, scores_N, records)
        return RowChunk.of_records(ids_N, scores_N, records, layout)

    return RowExport(rows.num_rows, rows_of_chunk(layout) if chunk_rows is None else chunk_rows, read, rows.close)


def rows_of_chunk(layout: RowStateLayout) -> int:
    """How many rows make `CHUNK_BYTES`; one at least."""
    return max(1, CHUNK_BYTES // (layout.record_floats * FLOAT_BYTES))
