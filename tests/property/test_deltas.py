"""Rows trained and ids removed since a mark, against the model: with the rows of the mark they are the table."""

from __future__ import annotations

import random
import resource
from pathlib import Path
from typing import Any

import pytest

from hybridrec.errors import ConfigError, StateError
from hybridrec.native import ShardGroup
from hybridrec.native.reference import shard_group
from hybridrec.native.reference.shard_group import ShardGroup as ReferenceGroup
from hybridrec.native.reference.table_shard import TableShard
from tests.property.driver import DisagreementError, all_cores, make_specs
from tests.property.followers import FollowDriver, lost
from tests.property.snapshots import random_walk
from tests.property.test_snapshots import POLICIES, train


def start(policy: str = "evict", *, slots: tuple[int, int] = (7, 5), max_rows: int = 9) -> FollowDriver:
    return FollowDriver(all_cores(), make_specs(policy, slots=slots, max_rows=max_rows))


def walk(driver: FollowDriver, rng: random.Random, num_operations: int, num_ids: int = 12) -> None:
    """Deltas between stretches of everything else."""
    while driver.num_operations < num_operations:
        random_walk(driver, rng, driver.num_operations + rng.randint(1, 12), num_ids=num_ids)
        if rng.random() < 0.9:
            driver.flush()
        table = rng.randrange(2)
        if table in driver.followed or rng.random() < 0.2:
            driver.apply_delta(table)
        else:
            driver.follow(table)


@pytest.mark.parametrize("policy", POLICIES)
def test_a_random_walk_with_deltas(policy: str) -> None:
    driver = start(policy)
    walk(driver, random.Random(f"deltas {policy}"), 900)
    assert driver.num_deltas > 10 and driver.num_changed > 20
    assert (driver.num_removed > 0) is (policy == "evict")


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(15))
@pytest.mark.parametrize("policy", POLICIES)
def test_long_random_walks_with_deltas(policy: str, seed: int) -> None:
    rng = random.Random(f"deltas {policy} {seed}")
    driver = start(policy, slots=(rng.randint(3, 10), rng.randint(2, 8)), max_rows=rng.randint(5, 14))
    walk(driver, rng, 1700, num_ids=rng.randint(8, 20))


def idle(driver: FollowDriver, num_batches: int = 12) -> None:
    for _ in range(num_batches):
        train(driver, [[], [], []])


def test_a_batch_that_was_open_at_the_mark_is_in_the_next_delta() -> None:
    driver = start(slots=(6, 4))
    train(driver, [[1, 2], [], []])
    driver.plan([[2, 3], [], []])
    driver.swap(2)
    driver.flush()
    driver.follow(0)
    driver.commit(2)
    driver.flush()
    driver.apply_delta(0)
    assert sorted(driver.followed[0].rows) == [1, 2, 3] and driver.num_changed == 2 * len(driver.systems)


def test_an_id_that_was_removed_and_came_back_is_there() -> None:
    driver = start(slots=(4, 4), max_rows=2)
    train(driver, [[1, 2], [], []])
    driver.flush()
    driver.follow(0)
    idle(driver)
    train(driver, [[3, 4], [], []])
    idle(driver)
    train(driver, [[1], [], []])
    driver.flush()
    driver.apply_delta(0)
    assert 1 in driver.followed[0].rows and driver.num_removed == 2 * len(driver.systems)


def test_what_a_batch_in_flight_evicts_is_removed_once_it_is_committed() -> None:
    driver = start(slots=(4, 4), max_rows=2)
    train(driver, [[1, 2], [], []])
    idle(driver)
    driver.flush()
    driver.follow(0)
    driver.plan([[3], [], []])
    driver.swap(14)
    driver.flush()
    driver.apply_delta(0)
    assert sorted(driver.followed[0].rows) == [1, 2] and driver.num_removed == 0
    driver.commit(14)
    driver.flush()
    driver.apply_delta(0)
    assert 3 in driver.followed[0].rows and len(driver.followed[0].rows) == 2


def test_a_log_without_room_is_lost_and_says_so() -> None:
    for room, is_lost in ((2, False), (1, True)):
        driver = start(slots=(4, 4), max_rows=2)
        train(driver, [[1, 2], [], []])
        driver.flush()
        driver.follow(0, max_ids=room)
        idle(driver)
        train(driver, [[3, 4], [], []])
        assert [lost(system, 0) for system in driver.systems] == [is_lost] * len(driver.systems)


@pytest.mark.parametrize("core", ["reference", "compiled"])
def test_the_log_is_memory_of_the_host_budget(core: Any) -> None:
    group = ShardGroup(make_specs(), core=core, host_budget_bytes=2**20)
    before = group.counters(0).host_bytes
    with pytest.raises(StateError, match="track_removals: table 'uniform' needs .* the budget is"):
        group.track_removals(0, 2**17)
    group.track_removals(0, 1000)
    assert group.counters(0).host_bytes == before + 8000
    group.track_removals(0, 10)
    assert group.counters(0).host_bytes == before + 80
    assert group.removed_ids(0).tolist() == []
    group.track_removals(0, None)
    assert group.counters(0).host_bytes == before
    with pytest.raises(StateError, match="removed_ids: table 'uniform' does not know which ids it lost"):
        group.removed_ids(0)
    with pytest.raises(ConfigError, match="track_removals: max_ids=-1"):
        group.track_removals(0, -1)


def test_memory_that_the_system_refuses_is_given_back_to_the_budget() -> None:
    group = ShardGroup(make_specs(), core="compiled", host_budget_bytes=2**33 + 2**30)
    group.track_removals(0, 1000)
    before, (soft, hard) = group.counters(0).host_bytes, resource.getrlimit(resource.RLIMIT_AS)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    try:
        resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + 2**30, hard))
        with pytest.raises(StateError, match="'uniform' needs 8589934592 bytes for 1073741824 ids"):
            group.track_removals(0, 2**30)
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
    assert group.counters(0).host_bytes == before  # and the log of before is as it was
    assert group.removed_ids(0).tolist() == []
    group.track_removals(1, 2**28)  # 2 GiB, for which the budget has room


def _mark_at_the_newest(patch: pytest.MonkeyPatch) -> None:
    """As if batches in flight were done."""
    patch.setattr(FollowDriver, "_final_ordinal", lambda driver: driver.model.ordinal)
    patch.setattr(ReferenceGroup, "final_ordinal", ReferenceGroup.ordinal)


def _forget_removals(patch: pytest.MonkeyPatch) -> None:
    original = TableShard.finalize

    def finalize(self: TableShard, journal: Any) -> None:
        log, self.removals = self.removals, None
        original(self, journal)
        self.removals = log

    patch.setattr(TableShard, "finalize", finalize)


def _tell_what_came_back(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(shard_group, "committed_scores", _none_in_removed_ids(shard_group.committed_scores))


def _none_in_removed_ids(original: Any) -> Any:
    def committed_scores(ids: Any, open_batches: Any, table: int, max_rows: int) -> dict[int, int]:
        import sys

        return {} if sys._getframe(1).f_code.co_name == "removed_ids" else original(ids, open_batches, table, max_rows)

    return committed_scores


def _keep_the_log_of_imported_rows(patch: pytest.MonkeyPatch) -> None:
    original = TableShard.import_rows

    def import_rows(self: TableShard, keys: list[int], scores: list[int], records: Any) -> None:
        log = self.removals
        original(self, keys, scores, records)
        self.removals = log

    patch.setattr(TableShard, "import_rows", import_rows)


@pytest.mark.parametrize(
    "mutate", [_mark_at_the_newest, _forget_removals, _tell_what_came_back, _keep_the_log_of_imported_rows]
)
def test_mutants_are_caught(mutate: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    mutate(monkeypatch)
    specs = make_specs("evict", slots=(7, 5))
    driver = FollowDriver({"reference": lambda s: ShardGroup(s, core="reference")}, specs)
    with pytest.raises(DisagreementError):
        walk(driver, random.Random("mutant"), 3000)
