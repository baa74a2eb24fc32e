"""Sum the ranks' partial pools, in rank order, on the rank whose bags they are.

A reduce-scatter would leave the order of the sum to the library (gloo's is not the rank order from three ranks on) and
gloo's refuses batches of unequal size. An all-to-all moves, and the sum is ours: the same bits on every backend.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torchrec.distributed.types import Awaitable, NoWait

from hybridrec._compat.torch_distributed import all_gather_single
from hybridrec._compat.torchrec import get_gradient_division


class RankOrderPooledDist(nn.Module):
    """Partial pools [sum of B_r, D] of all ranks' bags -> awaitable of whole pools [B, D] of this rank's bags."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        super().__init__()
        self._group = group
        self._rank = group.rank()

    def forward(self, partial: Tensor, batch_size_per_rank: Sequence[int]) -> Awaitable[Tensor]:
        """
        Args:
            partial: float32 [sum of B_r, D]: sums over the rows that this rank owns, bags of rank 0 first.
            batch_size_per_rank: [W], B_r.
        """
        if self._group.size() == 1:
            return NoWait(partial)
        return _PartialPools(partial, list(batch_size_per_rank), self._rank, self._group)


class _PartialPools(Awaitable[Tensor]):  # type: ignore[misc]
    """The exchange in flight; the sum happens at `wait`."""

    def __init__(self, partial: Tensor, sizes: list[int], rank: int, group: dist.ProcessGroup) -> None:
        super().__init__()
        self._partial, self._sizes, self._rank, self._group = partial, sizes, rank, group
        own = sizes[rank]
        data = partial.detach().contiguous()
        self._received = data.new_empty((len(sizes) * own, data.shape[1]))
        self._work = dist.all_to_all_single(self._received, data, [own] * len(sizes), sizes, group=group, async_op=True)
        self._sent = data  # alive until the exchange is over

    def _wait_impl(self) -> Tensor:
        self._work.wait()
        pooled: Tensor = _SumInRankOrder.apply(self._partial, self._received, self._sizes, self._rank, self._group)
        return pooled


class _SumInRankOrder(torch.autograd.Function):
    """Forward: add what was received. Backward: every rank gets the gradients of all ranks' bags."""

    @staticmethod
    def forward(
        ctx: Any, partial: Tensor, received: Tensor, sizes: list[int], rank: int, group: dist.ProcessGroup
    ) -> Tensor:
        ctx.sizes, ctx.rank, ctx.group = sizes, rank, group
        parts = received.view(len(sizes), sizes[rank], received.shape[1])
        total = parts[0].clone()
        for part in parts[1:]:
            total += part
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        sizes, own = ctx.sizes, ctx.sizes[ctx.rank]
        world_size = len(sizes)
        # As in TorchRec's own collectives: the loss is a mean over the ranks' batches.
        grad = (grad / world_size if get_gradient_division() else grad).contiguous()
        gathered = grad.new_empty((sum(sizes), grad.shape[1]))
        if all(size == own for size in sizes):
            all_gather_single(gathered, grad, group=ctx.group)
        else:
            dist.all_to_all_single(gathered, grad.repeat(world_size, 1), sizes, [own] * world_size, group=ctx.group)
        return gathered, None, None, None, None
