"""`hybridrec.debug.verified`: no false alarm where training is right; planted faults are named exactly."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from hybridrec import ConfigError, StateError
from hybridrec.cache.swap import HostMemorySwapper
from hybridrec.cache.transaction import TransactionLog
from hybridrec.debug import Verification, VerifyError, verified
from hybridrec.distributed.lookup import PooledLookup
from hybridrec.distributed.mapped_batch import MappedBatch
from hybridrec.native import unmix64
from hybridrec.native.protocol import Plan
from tests.distributed.oracle import Batch
from tests.distributed.pipelines import all_batches, build_pipelined, mine
from tests.distributed.scenario import Scenario
from tests.distributed.test_untraceable_models import now_and_then
from tests.ranks import RankPool


def train(scenario: Scenario, depth: int, *, first: int = 0, steps: int | None = None) -> tuple[Verification, Any]:
    """Through the pipeline, or in a plain loop at depth 0. Compared from step ``first`` on."""
    batches = all_batches(scenario)
    dmp, pipeline = build_pipelined(scenario, batches, max(depth, 1))
    data = mine(scenario, batches)
    iterator = iter(data)
    with contextlib.ExitStack() as stack:
        for step in range(scenario.steps):
            if step == first:
                check = stack.enter_context(verified(dmp, steps=steps))
            if depth:
                pipeline.progress(iterator)
            else:
                pipeline._optimizer.zero_grad()
                loss, _ = dmp(data[step].to(torch.device(scenario.device)))
                loss.backward()
                pipeline._optimizer.step()
    assert "compute" not in dmp.module.ebc.lookup.__dict__
    return check, dmp.module.ebc.stats()


@pytest.mark.parametrize(
    ("world_size", "depth", "scenario"),
    [
        (1, 0, Scenario(steps=50, optimizer="adam")),
        (1, 3, Scenario(steps=50, optimizer="rowwise_adagrad", is_weighted=True)),
        (2, 3, Scenario(steps=50, optimizer="adagrad")),
        (2, 12, Scenario(steps=50, optimizer="sgd")),
        (1, 3, Scenario(steps=50, optimizer="adagrad", cache="below")),
    ],
    ids=["adam-plain-loop", "rowwise-weighted", "adagrad", "sgd-12", "oversized"],
)
def test_no_false_alarm(pools: dict[int, RankPool], world_size: int, depth: int, scenario: Scenario) -> None:
    for check, stats in pools[world_size].run(train, scenario, depth):
        assert (check.steps, check.unverified_steps, check.difference) == (50, 0, None)
        assert check.rows > 500
        assert all(s.write_backs > 50 for s in stats) or scenario.cache == "below"
        assert any(s.oversized for s in stats) == (scenario.cache == "below")


def test_no_false_alarm_from_the_middle_of_training_and_for_some_steps(pool_2: RankPool) -> None:
    for check, _ in pool_2.run(train_from_the_middle):
        assert (check.steps, check.difference) == (15, None) and check.unverified_steps == 0


def train_from_the_middle() -> tuple[Verification, Any]:
    return train(Scenario(steps=40, optimizer="adam"), 3, first=20, steps=15)


def stepped_unseen() -> Verification:
    """A forward before the mode, its backward in it, after another batch gave the shadow the same rows."""
    scenario = Scenario(steps=4, optimizer="adagrad")
    batches = all_batches(scenario)
    dmp, _ = build_pipelined(scenario, batches, 1)
    first, second, *_ = (batch.features for batch in mine(scenario, batches))
    early = dmp.module.ebc(first).values().sum()
    with verified(dmp) as check:
        for features in (first, None, first, second):
            (early if features is None else dmp.module.ebc(features).values().sum()).backward()
    return check


def test_a_batch_whose_forward_came_before_is_not_compared(pool_1: RankPool) -> None:
    (check,) = pool_1.run(stepped_unseen)
    assert (check.steps, check.unverified_steps, check.difference) == (3, 1, None)


@pytest.mark.parametrize("depth", [0, 3])
def test_no_false_alarm_where_rows_are_evicted_and_calls_differ(pool_1: RankPool, depth: int) -> None:
    (plain,) = pool_1.run(now_and_then, depth)
    assert pool_1.run(now_and_then_verified, depth) == [plain]


def now_and_then_verified(depth: int) -> tuple[list[float], int]:
    return now_and_then(depth, verified)


@dataclass
class Planted:
    """What a mutant did, and so what must be named."""

    ordinal: int = 0
    ids: dict[str, set[int]] = field(default_factory=dict)


def ids_in_slots(lookup_group: Any, num_tables: int) -> list[dict[int, int]]:
    """Slot -> id, one a table."""
    result = []
    for t in range(num_tables):
        keys, _, _, slots, _ = lookup_group.entries(t)
        ids = unmix64(torch.from_numpy(keys.copy())).tolist()
        result.append({int(s): i for s, i in zip(slots, ids, strict=True) if s >= 0})
    return result


@contextlib.contextmanager
def faulty_swap(planted: Planted, *, of_victims: bool) -> Iterator[None]:
    """One batch's victims are zero when they are written back, or its loaded rows are in each other's slots."""
    plan, swap = TransactionLog.plan, HostMemorySwapper.swap
    before: list[dict[int, int]] = []

    def planned(self: TransactionLog, *args: Any) -> Any:
        before[:] = ids_in_slots(self.group, self.group.num_tables)
        return plan(self, *args)

    def swapped(self: HostMemorySwapper, its_plan: Plan, fence: Any, lock: Any) -> None:
        group = self._group
        strikes = its_plan.ordinal == 20
        if strikes:
            counts = torch.empty((group.num_tables, 2), dtype=torch.int64)
            loads = torch.empty(its_plan.num_loads + its_plan.num_inits, dtype=torch.int64)
            victims = torch.empty(its_plan.num_write_backs, dtype=torch.int64)
            group.swap_counts(20, counts)
            group.swap_slots(20, loads, victims)
            per_table = (victims if of_victims else loads).split(counts[:, 1 if of_victims else 0].tolist())
            planted.ordinal = 20
            where_ids = before if of_victims else ids_in_slots(group, group.num_tables)
            for t, slots in enumerate(per_table):
                name = group._specs[t].name
                planted.ids[name] = {where_ids[t][s] for s in slots.tolist()}
        if strikes and of_victims:
            for t, slots in enumerate(per_table):
                group._bound[t][0][slots] = 0.0
        swap(self, its_plan, fence, lock)
        if strikes and not of_victims:
            for t, slots in enumerate(per_table):
                group._bound[t][0][slots] = group._bound[t][0][slots].roll(1, 0)

    with mock.patch.object(TransactionLog, "plan", planned), mock.patch.object(HostMemorySwapper, "swap", swapped):
        yield


@contextlib.contextmanager
def faulty_update(planted: Planted) -> Iterator[None]:
    """Step 7's gradients are doubled on their way to the rows of the lookup's first table."""
    update = PooledLookup.update

    def doubled(self: PooledLookup, batch: MappedBatch, saved: Any, grad: Tensor) -> None:
        if self.log.committed == 6:
            first = self.tables[0]
            planted.ordinal = 7
            keys = batch.keys.values()[: int(batch.feature_offsets[first.num_features])]
            planted.ids[first.name] = set(unmix64(keys.contiguous()).tolist())
            grad = grad.clone()
            grad[:, : first.layout.dim * first.num_features] *= 2
        update(self, batch, saved, grad)

    with mock.patch.object(PooledLookup, "update", doubled):
        yield


def first_use(scenario: Scenario, batches: list[list[Batch]], planted: Planted, order: list[str], step: int) -> Any:
    """(step, table, smallest id): where a plain reading of the batches meets a planted row first, from a step on."""
    for s in range(step, scenario.steps + 1):
        for name in order:
            table = next(t for t in scenario.tables if t.name == name)
            ids = {i for f in table.features for bag in batches[s - 1][0].bags[f] for i, _ in bag}
            if met := ids & planted.ids.get(name, set()):
                return s, name, min(met)
    raise AssertionError("the planted rows are never used again")


def find(fault: str, depth: int, optimizer: str) -> tuple[Any, Any, str, str]:
    """What was named, what should be, when, and the text."""
    scenario = Scenario(steps=45, optimizer=optimizer, ids_per_table=150)
    batches = all_batches(scenario)
    planted = Planted()
    faults: dict[str, Callable[[], contextlib.AbstractContextManager[None]]] = {
        "lost write-back": lambda: faulty_swap(planted, of_victims=True),
        "wrong slot": lambda: faulty_swap(planted, of_victims=False),
        "doubled gradient": lambda: faulty_update(planted),
    }
    with faults[fault](), pytest.raises(VerifyError) as error:
        train(scenario, depth)
    found = error.value.difference
    order = [name for name in ("user", "item", "word")]
    expected = first_use(scenario, batches, planted, order, planted.ordinal)
    return (found.step, found.table, found.id), expected, found.moment, str(error.value)


@pytest.mark.parametrize("depth", [0, 3])
@pytest.mark.parametrize(
    ("fault", "optimizer", "moment"),
    [
        ("lost write-back", "adagrad", "before the lookup"),
        ("wrong slot", "adam", "before the lookup"),
        ("doubled gradient", "sgd", "after the update"),
    ],
)
def test_a_planted_fault_is_named(pool_1: RankPool, depth: int, fault: str, optimizer: str, moment: str) -> None:
    ((found, expected, when, text),) = pool_1.run(find, fault, depth, optimizer)
    assert (found, when) == (expected, moment)
    step, table, id_ = expected
    start = rf"rank 0, training step {step}, table '{table}', id {id_}, {moment}: weights\[\d\] is .*, in a plain table"
    assert re.match(start, text)
    assert f"\ntable '{table}', id {id_} (owner: rank 0 of 1): slot" in text


def misused() -> None:
    with pytest.raises(ConfigError, match="Linear has no sharded hashed collection"), verified(nn.Linear(1, 1)):
        pass
    scenario = Scenario(steps=1)
    dmp, _ = build_pipelined(scenario, all_batches(scenario), 1)
    with pytest.raises(ConfigError, match="verified: model has type NoneType"), verified(None):  # type: ignore[arg-type]
        pass
    for steps in (0, True, "3"):
        with pytest.raises(ConfigError, match="steps="), verified(dmp, steps=steps):  # type: ignore[arg-type]
            pass
    assert dist.get_world_size() == 1


def nested() -> tuple[int, int, bool]:
    """Steps that the outer comparison saw with a refused one inside, and those of a second one once it was over."""
    scenario = Scenario(steps=4)
    batches = all_batches(scenario)
    dmp, pipeline = build_pipelined(scenario, batches, 1)
    iterator = iter(mine(scenario, batches))
    with verified(dmp, steps=3) as outer:
        pipeline.progress(iterator)
        with pytest.raises(StateError, match="compared already, by a verified"), verified(dmp):
            pass
        pipeline.progress(iterator)
        pipeline.progress(iterator)
        with verified(dmp) as after:
            pipeline.progress(iterator)
    return outer.steps, after.steps, "compute" in vars(dmp.module.ebc.lookup)


def test_a_second_comparison_inside_the_first_is_refused(pool_1: RankPool) -> None:
    assert pool_1.run(nested) == [(3, 1, False)]


def test_misuse_is_refused(pool_1: RankPool) -> None:
    pool_1.run(misused)
