"""The Little Demo as a whole: ten batches in a pool of ranks, and twice through its launcher."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from examples.little_demo import dataset, main
from examples.little_demo.dataset import Ratings
from examples.little_demo.launch import Ranks
from examples.little_demo.report import gather_stats, hit_rate
from tests.ranks import RankPool

ROOT = Path(__file__).parents[2]
CPU = torch.device("cpu")
LN_2 = math.log(2.0)


@pytest.fixture(scope="module")
def ratings() -> Ratings:
    return dataset.load_ratings()


def first_ratings(num_rows: int) -> Ratings:
    """The oldest part of the log."""
    ratings = dataset.load_ratings()
    return Ratings(
        users=ratings.users[:num_rows],
        movies=ratings.movies[:num_rows],
        genres=ratings.genres[: int(ratings.genre_lengths[:num_rows].sum())],
        genre_lengths=ratings.genre_lengths[:num_rows],
        labels=ratings.labels[:num_rows],
    )


def train_ten_batches(seed: int) -> dict[str, Any]:
    """A rank's job: what the script does, on ten batches of 256 ratings."""
    host_group = dist.new_group(backend="gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    ranks = Ranks(rank=rank, world_size=world_size, local_world_size=world_size, device=CPU, host_group=host_group)
    torch.manual_seed(seed)
    ratings = first_ratings(2_560)
    tables = main.build_tables(ratings, batch_size=256, world_size=world_size, seed=seed)
    model, optimizer, plan = main.build_model(tables, ranks)
    order = dataset.shuffled(torch.arange(len(ratings)), seed=seed, epoch=0)
    rows = dataset.rank_batches(order, batch_size=256, rank=rank, world_size=world_size)
    losses = main.train(model, optimizer, (ratings.batch(r) for r in rows), CPU)
    stats = gather_stats(model.module.ebc.stats(), host_group)
    auc = main.evaluate(model, (ratings.batch(r) for r in rows), ranks)
    ids = {"user": ratings.users, "movie": ratings.movies, "genre": ratings.genres}
    return {
        "losses": [loss.item() for loss in losses],
        "auc": auc,
        "kernels": {name: sharding.compute_kernel for name, sharding in plan.plan["ebc"].items()},
        "stats": {of_table[0].table: of_table for of_table in stats},
        "stats_after": {s.table: s for s in model.module.ebc.stats()},
        "live": {name: len(torch.unique(of_table)) for name, of_table in ids.items()},
        "hit_rate": hit_rate([s for of_table in stats for s in of_table]),
    }


def check_run(results: list[dict[str, Any]]) -> None:
    """What must hold for `train_ten_batches` at any world size."""
    for rank, result in enumerate(results):
        assert result["kernels"] == {"user": "fused_uvm_caching", "movie": "fused_uvm_caching", "genre": "fused"}
        assert result["auc"] == results[0]["auc"]
        assert len(result["losses"]) == 10
        assert result["losses"][0] == pytest.approx(LN_2, abs=0.05)  # nothing learned yet
        assert min(result["losses"][5:]) < LN_2 - 0.01
        for table, live in result["live"].items():
            of_ranks = result["stats"][table]
            assert sum(s.rows for s in of_ranks) == live
            assert [s.rank for s in of_ranks] == list(range(len(results)))
            assert result["stats_after"][table] == of_ranks[rank]  # evaluation left no trace
    movie = results[0]["stats"]["movie"]
    assert sum(s.accesses for s in movie) == 2_560
    assert sum(s.resident for s in movie) < sum(s.rows for s in movie)  # the tier is smaller than the table
    assert sum(s.write_backs for s in movie) > 0
    assert 0.0 < results[0]["hit_rate"] < 1.0


def test_ten_batches_on_one_rank(pool_1: RankPool) -> None:
    check_run(pool_1.run(train_ten_batches, 5))


def test_ten_batches_on_two_ranks(pool_2: RankPool) -> None:
    check_run(pool_2.run(train_ten_batches, 5))


def test_seed_decides_the_losses(pool_1: RankPool) -> None:
    first, again, other = (pool_1.run(train_ten_batches, seed)[0]["losses"] for seed in (5, 5, 6))
    assert first == again
    assert first != other


@pytest.mark.parametrize("world_size", [1, 2, 4, 8])
@pytest.mark.parametrize("batch_size", [64, 512, 4_096])
def test_device_tier_holds_a_batch(ratings: Ratings, batch_size: int, world_size: int) -> None:
    tables = main.build_tables(ratings, batch_size=batch_size, world_size=world_size, seed=0)
    device_rows = {table.name: table.device_rows for table in tables}
    order = dataset.shuffled(torch.arange(len(ratings)), seed=1, epoch=0)
    for name, ids in (("user", ratings.users), ("movie", ratings.movies)):
        largest = max(len(torch.unique(ids[rows])) for rows in torch.split(order, batch_size))
        rows = device_rows[name]
        assert rows is not None
        assert rows >= largest / world_size
        if batch_size <= 512:
            assert rows < len(torch.unique(ids)) / world_size  # so rows have to move
    assert device_rows["genre"] is None


@pytest.mark.parametrize(
    ("auc", "num_batches", "status", "words"),
    [
        (0.5, 156, 0, "not judged"),
        (0.7699, 157, 1, "FAILED"),
        (float("nan"), 157, 1, "FAILED"),
        (0.77, 157, 0, "OK"),
        (0.78, 314, 0, "OK"),
    ],
)
def test_full_epochs_are_judged(auc: float, num_batches: int, status: int, words: str) -> None:
    got, sentence = main.judge(auc, num_batches=num_batches, batches_per_epoch=157)
    assert got == status
    assert words in sentence


def run_demo(*options: str) -> subprocess.CompletedProcess[str]:
    """`run.sh` as a user starts it, with this interpreter and nothing preset."""
    environment = {k: v for k, v in os.environ.items() if k not in ("GLOO_SOCKET_IFNAME", "OMP_NUM_THREADS")}
    return subprocess.run(
        [ROOT / "examples" / "little_demo" / "run.sh", *options],
        env=environment | {"HYBRIDREC_PYTHON": sys.executable},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


def test_launcher_repeats_its_losses() -> None:
    runs = [run_demo("--device", "cpu", "--batches", "10", "--seed", "3") for _ in range(2)]
    for done in runs:
        assert done.returncode == 0, done.stderr
        assert "ranks: 2 on cpu, seed: 3" in done.stdout
        assert "fused_uvm_caching" in done.stdout
        assert "AUC not judged: 10 batches are less than an epoch of 157." in done.stdout
    losses = [[line for line in done.stdout.splitlines() if "  loss " in line] for done in runs]
    assert len(losses[0]) == 1
    assert losses[0] == losses[1]


def test_launcher_explains_itself_without_starting_ranks() -> None:
    done = run_demo("--ranks", "2", "--help")
    assert done.returncode == 0, done.stderr
    for option in ("--device", "--ranks", "--epochs", "--batches", "--batch-size", "--seed"):
        assert option in done.stdout


def test_launcher_refuses_a_number_of_ranks_that_is_none() -> None:
    done = run_demo("--ranks", "two")
    assert done.returncode == 2
    assert "argument --ranks: 'two' is not a whole number from 1 on" in done.stderr


@pytest.mark.slow
def test_one_epoch_reaches_the_goal() -> None:
    done = run_demo("--device", "cpu")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "OK: held-out AUC 0.7" in done.stdout
