"""MovieLens in the Little Demo: ids, split, and what each rank reads."""

from __future__ import annotations

import hashlib
import math
import os

import pytest
import torch
from torch import Tensor

from examples.little_demo import movielens
from examples.little_demo.batch import Share, choose_num_workers, expected_distinct
from examples.little_demo.movielens import MovieLens, Ratings

NUM_RATINGS, NUM_USERS, NUM_MOVIES, NUM_GENRES = 100_004, 671, 9_066, 19


@pytest.fixture(scope="module")
def ratings() -> Ratings:
    return movielens.load_ratings()


def test_shipped_file_is_the_one_its_readme_describes() -> None:
    readme = (movielens.DATA_FILE.parent / "README.md").read_text(encoding="utf-8")
    assert hashlib.sha256(movielens.DATA_FILE.read_bytes()).hexdigest() in readme
    assert "10.1145/2827872" in readme
    assert "No commercial" in readme


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("user:12", 5967364541176743392),
        ("movie:1", 4580357406820928894),
        ("genre:Comedy", -1835397486398971776),
        ("", -5426141060434712860),
    ],
)
def test_ids_of_strings_never_change(text: str, expected: int) -> None:
    assert movielens.raw_id(text) == expected


def test_ids_use_the_whole_int64_range(ratings: Ratings) -> None:
    ids = torch.unique(ratings.movies)
    assert len(ids) == NUM_MOVIES  # no two movies share an id
    eighths = torch.histc(ids.double(), bins=8, min=-(2.0**63), max=2.0**63)
    assert eighths.min() > 1_000


def test_log_is_complete(ratings: Ratings) -> None:
    assert len(ratings) == len(ratings.users) == len(ratings.movies) == len(ratings.genre_lengths) == NUM_RATINGS
    assert len(torch.unique(ratings.users)) == NUM_USERS
    assert len(torch.unique(ratings.genres)) == NUM_GENRES
    assert len(ratings.genres) == ratings.genre_lengths.sum()
    assert (ratings.genre_lengths == 0).sum() == 18  # of movies "(no genres listed)": empty bags
    assert int(ratings.labels.sum()) == 51_568


def test_batch_holds_the_bags_of_its_rows_in_order() -> None:
    ratings = Ratings(
        users=torch.tensor([10, 11, 12, 13]),
        movies=torch.tensor([20, -21, 22, 23]),
        genres=torch.tensor([1, 2, 3, 4, 5, 6]),
        # Rating:                   0: [1, 2]  1: []  2: [3]  3: [4, 5, 6]
        genre_lengths=torch.tensor([2, 0, 1, 3]),
        labels=torch.tensor([0.0, 1.0, 0.0, 1.0]),
    )
    batch = ratings.batch(torch.tensor([3, 1, 0, 3]))
    bags = {
        key: [bag.tolist() for bag in batch.ids[key].values().split(batch.ids[key].lengths().tolist())]
        for key in batch.ids.keys()  # noqa: SIM118  (a KeyedJaggedTensor is no dict)
    }
    assert bags == {
        "user": [[13], [11], [10], [13]],
        "movie": [[23], [-21], [20], [23]],
        "genre": [[4, 5, 6], [], [1, 2], [4, 5, 6]],
    }
    assert batch.labels.tolist() == [1.0, 1.0, 0.0, 1.0]


def test_split_is_disjoint_complete_and_seeded() -> None:
    train, held_out = movielens.split_rows(1_001, seed=3)
    assert (len(train), len(held_out)) == (800, 201)
    assert torch.equal(torch.cat([train, held_out]).sort().values, torch.arange(1_001))
    again, other = movielens.split_rows(1_001, seed=3)[0], movielens.split_rows(1_001, seed=4)[0]
    assert torch.equal(train, again)
    assert not torch.equal(train, other)


def test_epochs_are_different_orders_of_the_same_rows() -> None:
    rows = torch.arange(100) * 7
    first, second = movielens.shuffled(rows, seed=0, epoch=0), movielens.shuffled(rows, seed=0, epoch=1)
    assert not torch.equal(first, second)
    assert torch.equal(first.sort().values, rows)
    assert torch.equal(first, movielens.shuffled(rows, seed=0, epoch=0))
    assert not torch.equal(first, movielens.shuffled(rows, seed=1, epoch=0))


@pytest.mark.parametrize("world_size", [1, 2, 3, 7])
@pytest.mark.parametrize("num_rows", [7, 64, 65, 1_000, 1_001, 80_003])
def test_ranks_share_the_rows_and_agree_on_the_number_of_batches(num_rows: int, world_size: int) -> None:
    rows = movielens.shuffled(torch.arange(num_rows), seed=0, epoch=0)
    shares = [Share(batch_size=64, rank=rank, world_size=world_size) for rank in range(world_size)]
    parts = [movielens.rank_batches(rows, share) for share in shares]
    assert torch.equal(torch.cat([batch for part in parts for batch in part]).sort().values, torch.arange(num_rows))
    assert {len(part) for part in parts} == {math.ceil(num_rows / 64)}
    sizes = [len(batch) for part in parts for batch in part]
    assert min(sizes) >= 1
    assert max(sizes) - min(sizes) <= 1
    assert max(sizes) <= math.ceil(64 / world_size)


def test_ranks_read_the_same_global_order_interleaved() -> None:
    rows = torch.tensor([5, 3, 9, 1, 7, 2])

    def of_rank(rank: int) -> list[Tensor]:
        return movielens.rank_batches(rows, Share(batch_size=4, rank=rank, world_size=2))

    assert [batch.tolist() for batch in of_rank(0)] == [[5, 9], [7]]
    assert [batch.tolist() for batch in of_rank(1)] == [[3, 1], [2]]


def test_no_rank_gets_an_empty_batch_of_few_rows() -> None:
    rows = torch.arange(3)
    parts = [movielens.rank_batches(rows, Share(batch_size=2, rank=rank, world_size=2)) for rank in range(2)]
    assert [[batch.tolist() for batch in part] for part in parts] == [[[0, 2]], [[1]]]


def test_expected_distinct_matches_real_batches(ratings: Ratings) -> None:
    order = movielens.shuffled(torch.arange(len(ratings)), seed=0, epoch=0)
    counts = [len(torch.unique(ratings.users[batch])) for batch in torch.split(order, 512)[:-1]]
    assert expected_distinct(ratings.users, 512) == pytest.approx(sum(counts) / len(counts), rel=0.01)
    assert expected_distinct(torch.tensor([8, 8, 8]), 5) == 1.0


@pytest.mark.parametrize("workers", [1, 3])
def test_workers_take_turns(workers: int, ratings: Ratings) -> None:
    data = MovieLens(ratings, seed=0)
    alone = list(data.train_batches(Share(batch_size=2_000, rank=1, world_size=2), 1))
    turns = [
        list(data.train_batches(Share(batch_size=2_000, rank=1, world_size=2, first=w, step=workers), 1))
        for w in range(workers)
    ]
    for number, batch in enumerate(alone):
        assert torch.equal(turns[number % workers][number // workers].ids.values(), batch.ids.values())
    assert sum(len(turn) for turn in turns) == len(alone) == data.num_batches(2_000)


@pytest.mark.parametrize(
    ("cores", "local_world_size", "expected"), [(2, 2, 0), (4, 2, 1), (8, 2, 2), (64, 2, 2), (1, 4, 0)]
)
def test_workers_do_not_take_the_cores_of_ranks(
    cores: int, local_world_size: int, expected: int, ratings: Ratings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(cores)))
    data = MovieLens(ratings, seed=0)
    assert choose_num_workers(data, local_world_size) == 0
    data.num_workers = 2
    assert choose_num_workers(data, local_world_size) == expected
