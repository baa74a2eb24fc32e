"""Grouping occurrences by row, compact and padded."""

from __future__ import annotations

import pytest
import torch

from hybridrec.kernels.row_gradients import group_by_row, sum_bags


def test_groups_are_ascending_and_keep_the_order_of_occurrences() -> None:
    unique, starts, order = group_by_row(torch.tensor([7, 3, 7, 7, 0]), spare_row=None)
    assert unique.tolist() == [0, 3, 7]
    assert starts.tolist() == [0, 1, 2, 5]
    assert order.tolist() == [4, 1, 0, 2, 3]


def test_padding_is_the_spare_row_without_occurrences() -> None:
    unique, starts, order = group_by_row(torch.tensor([7, 3, 7, 7, 0]), spare_row=9)
    assert unique.tolist() == [0, 3, 7, 9, 9]
    assert starts.tolist() == [0, 1, 2, 5, 5, 5]
    assert order.tolist() == [4, 1, 0, 2, 3]


@pytest.mark.parametrize("rows", [[4], [4, 4, 4], [0, 1, 2], [2, 1, 0]])
def test_padded_begins_with_compact(rows: list[int]) -> None:
    compact, padded = group_by_row(torch.tensor(rows), spare_row=None), group_by_row(torch.tensor(rows), spare_row=9)
    u = compact[0].shape[0]
    assert padded[0].shape == (len(rows),)
    assert torch.equal(padded[0][:u], compact[0])
    assert set(padded[0][u:].tolist()) <= {9}
    assert torch.equal(padded[1][: u + 1], compact[1])
    assert set(padded[1][u:].tolist()) == {len(rows)}


def test_bags_are_summed_without_a_graph() -> None:
    table = torch.tensor([[1.0, 2.0], [10.0, 20.0]], requires_grad=True)
    index, offsets = torch.tensor([1, 0, 1]), torch.tensor([0, 2, 2, 3])
    assert sum_bags(table, index, offsets, None).tolist() == [[11.0, 22.0], [0.0, 0.0], [10.0, 20.0]]
    weighted = sum_bags(table, index, offsets, torch.tensor([0.5, 2.0, 3.0]))
    assert weighted.tolist() == [[7.0, 14.0], [0.0, 0.0], [30.0, 60.0]]
    assert not weighted.requires_grad
