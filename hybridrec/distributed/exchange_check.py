"""Whether what the ranks sent each other arrived as it was sent: lengths that add up to the ids.

Lengths that were damaged on the way would make the owner read beyond the ids, or pool them into other bags.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torchrec.distributed.types import Awaitable

from hybridrec._compat.exchange import Received, wait_received
from hybridrec.errors import BackendError


class Refusable(Protocol):
    """A batch's context."""

    error: Exception | None


class CheckedSplits(Awaitable[Any]):
    """In place of the awaitable of an exchange's sizes: what it gives checks the ids' exchange at its `wait`."""

    def __init__(self, splits: Awaitable[Any], ctx: Refusable, rank: int) -> None:
        """
        Args:
            splits: TorchRec's.
            ctx: Gets the error, so that the verdict refuses the batch on all ranks.
            rank: This one.
        """
        super().__init__()
        self._splits, self._ctx, self._rank = splits, ctx, rank

    def _wait_impl(self) -> Awaitable[Any]:
        return _CheckedTensors(self._splits.wait(), self._ctx, self._rank)


class _CheckedTensors(Awaitable[Any]):
    """In place of the awaitable of the ids."""

    def __init__(self, tensors: Any, ctx: Refusable, rank: int) -> None:
        super().__init__()
        self._tensors, self._ctx, self._rank = tensors, ctx, rank

    def _wait_impl(self) -> Any:
        for received in wait_received(self._tensors.awaitables):
            problem = problem_of(received)
            if problem:
                self._ctx.error = self._ctx.error or BackendError(
                    f"rank {self._rank} of {len(received.num_ids)} received from {problem}. They were damaged between "
                    "the ranks, or a rank wrote over a batch on its way. If it happens again, check that rank's memory "
                    "and network."
                )
                received.lengths.zero_()  # what follows reads them, to put the ids in order
        return self._tensors.wait()


def problem_of(received: Received) -> str:
    """What does not fit, from which rank; empty if all does. One pass over the lengths."""
    ends = torch.tensor(received.num_lengths).cumsum(0)
    sums = torch.cat((received.lengths.new_zeros(1), received.lengths.cumsum(0)))[torch.cat((ends.new_zeros(1), ends))]
    for rank, (total, num_ids) in enumerate(zip(sums.diff().tolist(), received.num_ids, strict=True)):
        if total != num_ids:
            return f"rank {rank} {num_ids:,} ids and lengths that add up to {total:,}"
    if received.lengths.numel() and int(received.lengths.min()) < 0:
        position = int(received.lengths.argmin())
        rank = int(torch.searchsorted(ends, torch.tensor(position), right=True))
        return f"rank {rank} a length of {int(received.lengths[position]):,}"
    return ""
