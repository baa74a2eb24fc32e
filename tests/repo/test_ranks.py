"""The pool of ranks: what it promises to the tests that use it."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist

from tests import ranks
from tests.ranks import RankFailure, RankPool, RankTimeout


def sum_of_ranks(offset: int) -> int:
    total = torch.tensor(dist.get_rank() + offset)
    dist.all_reduce(total)
    return int(total)


def process_id() -> int:
    return os.getpid()


def refuse_on(bad_rank: int) -> None:
    if dist.get_rank() == bad_rank:
        raise LookupError(f"no such row on rank {bad_rank}")


def wait_for_ever_on(bad_rank: int) -> None:
    if dist.get_rank() == bad_rank:
        time.sleep(600)


def refuse_before_a_collective(bad_rank: int) -> None:
    refuse_on(bad_rank)
    dist.all_reduce(torch.zeros(1))


def leave_out_a_collective(bad_rank: int) -> None:
    if dist.get_rank() != bad_rank:
        dist.all_reduce(torch.zeros(1))


def die_on(bad_rank: int) -> None:
    if dist.get_rank() == bad_rank:
        os._exit(7)
    dist.barrier()


def unpicklable() -> object:
    return threading.Lock()


def random_number() -> float:
    return float(torch.rand(()))


@pytest.fixture
def pool() -> Iterator[RankPool]:
    pool = RankPool(2)
    yield pool
    pool.close()


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_results_come_in_rank_order_and_the_same_processes_serve(pool: RankPool) -> None:
    assert pool.pids() == []
    assert pool.run(sum_of_ranks, 10) == [21, 21]
    assert pool.run(dist.get_rank) == [0, 1]
    pids = pool.run(process_id)
    assert pids == pool.pids() == pool.run(process_id)
    assert len({*pids, os.getpid()}) == 3
    assert pool.run(random_number) == pool.run(random_number)  # every job starts from the same seed
    pool.close()
    assert pool.pids() == [] and not any(is_alive(pid) for pid in pids)


def test_ranks_that_served_many_jobs_are_replaced_between_tests(
    pool: RankPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ranks, "MAX_JOBS", 2)
    pids = pool.run(process_id)
    ranks.end_old_pools()
    assert pool.run(process_id) == pids
    ranks.end_old_pools()
    assert pool.pids() == [] and not set(pool.run(process_id)) & set(pids)


def test_an_exception_comes_back_and_new_ranks_serve(pool: RankPool) -> None:
    pids = pool.run(process_id)
    with pytest.raises(RankFailure, match=r"(?s)rank 1 raised:.*in refuse_on.*no such row on rank 1") as caught:
        pool.run(refuse_on, 1)
    assert list(caught.value.errors) == [1]
    assert isinstance(caught.value.errors[1], LookupError)
    assert not any(is_alive(pid) for pid in pids)
    assert pool.run(sum_of_ranks, 0) == [1, 1]


def test_unpicklable_results_are_refused_by_name(pool: RankPool) -> None:
    with pytest.raises(RankFailure, match="lock cannot be sent to the parent"):
        pool.run(unpicklable)


@pytest.mark.parametrize(
    ("job", "where"),
    [
        (wait_for_ever_on, r"(?s)rank 1 gave no answer: it hangs here.*wait_for_ever_on"),
        (leave_out_a_collective, r"barrier after leave_out_a_collective|leave_out_a_collective on 2 ranks"),
    ],
)
def test_a_hung_job_is_stopped_and_says_where(pool: RankPool, job: object, where: str) -> None:
    pids = pool.run(process_id)
    started = time.monotonic()
    with pytest.raises((RankTimeout, RankFailure), match=where):
        pool.run(job, 1, watchdog=2.0)  # type: ignore[arg-type]
    assert time.monotonic() - started < 60
    assert not any(is_alive(pid) for pid in pids)
    assert pool.run(sum_of_ranks, 0) == [1, 1]


@pytest.mark.parametrize(
    ("job", "message"),
    [
        (refuse_before_a_collective, "no such row on rank 1"),
        (die_on, "rank 1 gave no answer: it died with exit code 7"),
    ],
)
def test_a_lost_rank_ends_the_job_long_before_the_watchdog(pool: RankPool, job: object, message: str) -> None:
    pool.run(process_id)
    started = time.monotonic()
    with pytest.raises((RankTimeout, RankFailure), match=message):
        pool.run(job, 1)  # type: ignore[arg-type]
    assert time.monotonic() - started < 60
