"""Bring pools to the rank whose bags they are, and sum the ranks' partial ones there, in rank order.

A reduce-scatter would leave the order of the sum to the library (gloo's is not the rank order from three ranks on) and
gloo's refuses batches of unequal size. An all-to-all moves, and the sum is ours: the same bits on every backend.
Columns that one rank has alone come from that rank only, and are copied.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torchrec.distributed.types import Awaitable, NoWait

from hybridrec._compat.torch_distributed import all_gather_single
from hybridrec._compat.torchrec import get_gradient_division


class RankOrderPooledDist(nn.Module):
    """Pools [sum of B_r, D_rank] of all ranks' bags -> awaitable of whole pools [B, D] of this rank's bags."""

    def __init__(self, group: dist.ProcessGroup, owned_dims: Sequence[int] | None = None) -> None:
        """
        Args:
            group: Of the device.
            owned_dims: [W], how many columns each rank has alone: the last of its pools. None: none. In what comes
                out they stand behind the summed ones, rank after rank.
        """
        super().__init__()
        self._group = group
        self._owned_dims = [0] * group.size() if owned_dims is None else list(owned_dims)

    def forward(self, partial: Tensor, batch_size_per_rank: Sequence[int]) -> Awaitable[Tensor]:
        """
        Args:
            partial: float32 [sum of B_r, D_rank]: sums over the rows that this rank owns, bags of rank 0 first.
            batch_size_per_rank: [W], B_r.
        """
        if self._group.size() == 1:
            return NoWait(partial)
        shared = partial.shape[1] - self._owned_dims[self._group.rank()]
        return _PartialPools(partial, _Layout(self._group, list(batch_size_per_rank), shared, self._owned_dims))


@dataclass(frozen=True)
class _Layout:
    """Of one exchange."""

    group: dist.ProcessGroup
    sizes: list[int]
    """[W], bags of each rank."""
    shared: int
    """Columns that all ranks have a part of."""
    owned: list[int]
    """[W], columns that one rank has alone."""

    @property
    def num_bags(self) -> int:
        """This rank's."""
        return self.sizes[self.group.rank()]

    @property
    def counts_here(self) -> list[int]:
        """[W], values that are this rank's pools of each rank's bags."""
        width = self.shared + self.owned[self.group.rank()]
        return [size * width for size in self.sizes]

    @property
    def counts_there(self) -> list[int]:
        """[W], values that are each rank's pools of this rank's bags."""
        return [self.num_bags * (self.shared + owned) for owned in self.owned]


class _PartialPools(Awaitable[Tensor]):
    """The exchange in flight; the sum happens at `wait`."""

    def __init__(self, partial: Tensor, layout: _Layout) -> None:
        super().__init__()
        self._partial, self._layout = partial, layout
        data = partial.detach().contiguous().view(-1)
        there = layout.counts_there
        self._received = data.new_empty(sum(there))
        self._work = dist.all_to_all_single(
            self._received, data, there, layout.counts_here, group=layout.group, async_op=True
        )
        self._sent = data  # alive until the exchange is over

    def _wait_impl(self) -> Tensor:
        self._work.wait()
        pooled: Tensor = _SumInRankOrder.apply(self._partial, self._received, self._layout)
        return pooled


class _SumInRankOrder(torch.autograd.Function):
    """Forward: add what was received. Backward: every rank gets the gradients of all ranks' bags."""

    @staticmethod
    def forward(ctx: Any, partial: Tensor, received: Tensor, layout: _Layout) -> Tensor:
        ctx.layout = layout
        parts = [
            part.view(layout.num_bags, layout.shared + owned)
            for part, owned in zip(received.split(layout.counts_there), layout.owned, strict=True)
        ]
        pooled = received.new_empty((layout.num_bags, layout.shared + sum(layout.owned)))
        total = pooled[:, : layout.shared]
        total.copy_(parts[0][:, : layout.shared])
        for part in parts[1:]:
            total += part[:, : layout.shared]
        start = layout.shared
        for part, owned in zip(parts, layout.owned, strict=True):
            pooled[:, start : start + owned] = part[:, layout.shared :]
            start += owned
        return pooled

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        layout: _Layout = ctx.layout
        # As in TorchRec's own collectives: the loss is a mean over the ranks' batches.
        grad = grad / len(layout.sizes) if get_gradient_division() else grad
        width = layout.shared + layout.owned[layout.group.rank()]
        gathered = grad.new_empty((sum(layout.sizes), width))
        if not any(layout.owned) and len(set(layout.sizes)) == 1:
            all_gather_single(gathered, grad.contiguous(), group=layout.group)
        else:
            sent, here = _by_rank(grad, layout), layout.counts_here
            dist.all_to_all_single(gathered.view(-1), sent, here, layout.counts_there, group=layout.group)
        return gathered, None, None


def _by_rank(grad: Tensor, layout: _Layout) -> Tensor:
    """The gradients of this rank's bags as each rank gets them: of the columns that it has."""
    sent = grad.new_empty(sum(layout.counts_there))
    start = layout.shared
    for part, owned in zip(sent.split(layout.counts_there), layout.owned, strict=True):
        columns = part.view(layout.num_bags, layout.shared + owned)
        columns[:, : layout.shared] = grad[:, : layout.shared]
        columns[:, layout.shared :] = grad[:, start : start + owned]
        start += owned
    return sent
