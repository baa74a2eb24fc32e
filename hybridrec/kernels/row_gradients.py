"""From the gradients of bags to one gradient a row, in a fixed order.

Occurrences are sorted by row, stably, so that those of one row stand together in the order in which they were fed.
Then the gradient of a row is a pooled lookup again, the other way round: a "bag" of the gradients of the bags that its
occurrences are in. One reduction with one order serves both directions.
"""

from __future__ import annotations

import torch
from torch import Tensor


def sum_bags(table: Tensor, index_N: Tensor, offsets: Tensor, weights_N: Tensor | None) -> Tensor:
    """Sum (or weighted sum) of rows of ``table`` for every bag, in order of position; an empty bag is 0.

    The order is embedding_bag's own in its forward: one bag after the other by one thread (of the host or of the
    device), one position after the other. So the bits depend neither on the number of threads nor on other bags.

    Args:
        table: float32 [R, D], contiguous.
        index_N: int64 [N], rows of ``table``.
        offsets: int64 [bags + 1], the last being N.
        weights_N: float32 [N] or None.

    Returns:
        float32 [bags, D], without an autograd graph.
    """
    with torch.no_grad():
        pooled: Tensor = torch.embedding_bag(
            table, index_N, offsets, per_sample_weights=weights_N, mode=0, include_last_offset=True
        )[0]
    return pooled


def group_by_row(rows_N: Tensor, *, spare_row: int | None) -> tuple[Tensor, Tensor, Tensor]:
    """Group occurrences by row.

    Args:
        rows_N: int64 [N], N >= 1.
        spare_row: None: U is counted, which on a device waits for it. Else nothing waits: the result is padded to
            U = N, and the padding is this row, which no batch uses, with no occurrences.

    Returns:
        The unique rows int64 [U] in ascending order; where each one's occurrences start, int64 [U + 1]; the order of
        occurrences int64 [N]: grouped by row and, within one, as they were fed.

    Example:
        # rows_N:  [7, 3, 7]   spare_row None:  [3, 7]       [0, 1, 3]      [1, 0, 2]
        #                      spare_row 9:     [3, 7, 9]    [0, 1, 3, 3]   [1, 0, 2]
    """
    sorted_N, order_N = torch.sort(rows_N, stable=True)
    if spare_row is None:
        unique_U, counts_U = torch.unique_consecutive(sorted_N, return_counts=True)
        starts = counts_U.new_zeros(unique_U.shape[0] + 1)
        torch.cumsum(counts_U, 0, out=starts[1:])
        return unique_U, starts, order_N
    n = rows_N.shape[0]
    is_first = torch.ones_like(sorted_N, dtype=torch.bool)
    torch.ne(sorted_N[1:], sorted_N[:-1], out=is_first[1:])
    position = torch.arange(n, device=rows_N.device)
    starts = torch.full((n + 1,), n, dtype=torch.int64, device=rows_N.device)
    # Occurrences that are not the first of their row all write to the last entry, which then gets its true value.
    starts.scatter_(0, torch.where(is_first, is_first.cumsum(0) - 1, n), position)
    starts[n:].fill_(n)
    is_padding = starts[:-1] == n
    unique_N = sorted_N.index_select(0, starts[:-1].clamp(max=n - 1)).masked_fill(is_padding, spare_row)
    return unique_N, starts, order_N
