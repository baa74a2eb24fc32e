"""Made-up clicks: reproducible, as skewed as asked for, and with the planted structure that is claimed."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor
from torchmetrics.functional.classification import binary_auroc

from examples.little_demo.batch import Batch, Share, load
from examples.little_demo.powerlaw import LOGIT_SIZE, PowerLaw, PowerLawSizes

SMALL = PowerLawSizes(rows=1_000, ids=50, features=3, exponent=1.0)


def columns(batches: list[Batch], num_features: int) -> Tensor:
    """int64 [F, N] ids of all rows."""
    return torch.cat([batch.ids.values().view(num_features, -1) for batch in batches], 1)


@pytest.mark.parametrize(("world_size", "workers"), [(1, 2), (2, 0), (3, 0)])
def test_rows_do_not_depend_on_ranks_and_workers(world_size: int, workers: int) -> None:
    data = PowerLaw(SMALL, seed=4)
    alone = list(data.train_batches(Share(batch_size=64), 0))
    assert len(alone) == data.num_batches(64) == 16
    assert [len(batch.labels) for batch in alone] == [64] * 16  # 1,000 rounded up
    for rank in range(world_size):
        share = Share(batch_size=64, rank=rank, world_size=world_size)
        mine = list(load(data, share, epochs=range(1), num_workers=workers, pin_memory=False))
        for batch, whole in zip(mine, alone, strict=True):
            assert torch.equal(columns([batch], 3), columns([whole], 3)[:, rank::world_size])
            assert torch.equal(batch.labels, whole.labels[rank::world_size])


def test_seeds_and_parts_differ() -> None:
    share = Share(batch_size=256)
    first, again, negative = (next(PowerLaw(SMALL, seed=seed).train_batches(share, 0)) for seed in (1, 1, -1))
    held_out = next(PowerLaw(SMALL, seed=1).test_batches(share))
    assert torch.equal(first.ids.values(), again.ids.values()) and torch.equal(first.labels, again.labels)
    assert not torch.equal(first.labels, held_out.labels)
    assert set(first.ids.values().tolist()) & set(held_out.ids.values().tolist())
    assert not set(first.ids.values().tolist()) & set(negative.ids.values().tolist())


def test_ids_are_raw_and_no_two_features_share_one() -> None:
    data = PowerLaw(PowerLawSizes(rows=20_000, ids=2_000, features=2, exponent=0.0), seed=0)
    ids = columns(list(data.train_batches(Share(batch_size=1_000), 0)), 2)
    distinct = [set(column.tolist()) for column in ids]
    assert [len(d) for d in distinct] == [pytest.approx(2_000, abs=5)] * 2
    assert not distinct[0] & distinct[1]
    eighths = torch.histc(ids.double(), bins=8, min=-(2.0**63), max=2.0**63)
    assert eighths.min() > 0.8 * ids.numel() / 8


@pytest.mark.parametrize("exponent", [0.0, 0.7, 1.0, 1.5])
def test_frequencies_follow_the_power_law(exponent: float) -> None:
    num_ids, num_rows = 100, 100_000
    data = PowerLaw(PowerLawSizes(rows=num_rows, ids=num_ids, features=1, exponent=exponent), seed=0)
    ids = columns(list(data.train_batches(Share(batch_size=num_rows), 0)), 1)
    counts = torch.unique(ids, return_counts=True)[1].sort(descending=True).values.numpy()
    # The mass that the density x^-exponent has on [k, k + 1).
    grid = np.linspace(1, num_ids + 1, num_ids * 1_000 + 1)
    density = ((grid[:-1] + grid[1:]) / 2) ** -exponent
    mass = density.reshape(num_ids, 1_000).sum(1) / density.sum()
    assert len(counts) == num_ids
    np.testing.assert_allclose(counts[:5], num_rows * mass[:5], rtol=0.15)
    np.testing.assert_allclose(counts[50:].sum(), num_rows * mass[50:].sum(), rtol=0.1)


def test_planted_logits_are_sums_over_ids_and_labels_follow_them() -> None:
    data = PowerLaw(PowerLawSizes(rows=100_000, ids=300, features=3, exponent=0.0), seed=0)
    batch = next(data.train_batches(Share(batch_size=100_000), 0))
    logits = data.planted_logits(batch)
    # Each id has one number, the same in every row: least squares over the ids explains the logits completely.
    ids, position = torch.unique(batch.ids.values(), return_inverse=True)
    rows = position.view(3, -1).T[:4_000]
    design = torch.zeros(len(rows), len(ids) + 1, dtype=torch.float64).scatter_(1, rows, 1.0)
    design[:, -1] = 1.0
    fitted = design @ torch.linalg.lstsq(design, logits[:4_000, None], driver="gelsd").solution
    torch.testing.assert_close(fitted[:, 0], logits[:4_000])
    assert float(logits.std()) == pytest.approx(LOGIT_SIZE * 3**0.5, rel=0.1)
    # Among rows with nearly the same logit, the share of clicks is its sigmoid.
    order = logits.argsort()
    for part in order.split(10_000):
        expected, clicked = logits[part].sigmoid().mean(), batch.labels[part].mean()
        assert float(clicked) == pytest.approx(float(expected), abs=4 * (0.25 / 10_000) ** 0.5)


def test_nothing_ranks_better_than_the_planted_logits() -> None:
    data = PowerLaw(PowerLawSizes(rows=40_000), seed=0)
    (batch,) = data.test_batches(Share(batch_size=10_000))
    logits, labels = data.planted_logits(batch), batch.labels.int()
    best = float(binary_auroc(logits, labels))
    assert 0.75 < best < 0.9
    # Expected AUC from the probabilities alone, without the drawn labels.
    p = logits.sigmoid().sort().values
    below = (1 - p).cumsum(0) - (1 - p)
    assert best == pytest.approx(float((p * below).sum() / ((p.sum() * (1 - p).sum()) - (p * (1 - p)).sum())), abs=0.01)
    noise = torch.randn(len(logits), generator=torch.Generator().manual_seed(0))
    for size in (0.5, 1.0, 5.0):
        assert 0.5 < float(binary_auroc(logits + size * noise, labels)) < best


def test_tables_plan_what_can_occur() -> None:
    data = PowerLaw(SMALL, seed=0)
    tables = data.tables()
    assert [table.feature for table in tables] == ["f1", "f2", "f3"]
    occurring = columns(list(data.train_batches(Share(batch_size=64), 0)), 3)
    for table, column in zip(tables, occurring, strict=True):
        assert table.planned_rows == 50 == len(torch.unique(table.ids))
        assert set(column.tolist()) <= set(table.ids.tolist())
