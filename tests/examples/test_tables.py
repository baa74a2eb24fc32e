"""How large the Little Demo makes its tables."""

from __future__ import annotations

import math

import pytest
import torch

from examples.little_demo.batch import TableFacts
from examples.little_demo.movielens import MovieLens, load_ratings, shuffled
from examples.little_demo.tables import MOST_DEVICE_ROWS, build_tables, choose_device_rows


@pytest.fixture(scope="module")
def data() -> MovieLens:
    return MovieLens(load_ratings(), seed=0)


@pytest.mark.parametrize("world_size", [1, 2, 4, 8])
@pytest.mark.parametrize("batch_size", [64, 512, 4_096])
def test_device_tier_holds_a_batch(data: MovieLens, batch_size: int, world_size: int) -> None:
    tables = build_tables(data.tables(), batch_size=batch_size, world_size=world_size, depth=3, seed=0)
    device_rows = {table.name: table.device_rows for table in tables}
    order = shuffled(torch.arange(len(data.ratings)), seed=1, epoch=0)
    for name, ids in (("user", data.ratings.users), ("movie", data.ratings.movies)):
        largest = max(len(torch.unique(ids[rows])) for rows in torch.split(order, batch_size))
        in_flight = [len(torch.unique(ids[rows])) for rows in torch.split(order, 3 * batch_size)[:-1]]
        rows = device_rows[name]
        assert rows is not None
        assert rows >= largest / world_size
        assert rows >= 0.95 * sum(in_flight) / len(in_flight) / world_size
        if batch_size <= 512:
            assert rows < len(torch.unique(ids)) / world_size  # so rows have to move
    assert device_rows["genre"] is None


def test_what_a_sample_lacks_fits_too() -> None:
    facts = TableFacts(feature="c1", ids=torch.zeros(100, dtype=torch.int64), is_sample=True, planned_rows=10**6)
    # The sample has one id. Batches of different ids only would need this:
    expected = max(3 * 512, math.ceil(512 + 5 * math.sqrt(512)))
    assert choose_device_rows(facts, batch_size=512, world_size=1, depth=3) == max(expected, MOST_DEVICE_ROWS)
    few = TableFacts(feature="c1", ids=facts.ids, is_sample=True, planned_rows=2_000)
    assert choose_device_rows(few, batch_size=512, world_size=1, depth=3) == expected
