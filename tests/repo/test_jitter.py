"""`--jitter` delays the processes of a test, and nothing without it does."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist

from tests.jitter import delays
from tests.ranks import RankPool


def sleeps_of(num: int) -> dict[str, int]:
    from hybridrec.distributed.host_thread import HostThread

    delays.begin("sleeps_of", dist.get_rank())
    before = delays.sleeps.copy()
    thread = HostThread()
    for _ in range(num):
        thread.submit(lambda: None)
        dist.all_reduce(torch.zeros(1))
    thread.settle()
    return dict(delays.sleeps - before)


@pytest.fixture
def pool() -> Iterator[RankPool]:
    pool = RankPool(2)
    yield pool
    pool.close()


def test_jobs_and_collectives_of_ranks_are_delayed(pool: RankPool, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in delays.environment(3).items():
        monkeypatch.setenv(name, value)
    first, second = pool.run(sleeps_of, 30)
    assert set(first) | set(second) >= {"job", "after job", "collective"}, (first, second)
    assert first != second  # each rank has bad luck of its own


@pytest.mark.skipif(delays.SEED in os.environ, reason="this run has --jitter")
def test_nothing_is_delayed_without_it(pool_2: RankPool) -> None:
    assert pool_2.run(sleeps_of, 30) == [{}, {}]
