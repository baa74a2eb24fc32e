"""DIST of sequences: ids travel to their owners as ever; here is kept by which way their rows come back.

    this rank                                                     the owner
    ids (feature, sample)  --sort by owner-->  (owner, feature, sample)  --exchange-->  (feature, source, sample)
    rows (feature, sample) <--`position`---    (owner, feature, sample)  <--exchange--  (source, feature, sample)

With ``dedups`` a rank sends each owner every id of a feature once, and where it occurs. The owner puts them back
together, so that it sees what it sees without; a row comes back once.

Where tables are cut into columns, rows of several widths travel in one exchange: as cells of one width, of which each
row has some. Ids are counted first; then what is kept is made anew of cells.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torchrec.distributed.types import Awaitable
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from hybridrec.distributed.input_dist import HashInputDist, keyed


@dataclass(frozen=True, kw_only=True)
class SentIds:
    """What the sender of a batch keeps. Index tensors are None where nothing moves (one rank)."""

    position_N: Tensor | None
    """int64 [N]: of each id of the batch, which of the rows that come back is its own. (Cells in place of rows and ids
    where widths differ, here and below.)"""
    origin_N: Tensor | None
    """int64 [N]: of each place in what was sent, rank after rank, which id of the batch is there."""
    ids_to_rank: list[int]
    """[W]"""
    rows_from_rank: list[int]
    """[W]: as many, unless repeated ids were sent once."""


@dataclass(frozen=True, kw_only=True)
class ReceivedIds:
    """What the owner of rows keeps of a batch of all ranks."""

    by_source: Tensor | None
    """int64: which of the rows that are looked up go back, rank after rank."""
    gradient_N: Tensor | None
    """int64 [N]: of each id that is looked up, which of the gradients that arrive is its own."""
    ids_from_rank: list[int]
    """[W]"""
    rows_to_rank: list[int]
    """[W]"""


class SequenceInputDist:
    """Sends the ids of a batch, and puts together what the owner gets."""

    def __init__(
        self, input_dist: HashInputDist, host_group: dist.ProcessGroup, feature_cells: Sequence[int], *, dedups: bool
    ) -> None:
        """
        Args:
            input_dist: Knows who owns what.
            host_group: gloo group of all ranks.
            feature_cells: [F], in the order of the lookup: of how many cells the rows are.
            dedups: Whether an id that a feature repeats is sent once.
        """
        self._input_dist = input_dist
        self._world_size = host_group.size()
        self._dedups = dedups and self._world_size > 1
        self._is_cut = any(cells > 1 for cells in feature_cells)
        self._cells_F = torch.tensor(feature_cells)
        self._cells_by_rank = input_dist.router.by_rank(self._cells_F)
        self._own_cells = self._cells_by_rank[host_group.rank()]

    def send(self, features: KeyedJaggedTensor) -> tuple[list[Awaitable[Awaitable[KeyedJaggedTensor]]], SentIds]:
        """Begin the exchange.

        Args:
            features: As for `HashInputDist.forward`, of B samples.

        Returns:
            What `receive` wants, once it was waited for; and what to keep.
        """
        num_ids = features.values().numel()
        if self._world_size == 1:
            sent = SentIds(position_N=None, origin_N=None, ids_to_rank=[num_ids], rows_from_rank=[num_ids])
            return [self._input_dist.send(keyed(features))], sent
        routed, position_N = self._input_dist.router.sort(keyed(features), needs_positions=True)
        if position_N is None:  # nothing moved
            position_N = torch.arange(num_ids)
        counts = _counts(routed.lengths(), len(routed.keys()))
        to_rank = self._by_rank(counts)
        origin_N = _inverse(position_N)
        if not self._dedups:
            sent = SentIds(position_N=position_N, origin_N=origin_N, ids_to_rank=to_rank, rows_from_rank=to_rank)
            return [self._input_dist.send(routed)], self._cut_sent(sent, features, counts, counts)
        unique_U, unique_counts, number_N = _unique_by_block(routed.values(), counts)
        first = F.pad(unique_counts.cumsum(0), (1, 0))[:-1].repeat_interleave(counts)
        occurrences = _with_values(routed, (number_N - first).to(torch.int32))
        uniques = KeyedJaggedTensor(keys=routed.keys(), values=unique_U, lengths=unique_counts, stride=1)
        sent = SentIds(
            position_N=number_N[position_N],
            origin_N=origin_N,
            ids_to_rank=to_rank,
            rows_from_rank=self._by_rank(unique_counts),
        )
        sent = self._cut_sent(sent, features, counts, unique_counts)
        return [self._input_dist.send(occurrences), self._input_dist.send(uniques)], sent

    def receive(
        self, received: Sequence[KeyedJaggedTensor], samples_per_rank: Sequence[int] | None
    ) -> tuple[KeyedJaggedTensor, ReceivedIds]:
        """The keys that this rank owns, ordered (feature, source rank, sample), and what to keep.

        Args:
            received: What `send` of all ranks gave.
            samples_per_rank: [W], B of each rank; not looked at for one rank.
        """
        keys = received[0]
        num_features, num_ids = len(keys.keys()), keys.values().numel()
        if self._world_size == 1:
            counts = [num_ids]
            return keys, ReceivedIds(by_source=None, gradient_N=None, ids_from_rank=counts, rows_to_rank=counts)
        assert samples_per_rank is not None
        ends = F.pad(keys.lengths().view(num_features, keys.stride()).to(torch.int64).cumsum(1), (1, 0))
        bounds = F.pad(torch.tensor(samples_per_rank).cumsum(0), (1, 0))
        counts_FW = ends[:, bounds].diff(dim=1)
        by_source = _by_source(counts_FW)
        from_rank = counts_FW.sum(0).tolist()
        gradient_N = _inverse(by_source)
        if not self._dedups:
            way = ReceivedIds(
                by_source=by_source, gradient_N=gradient_N, ids_from_rank=from_rank, rows_to_rank=from_rank
            )
            return keys, self._cut_received(way, counts_FW, counts_FW)
        uniques_FW = received[1].lengths().view(num_features, self._world_size).to(torch.int64)
        first = F.pad(uniques_FW.flatten().cumsum(0), (1, 0))[:-1].repeat_interleave(counts_FW.flatten())
        number_N = first + keys.values()
        way = ReceivedIds(
            by_source=_first_of(number_N, int(uniques_FW.sum()))[_by_source(uniques_FW)],
            gradient_N=gradient_N,
            ids_from_rank=from_rank,
            rows_to_rank=uniques_FW.sum(0).tolist(),
        )
        return _with_values(keys, received[1].values()[number_N]), self._cut_received(way, counts_FW, uniques_FW)

    def _cut_sent(self, sent: SentIds, features: KeyedJaggedTensor, counts: Tensor, row_counts: Tensor) -> SentIds:
        """The same way in cells, from ids and rows of each block of what is sent."""
        if not self._is_cut:
            return sent
        assert sent.position_N is not None and sent.origin_N is not None
        cells = torch.cat(self._cells_by_rank)
        cells_N = self._cells_F.repeat_interleave(_counts(features.lengths(), len(features.keys())))
        return replace(
            sent,
            position_N=_of_cells(sent.position_N, cells.repeat_interleave(row_counts)),
            origin_N=_of_cells(sent.origin_N, cells_N),
            ids_to_rank=self._by_rank(counts * cells),
            rows_from_rank=self._by_rank(row_counts * cells),
        )

    def _cut_received(self, received: ReceivedIds, counts_FW: Tensor, rows_FW: Tensor) -> ReceivedIds:
        """The same way in cells, from ids and rows of each feature and rank."""
        if not self._is_cut:
            return received
        assert received.by_source is not None and received.gradient_N is not None
        cells_N = self._own_cells.repeat_interleave(counts_FW.sum(1))
        arriving_N = torch.empty_like(cells_N)
        arriving_N[received.gradient_N] = cells_N
        cells_F1 = self._own_cells.unsqueeze(1)
        return replace(
            received,
            by_source=_of_cells(received.by_source, cells_N),
            gradient_N=_of_cells(received.gradient_N, arriving_N),
            ids_from_rank=(counts_FW * cells_F1).sum(0).tolist(),
            rows_to_rank=(rows_FW * cells_F1).sum(0).tolist(),
        )

    def _by_rank(self, counts: Tensor) -> list[int]:
        """[W]: sums of what the features of every rank have."""
        per_rank: list[int] = [int(part.sum()) for part in counts.split(self._input_dist.router.splits)]
        return per_rank


def _counts(lengths: Tensor, num_blocks: int) -> Tensor:
    """int64 [blocks]: ids of each block of as many samples."""
    return lengths.to(torch.int64).view(num_blocks, lengths.numel() // max(1, num_blocks)).sum(1)


def _of_cells(index_N: Tensor, cells_M: Tensor) -> Tensor:
    """An index of rows as one of their cells, if row m has ``cells_M[m]`` cells: int64 [cells of the rows in it].

    Example:
        # rows [2, 0],  cells [1, 3, 2]   ->   [4, 5, 0]
    """
    counts_N = cells_M[index_N]
    shift_N = (cells_M.cumsum(0) - cells_M)[index_N] - (counts_N.cumsum(0) - counts_N)
    shift = shift_N.repeat_interleave(counts_N)
    return shift + torch.arange(shift.numel())


def _unique_by_block(values_N: Tensor, counts: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Each value of a block once, ascending: int64 [U]; how many each block has; for each value its number among them.

    Example:
        # values [7, 3, 7 | 7],  counts [3, 1]   ->   [3, 7 | 7],  [2, 1],  [1, 0, 1, 2]
    """
    block_N = torch.arange(counts.numel()).repeat_interleave(counts)
    _, by_value = torch.sort(values_N, stable=True)
    _, by_block = torch.sort(block_N[by_value], stable=True)
    order = by_value[by_block]
    values, blocks = values_N[order], block_N[order]
    is_first = torch.ones_like(values, dtype=torch.bool)
    is_first[1:] = (values[1:] != values[:-1]) | (blocks[1:] != blocks[:-1])
    number_N = torch.empty_like(order)
    number_N[order] = is_first.cumsum(0) - 1
    return values[is_first], torch.bincount(blocks[is_first], minlength=counts.numel()), number_N


def _by_source(counts_FW: Tensor) -> Tensor:
    """int64 [N]: the places of what is ordered (feature, source rank), in the order (source rank, feature)."""
    starts_FW = F.pad(counts_FW.flatten().cumsum(0), (1, 0))[:-1].view(counts_FW.shape)
    counts, starts = counts_FW.t().reshape(-1), starts_FW.t().reshape(-1)
    shift = starts - F.pad(counts.cumsum(0), (1, 0))[:-1]
    moved: Tensor = shift.repeat_interleave(counts)
    return moved + torch.arange(moved.numel())


def _inverse(permutation: Tensor) -> Tensor:
    """The inverse, int64 [N]."""
    inverse = torch.empty_like(permutation)
    inverse[permutation] = torch.arange(permutation.numel())
    return inverse


def _first_of(number_N: Tensor, num_numbers: int) -> Tensor:
    """int64 [numbers]: where each number occurs first; every one does."""
    first = torch.full((num_numbers,), number_N.numel())
    return first.scatter_reduce_(0, number_N, torch.arange(number_N.numel()), "amin")


def _with_values(features: KeyedJaggedTensor, values: Tensor) -> KeyedJaggedTensor:
    return KeyedJaggedTensor(keys=features.keys(), values=values, lengths=features.lengths(), stride=features.stride())
