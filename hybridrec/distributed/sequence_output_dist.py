"""Rows of sequences travel from their owner to the ids that asked for them; gradients travel the other way.

Nothing is added up here: every gradient arrives at the owner as it left, where the kernel sums those of a row in the
order (feature, source rank, position), whatever the exchange does.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torchrec.distributed.types import Awaitable, LazyAwaitable, NoWait
from torchrec.sparse.jagged_tensor import JaggedTensor

from hybridrec._compat.torchrec import get_gradient_division
from hybridrec.distributed.sequence_input_dist import ReceivedIds, SentIds


@dataclass(frozen=True, kw_only=True)
class SequenceRoute:
    """The ways of one batch on this rank, both ends; index tensors where the rows are."""

    sent: SentIds
    received: ReceivedIds

    def tensors(self) -> Iterator[Tensor]:
        """The index tensors."""
        every = (self.sent.position_N, self.sent.origin_N, self.received.by_source, self.received.gradient_N)
        return (tensor for tensor in every if tensor is not None)


class SequenceDist(nn.Module):
    """Rows of the ids that this rank owns -> awaitable of the rows of this rank's ids."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        super().__init__()
        self._group = group

    def forward(self, rows: Tensor, route: SequenceRoute) -> Awaitable[Tensor]:
        """
        Args:
            rows: float32 [ids that this rank owns, D], ordered (feature, source rank, sample); or cells of them.
            route: Of the batch.
        """
        return NoWait(rows) if self._group.size() == 1 else _RowsUnderWay(rows, route, self._group)


class _RowsUnderWay(Awaitable[Tensor]):
    """The exchange in flight; the rows are put in order at `wait`."""

    def __init__(self, rows: Tensor, route: SequenceRoute, group: dist.ProcessGroup) -> None:
        super().__init__()
        assert route.received.by_source is not None
        self._rows, self._route, self._group = rows, route, group
        to_rank, from_rank = route.received.rows_to_rank, route.sent.rows_from_rank
        self._outgoing = rows.detach().index_select(0, route.received.by_source)  # alive until the exchange is over
        self._incoming = rows.new_empty((sum(from_rank), rows.shape[1]))
        self._work = dist.all_to_all_single(
            self._incoming, self._outgoing, from_rank, to_rank, group=group, async_op=True
        )

    def _wait_impl(self) -> Tensor:
        self._work.wait()
        rows: Tensor = _InPlace.apply(self._rows, self._incoming, self._route, self._group)
        return rows


class _InPlace(torch.autograd.Function):
    """Forward: a row for every id. Backward: the gradient of every id to the owner of its row."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, incoming: Tensor, route: SequenceRoute, group: dist.ProcessGroup) -> Tensor:
        ctx.route, ctx.group = route, group
        assert route.sent.position_N is not None
        return incoming.index_select(0, route.sent.position_N)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        sent, received = ctx.route.sent, ctx.route.received
        # As in TorchRec's own collectives: the loss is a mean over the ranks' batches.
        grad = grad / ctx.group.size() if get_gradient_division() else grad
        outgoing = grad.index_select(0, sent.origin_N)
        incoming = grad.new_empty((sum(received.ids_from_rank), grad.shape[1]))
        dist.all_to_all_single(incoming, outgoing, received.ids_from_rank, sent.ids_to_rank, group=ctx.group)
        return incoming.index_select(0, received.gradient_N), None, None, None


@dataclass(frozen=True, kw_only=True)
class SequenceOutputs:
    """What is made of the rows of this rank's ids."""

    features: list[tuple[str, list[int]]]
    """Name of the output, places of its feature in the order of the lookup, one a column shard and in the order of the
    columns; in the order of the unsharded collection."""
    dims: list[int]
    """[F]: columns of the rows of each feature, in the order of the lookup."""
    counts: list[int]
    """[F]: ids of each feature, in the order of the lookup."""
    lengths_FB: Tensor
    """[F, B]"""
    ids_N: Tensor | None
    """[N]: if outputs carry their ids."""

    def finish(self, cells: Tensor) -> dict[str, JaggedTensor]:
        """What the unsharded collection returns; from float32 [cells, columns of a cell]."""
        sizes = [count * dim // cells.shape[1] for count, dim in zip(self.counts, self.dims, strict=True)]
        parts = zip(cells.split(sizes), self.dims, strict=True)
        rows, lengths = [part.view(-1, dim) for part, dim in parts], self.lengths_FB.unbind()
        ids = None if self.ids_N is None else self.ids_N.split(self.counts)
        return {
            name: JaggedTensor(
                values=torch.cat([rows[f] for f in places], 1) if len(places) > 1 else rows[places[0]],
                lengths=lengths[places[0]],
                weights=None if ids is None else ids[places[0]],
            )
            for name, places in self.features
        }


class SequenceAwaitable(LazyAwaitable[dict[str, JaggedTensor]]):
    """The output of a forward; whoever touches it waits."""

    def __init__(self, rows: Awaitable[Tensor], outputs: SequenceOutputs, dtype: torch.dtype) -> None:
        super().__init__()
        self._rows, self._outputs, self._dtype = rows, outputs, dtype

    def _wait_impl(self) -> dict[str, JaggedTensor]:
        return self._outputs.finish(self._rows.wait().to(self._dtype))
