"""Tables with ``requires_grad=False`` beside tables that train: bit for bit what an oracle that skips them gives."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward

from hybridrec import HybridRecError
from hybridrec.distributed.lookup import PooledLookup
from tests.cases import small
from tests.distributed.pipelines import (
    all_batches,
    build_oracle,
    build_pipelined,
    check_pins,
    mine,
    settle,
)
from tests.distributed.scenario import (
    Scenario,
    build,
    compare_state,
    make_batch,
    raise_together,
    state_of,
    to_kjt,
)
from tests.distributed.test_sharding_types import MIXED
from tests.ranks import RankFailure, RankPool

NEVER_TRAINED = [{"item"}]
TAKES_TURNS = [{"item"}, {"user", "word"}, set[str](), {"user", "item", "word"}]
"""What is frozen changes every three batches, so that prepared batches are taken back."""


def frozen_at(turns: list[set[str]], step: int) -> set[str]:
    return turns[step // 3 % len(turns)]


def freeze(ebc: Any, frozen: set[str]) -> None:
    for name, bag in ebc.embedding_bags.items():
        bag.requires_grad_(name not in frozen)


def run(scenario: Scenario, turns: list[set[str]], depth: int) -> dict[str, int]:
    """Train this rank's side and the oracle; depth 0 is the plain loop.

    Returns:
        Rows of every table.
    """
    batches = all_batches(scenario)
    dmp, pipeline = build_pipelined(scenario, batches, max(depth, 1))
    oracle, dense_optimizer = build_oracle(scenario)
    iterator, optimizer = iter(mine(scenario, batches)), pipeline._optimizer
    for step, everyone in enumerate(batches):
        frozen = frozen_at(turns, step)
        freeze(dmp.module.ebc, frozen)
        if depth:
            loss = pipeline.progress(iterator)
        else:
            optimizer.zero_grad()
            loss, _ = dmp(next(iterator))
            loss.backward()
            optimizer.step()
        expected = oracle.step(everyone, dense_optimizer, frozen=frozen)
        difference = "" if loss.item() == expected.item() else f"loss {loss.item()!r}, not {expected.item()!r}"
        if not difference and step % 5 == 4:
            settle(pipeline)
            difference = compare_state(scenario, oracle, state_of(dmp))
        raise_together(difference, step)
    check_pins(dmp)
    return {s.table: s.rows for s in dmp.module.ebc.stats()}


@pytest.mark.parametrize(
    ("world_size", "optimizer", "cache", "depth", "is_weighted"),
    [
        (1, "adam", "minimum", 0, False),
        (2, "adagrad", "tenth", 3, True),
        (2, "rowwise_adagrad", "below", 0, False),
        (3, "sgd", "minimum", 12, False),
    ],
)
@pytest.mark.parametrize("turns", [NEVER_TRAINED, TAKES_TURNS], ids=["always", "in turns"])
def test_equals_the_oracle(
    pools: dict[int, RankPool],
    turns: list[set[str]],
    world_size: int,
    optimizer: str,
    cache: str,
    depth: int,
    is_weighted: bool,
) -> None:
    scenario = Scenario(optimizer=optimizer, cache=cache, steps=40, ids_per_table=200, is_weighted=is_weighted)
    for rows in pools[world_size].run(run, scenario, turns, depth):
        assert rows["user"] > 0
        assert (rows["item"] == 0) == (turns is NEVER_TRAINED)


def test_tables_and_columns_of_single_ranks_take_turns(pool_2: RankPool) -> None:
    """A rank that holds nothing of a table takes prepared batches back too when it is frozen."""
    scenario = Scenario(tables=MIXED, optimizer="adam", steps=18, batch_size=5, ids_per_table=200)
    turns = [{"page"}, set[str](), {"user", "item", "town"}]
    first, second = pool_2.run(run, scenario, turns, 3)
    assert first["page"] == 0 and second["page"] > 0


def step_frozen(scenario: Scenario) -> None:
    """Mutant: what is frozen is looked at by nobody."""
    with mock.patch.object(PooledLookup, "frozen_tables", lambda self: (False,) * len(self.tables)):
        run(scenario, NEVER_TRAINED, 0)


def test_a_frozen_row_that_is_stepped_is_noticed(pool_1: RankPool) -> None:
    with pytest.raises(RankFailure, match="is not|item|loss"):
        pool_1.run(step_frozen, Scenario(steps=20, ids_per_table=50))


def ranks_differ() -> str:
    scenario = Scenario(steps=4)
    dmp, _ = build(scenario, {"user": 60, "item": 60, "word": 60})
    if dist.get_rank() == 1:
        freeze(dmp.module.ebc, {"item"})
    batch = make_batch(scenario, 0, dist.get_rank(), dist.get_world_size())
    try:
        dmp(to_kjt(scenario, batch), batch.labels)
    except HybridRecError as e:
        return f"{type(e).__name__}: {e}"
    return "no error"


def test_ranks_that_freeze_different_tables_are_told(pool_2: RankPool) -> None:
    first, second = pool_2.run(ranks_differ)
    assert first == second
    assert first.startswith("StateError") and "trains some tables" in first and "requires_grad" in first


def sharded_frozen() -> tuple[int, str]:
    """A table that is frozen and has no optimizer is sharded too; (its rows after training, what unfreezing says)."""

    def first_only(cls: type, parameters: Iterator[torch.nn.Parameter], kwargs: dict[str, Any]) -> None:
        first, second = parameters
        apply_optimizer_in_backward(cls, [first], kwargs)
        second.requires_grad_(False)

    with mock.patch.object(small, "apply_optimizer_in_backward", first_only):
        dmp = small.sharded([small.table("a", 8, ["f"]), small.table("b", 8, ["g"])], device_rows=8)
    features = small.kjt({"f": [[1, 2], [3]], "g": [[1, 2], [3]]})
    for _ in range(3):
        dmp(features).sum().backward()
    rows = dmp.module.ebc.stats()[1].rows
    dmp.module.ebc.embedding_bags["b"].weight.requires_grad_(True)
    try:
        dmp(features)
    except HybridRecError as e:
        return rows, f"{type(e).__name__}: {e}"
    return rows, "no error"


def test_a_table_can_be_sharded_frozen(pool_2: RankPool) -> None:
    for rows, text in pool_2.run(sharded_frozen):
        assert rows == 0
        assert text.startswith("ConfigError: table 'b': requires_grad was set to True") and "optimizer" in text
