"""All cores against the model: plans, slots, entries, counters and values, call by call."""

from __future__ import annotations

import random

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from hybridrec.native.protocol import PlanStatus
from tests.property import plain
from tests.property.driver import EXTREME_IDS, Driver, all_cores, make_specs, run_random

POLICIES = ("grow", "evict", "error")

IDS = st.lists(st.integers(0, 11) | st.sampled_from(EXTREME_IDS), max_size=4)
BATCHES = st.lists(IDS, min_size=3, max_size=3)


class ShardGroupMachine(RuleBasedStateMachine):
    """Hypothesis chooses the calls; the driver compares after each."""

    @initialize(policy=st.sampled_from(POLICIES), slots=st.tuples(st.integers(1, 7), st.integers(1, 5)))
    def start(self, policy: str, slots: tuple[int, int]) -> None:
        self.driver = Driver(all_cores(), make_specs(policy, slots=slots))

    @rule(ids=BATCHES)
    def plan(self, ids: list[list[int]]) -> None:
        self.driver.plan(ids)

    @rule(num_batches=st.integers(1, 14))
    def age(self, num_batches: int) -> None:
        """Empty batches: rows get old enough to be evicted."""
        for _ in range(num_batches):
            self.driver.commit(self.driver.plan([[], [], []]).ordinal)

    @precondition(lambda self: self.driver.model.in_flight())
    @rule(data=st.data(), call=st.sampled_from(["swap", "swap", "scatter", "gather", "commit", "commit", "undo"]))
    def step(self, data: st.DataObject, call: str) -> None:
        model = self.driver.model
        unmoved = [o for o in model.in_flight() if not model.is_moved[o]]
        if call == "swap" and not unmoved:
            return
        # Any batch, legal or not: an illegal call must be refused and change nothing.
        getattr(self.driver, call)(data.draw(st.sampled_from(unmoved if call == "swap" else model.in_flight())))

    @rule(call=st.sampled_from(["commit", "undo"]), ordinal=st.integers(0, 20))
    def step_of_any_ordinal(self, call: str, ordinal: int) -> None:
        getattr(self.driver, call)(ordinal)

    @rule(ids=BATCHES)
    def read(self, ids: list[list[int]]) -> None:
        self.driver.read(ids)

    @rule(is_staged=st.booleans())
    def flush(self, is_staged: bool) -> None:
        self.driver.flush_staged() if is_staged else self.driver.flush()

    @rule(table=st.integers(0, 1), more=st.integers(0, 2))
    def resize(self, table: int, more: int) -> None:
        self.driver.resize(table, more)


TestShardGroupMachine = ShardGroupMachine.TestCase
TestShardGroupMachine.settings = settings(settings.default, stateful_step_count=40)


@pytest.mark.parametrize("policy", POLICIES)
def test_a_random_walk(policy: str) -> None:
    driver = Driver(all_cores(), make_specs(policy))
    run_random(driver, random.Random(policy), 700)
    assert sum(driver.model.tables[0].counters()[name] > 0 for name in ("loads", "write_backs", "rejected")) >= 2
    assert (driver.model.tables[0].counters()["evicted"] > 0) == (policy == "evict")


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("policy", POLICIES)
def test_long_random_walks(policy: str, seed: int) -> None:
    """100,000 calls over all cases: few ids and many, slots that are scarce and that are not."""
    rng = random.Random(f"{policy} {seed}")
    slots = (rng.randint(3, 10), rng.randint(2, 8))
    driver = Driver(all_cores(), make_specs(policy, slots=slots, max_rows=rng.randint(5, 14)))
    run_random(driver, rng, 1667, num_ids=rng.randint(8, 20))
    assert driver.model.ordinal > 50


# ---- cases that a random walk meets rarely ------------------------------------------------------------------------


def _train(driver: Driver, ids: list[list[int]]) -> int:
    ordinal = driver.plan(ids).ordinal
    if not driver.model.is_moved[ordinal]:
        driver.swap(ordinal)
    driver.commit(ordinal)
    return ordinal


def _start(policy: str = "grow", *, slots: tuple[int, int] = (2, 4), max_rows: int = 9) -> Driver:
    return Driver(all_cores(), make_specs(policy, slots=slots, max_rows=max_rows))


def test_the_worked_timeline_of_the_transaction_page() -> None:
    driver = _start()
    a, b, c, d = 1, 2, 3, 4
    _train(driver, [[a, b], [], []])
    plan = driver.plan([[b, c], [], []])
    assert (plan.num_inits, plan.num_loads, plan.num_victims, plan.num_write_backs) == (1, 0, 1, 1)
    driver.swap(2)
    driver.commit(2)
    plan = driver.plan([[a, d], [], []])
    assert (plan.num_inits, plan.num_loads, plan.num_victims, plan.num_write_backs) == (1, 1, 2, 2)
    driver.swap(3)
    driver.undo(3)
    table = driver.model.tables[0]
    assert [(score, slot) for _, _, score, slot, _ in table.entries()] == [(1, 1), (2, -1), (2, -1)]
    driver.read([[a, b, c, d], [], []])
    driver.flush()
    # d's slot is free: the next batch takes it first, without a victim.
    plan = driver.plan([[b], [], []])
    assert (plan.num_loads, plan.num_victims) == (1, 0)


def test_two_forwards_and_one_backward_in_either_order() -> None:
    for first in (1, 2):
        driver = _start(slots=(4, 4))
        driver.plan([[1, 2], [5], [1]])
        driver.swap(1)
        driver.plan([[2, 3], [5, 6], []])
        driver.swap(2)
        driver.undo(first)  # id 2 is inserted by batch 1 and used by both
        driver.commit(3 - first)
        driver.read([[1, 2, 3], [5, 6], []])
        driver.flush()
        assert driver.model.tables[0].counters()["inserted"] == 2


def test_a_row_passes_on_to_a_batch_that_is_already_committed() -> None:
    driver = _start(slots=(6, 4))
    driver.plan([[1, 2, 3, 4, 5, 6], [], []])
    driver.swap(1)
    driver.plan([[2, 6], [], []])
    driver.commit(2)
    driver.undo(1)
    counters = driver.model.tables[0].counters()
    assert (counters["rows"], counters["inserted"], counters["accesses"]) == (2, 2, 2)
    driver.read([[1, 2, 6], [], []])


def test_evicted_rows_pass_on_and_come_back() -> None:
    for undone in ([14, 15], [15, 14]):
        driver = _start("evict", slots=(2, 4), max_rows=2)
        _train(driver, [[1, 2], [], []])
        for _ in range(12):
            _train(driver, [[], [], []])
        driver.plan([[3], [], []])
        driver.swap(14)
        driver.plan([[4], [], []])
        driver.swap(15)
        assert driver.model.tables[0].counters()["rows"] == 2
        for ordinal in undone:
            driver.undo(ordinal)
        keys = {key for key, *_ in driver.model.tables[0].entries()}
        assert len(keys) == 2
        driver.read([[1, 2, 3, 4], [], []])
        driver.flush()
        _train(driver, [[1, 2], [], []])
        assert driver.model.tables[0].counters()["evicted"] == 0


def test_an_evicted_id_that_returns_before_the_journal_is_final_is_new() -> None:
    driver = _start("evict", slots=(3, 4), max_rows=2)
    _train(driver, [[1, 2], [], []])
    for _ in range(12):
        _train(driver, [[], [], []])
    driver.plan([[3, 4], [], []])
    driver.swap(14)
    for _ in range(13):
        _train(driver, [[], [], []])
    assert driver.plan([[1], [], []]).status == PlanStatus.QUOTA  # 3 and 4 are pinned
    driver.commit(14)
    assert driver.plan([[1], [], []]).num_inits == 1
    driver.swap(28)
    driver.commit(28)
    driver.read([[1, 2, 3, 4], [], []])


def test_a_refusal_of_the_second_table_takes_the_first_back() -> None:
    driver = _start("evict", slots=(2, 2), max_rows=2)
    _train(driver, [[1, 2], [1], []])
    for _ in range(12):
        _train(driver, [[], [], []])
    plan = driver.plan([[3, 4], [1, 2, 3], []])
    assert (plan.status, plan.table, plan.needed, plan.available, plan.ordinal) == (PlanStatus.NO_SLOTS, 1, 3, 2, 0)
    # Also the order of last use is as before: 1 leaves first.
    plan = driver.plan([[9], [], []])
    assert plan.num_victims == 1
    driver.swap(plan.ordinal)
    driver.commit(plan.ordinal)
    driver.read([[1, 2, 9], [], []])


def test_a_batch_that_was_never_moved_gives_its_slots_back_to_the_victims() -> None:
    driver = _start(slots=(2, 4))
    _train(driver, [[1, 2], [], []])
    plan = driver.plan([[3, 4], [], []])
    assert plan.num_write_backs == 2
    driver.undo(2)
    assert [slot for _, _, _, slot, _ in driver.model.tables[0].entries()] == [0, 1]
    driver.read([[1, 2, 3], [], []])
    driver.flush()
    plan = driver.plan([[3], [], []])
    assert (plan.num_victims, plan.num_write_backs) == (1, 0)


def test_the_newest_ordinal_is_given_again_and_an_older_one_is_not() -> None:
    driver = _start(slots=(6, 4))
    _train(driver, [[1, 2], [], []])
    for ids, ordinal in (([2, 3], 2), ([3, 4], 3), ([4], 4)):
        assert driver.plan([ids, [], []]).ordinal == ordinal
    for ordinal in (4, 3, 2):
        driver.undo(ordinal)
    assert driver.plan([[3], [], []]).ordinal == 2
    driver.swap(2)
    assert driver.plan([[3, 4], [], []]).ordinal == 3
    driver.undo(2)  # a gap: 3 is in flight
    driver.swap(3)
    assert driver.plan([[5], [], []]).ordinal == 4
    for ordinal in (4, 3):
        driver.undo(ordinal)
    assert driver.plan([[2], [], []]).ordinal == 3
    driver.commit(3)
    assert [score for _, _, score, _, _ in driver.model.tables[0].entries()] == [1, 3]


def test_slots_of_an_ordinal_that_is_given_again_leave_in_order_of_use() -> None:
    driver = _start(slots=(3, 4))
    _train(driver, [[1, 2, 3], [], []])
    for ids in [[1, 2, 3]] * 20 + [[3, 1]]:  # far more uses than slots
        driver.undo(driver.plan([ids, [], []]).ordinal)
    _train(driver, [[1], [], []])
    # Last used: 2, then 3 (by an undone batch), then 1; each has one place in that order.
    for new, left in ((4, {1, 3, 4}), (5, {1, 4, 5}), (6, {4, 5, 6})):
        _train(driver, [[new], [], []])
        resident = {key for key, _, _, slot, _ in driver.model.tables[0].entries() if slot >= 0}
        assert resident == {plain.signed(plain.mix64(i)) for i in left}


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("seed", range(3))
def test_how_often_batches_were_undone_changes_no_row_score_or_eviction(policy: str, seed: int) -> None:
    """Batches that are mapped ahead, un-mapped newest first and mapped again, against each mapped once."""
    rng = random.Random(f"{policy} {seed}")
    quiet, restless = _start(policy, slots=(7, 5), max_rows=14), _start(policy, slots=(7, 5), max_rows=14)
    batches = [[[rng.randrange(20) for _ in range(rng.randint(0, 2))], [rng.randrange(9)], []] for _ in range(70)]
    for i, batch in enumerate(batches):
        for _ in range(rng.randint(0, 2)):
            ahead = [restless.plan(b) for b in batches[i : i + rng.randint(1, 4)]]
            planned = [plan.ordinal for plan in ahead if plan.status == PlanStatus.OK]
            for ordinal in planned[: rng.randint(0, len(planned))]:
                if not restless.model.is_moved[ordinal]:
                    restless.swap(ordinal)
            for ordinal in reversed(planned):
                restless.undo(ordinal)
        for driver in (quiet, restless):
            plan = driver.plan(batch)
            if plan.status != PlanStatus.OK:
                continue
            if not driver.model.is_moved[plan.ordinal]:
                driver.swap(plan.ordinal)
            driver.commit(plan.ordinal)
        for system, other in zip(quiet.systems, restless.systems, strict=True):
            for t in range(2):
                once, again = system.group.entries(t), other.group.entries(t)
                assert [a.tolist() for a in once[:3]] == [a.tolist() for a in again[:3]]  # keys, row numbers, scores
    counters = [driver.systems[-1].group.counters(0) for driver in (quiet, restless)]
    assert counters[0].evicted == counters[1].evicted
    assert (counters[0].evicted > 0) == (policy == "evict")
    assert restless.model.tables[0].num_plans > quiet.model.ordinal == restless.model.ordinal


def test_rows_may_come_before_the_victims_are_written_back() -> None:
    driver = _start(slots=(2, 4))
    _train(driver, [[1, 2], [], []])
    _train(driver, [[3], [], []])  # 1 is in the store, 2 and 3 in the slots
    plan = driver.plan([[1, 4], [], []])
    assert (plan.num_loads, plan.num_inits, plan.num_write_backs) == (1, 1, 2)
    driver.plan([[1], [], []])
    driver.gather(3)
    for call in (driver.gather, driver.swap, driver.commit, driver.undo):
        call(3)  # refused
    driver.commit(4)  # refused: it waits for 3
    driver.flush()  # refused
    driver.read([[1, 2, 3, 4], [], []])  # refused
    assert not driver.model.is_moved[3]
    driver.scatter(3)
    driver.scatter(3)  # refused
    assert driver.model.is_moved[3]
    driver.read([[1, 2, 3, 4], [], []])
    driver.undo(3)
    driver.commit(4)
    driver.read([[1, 2, 3, 4], [], []])
    driver.flush()


def test_a_batch_that_writes_nothing_back_is_moved_when_its_rows_have_come() -> None:
    driver = _start(slots=(2, 4))
    assert driver.plan([[1, 2], [], []]).num_write_backs == 0
    driver.gather(1)
    assert driver.model.is_moved[1]
    driver.commit(1)
    driver.flush()
    plan = driver.plan([[3, 4], [], []])
    assert (plan.num_victims, plan.num_write_backs) == (2, 0)
    driver.gather(2)
    driver.commit(2)
    assert driver.model.tables[0].counters()["victims"] == 2


def test_a_batch_whose_victims_only_have_left_can_be_undone() -> None:
    driver = _start(slots=(2, 4))
    _train(driver, [[1, 2], [], []])
    driver.plan([[3, 4], [], []])
    driver.scatter(2)
    driver.undo(2)
    driver.read([[1, 2, 3], [], []])
    assert [slot for _, _, _, slot, _ in driver.model.tables[0].entries()] == [-1, -1]


@pytest.mark.parametrize("num_keys", [0, 1, 31, 32, 33, 4095, 4096, 4097])
def test_batches_of_awkward_sizes(num_keys: int) -> None:
    driver = _start(slots=(2049, 4))
    driver.model.tables[0].free_rows = list(range(5000))
    ids = [*EXTREME_IDS, *range(5000)][: num_keys - num_keys // 2]
    driver.plan([ids, [], ids[: num_keys // 2]])
    if ids:
        driver.swap(1)
    driver.commit(1)
    assert driver.plan([ids, [], []]).num_inits == 0
