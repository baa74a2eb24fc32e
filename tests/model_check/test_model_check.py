"""Every order of the stages gives the rows of a plain table: 500 schedules here, 10 000 in the slow suite."""

from __future__ import annotations

import collections
from collections.abc import Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.model_check.case import draw_case
from tests.model_check.checker import check_many, check_schedule
from tests.model_check.scheduler import Tape, WrongSchedule
from tests.ranks import RankPools

PARTS = {
    ("host", "compiled"): 200,
    ("host", "reference"): 100,
    ("staged", "compiled"): 100,
    ("staged", "reference"): 76,
}
"""(tier, core) -> schedules of the fast suite; 24 more are on the simulated device."""
NUM_ON_NPU = 24
SLOW_FACTOR = 20


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Tensors of a few numbers gain nothing from more threads, which spin."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def check_everything_happened(events: collections.Counter[str], num_schedules: int) -> None:
    """A checker that never gets to the hard parts proves nothing."""
    per_schedule = {
        "lookup": 8,
        "commit": 6,
        "evictions from slots": 4,
        "write-backs": 4,
        "loads": 1,
        "undo": 0.5,
        "drop": 0.5,
        "read": 0.3,
        "flush": 0.2,
        "without slots": 0.2,
        "evicted": 0.1,
        "refused": 0.01,
    }
    rare = {name: events[name] for name, rate in per_schedule.items() if events[name] < rate * num_schedules}
    assert not rare, f"of {num_schedules} schedules too few had these: {rare}"


@pytest.mark.parametrize(("tier", "core"), PARTS)
def test_every_order_gives_the_rows_of_a_plain_table(tier: str, core: str) -> None:
    n = PARTS[tier, core]
    check_everything_happened(check_many(range(n), tier=tier, core=core), n)


@pytest.mark.slow
@pytest.mark.timeout(3000)
@pytest.mark.parametrize(("tier", "core"), PARTS)
def test_ten_thousand_orders_give_the_rows_of_a_plain_table(tier: str, core: str) -> None:
    n = PARTS[tier, core] * SLOW_FACTOR
    check_everything_happened(check_many(range(1000, 1000 + n), tier=tier, core=core), n)


def check_on_npu(first: int, num: int) -> collections.Counter[str]:
    torch.set_num_threads(1)
    events = check_many(range(first, first + num), tier="npu")
    return events


def test_every_order_of_the_streams_gives_the_rows_of_a_plain_table(npu_pools: RankPools) -> None:
    (events,) = npu_pools[1].run(check_on_npu, 0, NUM_ON_NPU)
    check_everything_happened(events, NUM_ON_NPU)


@pytest.mark.slow
@pytest.mark.timeout(3000)
@pytest.mark.parametrize("part", range(4))
def test_many_orders_of_the_streams_give_the_rows_of_a_plain_table(npu_pools: RankPools, part: int) -> None:
    num = NUM_ON_NPU * SLOW_FACTOR // 4
    (events,) = npu_pools[1].run(check_on_npu, 1000 + part * num, num, watchdog=1200)
    check_everything_happened(events, num)


@settings(max_examples=20)
@given(tape=st.binary(max_size=4000))
def test_orders_that_hypothesis_chooses_and_shrinks(tape: bytes) -> None:
    assert check_schedule(tape)["plan"] > 0


@pytest.mark.parametrize("seed", range(6))
def test_threads_that_sleep_at_random(seed: int) -> None:
    """Not replayable: natively parallel calls meet here, which a baton keeps apart."""
    tier, core = list(PARTS)[seed % 4]
    assert check_schedule(seed, tier=tier, core=core, is_free=True)["commit"] > 0


@pytest.mark.slow
def test_many_threads_that_sleep_at_random() -> None:
    for tier, core in PARTS:
        events = check_many(range(300), tier=tier, core=core, is_free=True)
        check_everything_happened(events, 300)


def test_a_seed_replays_its_schedule() -> None:
    case = draw_case(Tape(7))
    assert case == draw_case(Tape(7)) != draw_case(Tape(8))
    assert check_schedule(7) == check_schedule(7)


def test_a_wrong_schedule_says_how_to_replay_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hybridrec.cache.transaction.TransactionLog.post_commit", lambda self, transaction: None)
    with pytest.raises(WrongSchedule) as first:
        check_many(range(20))
    with pytest.raises(WrongSchedule) as second:
        check_many(range(20))
    assert str(first.value) == str(second.value)
    assert "Replay it: check_schedule(" in str(first.value) and "trainer: " in str(first.value)
