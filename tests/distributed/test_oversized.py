"""Batches that need more slots than there are: computed in passes, with the bits of one pass over everything."""

from __future__ import annotations

import itertools
import logging
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from hybridrec import HybridRecError
from hybridrec.cache import TransactionLog
from hybridrec.distributed.lookup import PooledLookup
from hybridrec.distributed.oversized import PassLookup, _Sizes
from tests.distributed.pipelines import run_pipeline_against_oracle
from tests.distributed.scenario import Scenario, build, make_batch, run_against_oracle, state_of, to_kjt
from tests.distributed.test_capacity import DIM, bag_of, evicting_run, shard
from tests.distributed.test_refusal import bits, counters
from tests.ranks import RankPool

OPTIMIZERS = ("sgd", "adagrad", "rowwise_adagrad", "adam")
FEW_BYTES = 700  # of transient slots: a row or a few of each table, unless one sample needs more


def check(results: list[dict[str, Any]], *, is_always: bool) -> None:
    for result in results:
        for s in result["stats"]:
            assert s.pins == 0 and s.rejected == 0
            assert s.resident <= s.slots < s.rows
        assert sum(s.oversized for s in result["stats"]) > 0
        assert all(s.oversized_bytes > 0 for s in result["stats"])  # such a batch bypasses the slots of all tables
        if is_always:
            assert all(s.loads == s.victims == s.access_hits == 0 for s in result["stats"])
        else:
            assert any(s.victims for s in result["stats"]) and any(s.access_hits for s in result["stats"])


@pytest.mark.parametrize("is_weighted", [False, True], ids=["sum_and_mean", "weighted"])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("transient_bytes", [FEW_BYTES, None], ids=["many_passes", "one_pass"])
def test_batches_of_all_sizes(pool_1: RankPool, optimizer: str, is_weighted: bool, transient_bytes: int | None) -> None:
    scenario = Scenario(
        cache="below", optimizer=optimizer, is_weighted=is_weighted, transient_bytes=transient_bytes, steps=30
    )
    check(pool_1.run(run_against_oracle, scenario), is_always=False)


@pytest.mark.parametrize(("optimizer", "is_weighted"), [("sgd", False), ("adagrad", False), ("adam", True)])
@pytest.mark.parametrize("world_size", [2, 3])
def test_on_some_ranks_only(pools: dict[int, RankPool], world_size: int, optimizer: str, is_weighted: bool) -> None:
    """Passes are local to a rank: others train the same batch in their slots."""
    scenario = Scenario(
        cache="below", optimizer=optimizer, is_weighted=is_weighted, transient_bytes=FEW_BYTES, steps=30, batch_size=5
    )
    check(pools[world_size].run(run_against_oracle, scenario), is_always=False)


def test_a_bag_is_longer_than_the_tier(pool_2: RankPool) -> None:
    """One slot a table: no batch but empty ones ever fits."""
    scenario = Scenario(cache="one", optimizer="adagrad", transient_bytes=1, steps=20)
    results = pool_2.run(run_against_oracle, scenario)
    assert all(s.slots == 1 and s.oversized_bytes for result in results for s in result["stats"])


PAIRWISE = [
    (depth, optimizer, cache, bool((i + j) % 2))
    for (i, depth), (j, (optimizer, cache)) in itertools.product(
        enumerate((1, 2, 3, 12)), enumerate([("adagrad", "below"), ("adam", "below"), ("sgd", "one")])
    )
]


@pytest.mark.parametrize(("depth", "optimizer", "cache", "is_weighted"), PAIRWISE)
def test_in_the_pipeline(pool_2: RankPool, depth: int, optimizer: str, cache: str, is_weighted: bool) -> None:
    scenario = Scenario(
        cache=cache, optimizer=optimizer, is_weighted=is_weighted, transient_bytes=FEW_BYTES, steps=24, batch_size=6
    )
    for result in pool_2.run(run_pipeline_against_oracle, scenario, depth, delay_seed=depth):
        assert all(s.rejected == 0 and s.pins == 0 for s in result["stats"])
        assert sum(s.oversized for s in result["stats"]) > 0


# ---- beside other batches ------------------------------------------------------------------------------------------

LARGE = {"user": 200, "item": 300, "word": 200}


def nested(small: bool, optimizer: str) -> tuple[list[float], list[dict[int, bytes]]]:
    """Forwards whose backwards come later, in either order, with eval reads and dropped forwards between."""
    scenario = Scenario(optimizer=optimizer, steps=16, transient_bytes=FEW_BYTES if small else None)
    dmp, fused = build(scenario, dict.fromkeys(LARGE, 24) if small else LARGE)
    rank, world_size = dist.get_rank(), dist.get_world_size()
    batches = [make_batch(scenario, step, rank, world_size) for step in range(scenario.steps)]

    def forward(step: int) -> torch.Tensor:
        loss: torch.Tensor = dmp(to_kjt(scenario, batches[step]), batches[step].labels)
        return loss

    losses = []
    for step in range(0, 15, 3):
        fused.zero_grad()
        first, second = forward(step), forward(step + 1)
        with torch.no_grad():
            read = forward(step + 2)
        dropped = forward(step + 2)
        losses += [first.item(), second.item(), read.item(), dropped.item()]
        del dropped
        for loss in (first, second) if step % 2 else (second, first):
            loss.backward()
        fused.step()
    stats = dmp.module.ebc.stats()
    assert all(s.pins == 0 for s in stats)
    assert bool(sum(s.oversized for s in stats)) == small, stats
    return losses, bits(dmp)


@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
@pytest.mark.parametrize("world_size", [1, 2])
def test_between_forwards_whose_backwards_come_later(
    pools: dict[int, RankPool], world_size: int, optimizer: str
) -> None:
    """Rows of a batch in passes may be in slots that other batches pin; both copies are stepped."""
    for small, large in zip(
        pools[world_size].run(nested, True, optimizer), pools[world_size].run(nested, False, optimizer), strict=True
    ):
        assert small == large


@pytest.mark.parametrize("world_size", [1, 2])
def test_evicts_the_rows_that_the_rule_names(pools: dict[int, RankPool], world_size: int) -> None:
    max_rows = 80 if world_size == 1 else 96
    small, large = (pools[world_size].run(evicting_run, max_rows, device_rows, 60) for device_rows in (2, 64))
    for rank in range(world_size):
        assert small[rank]["wrong"] == large[rank]["wrong"] == ""
        assert small[rank]["evicted"] and small[rank] == large[rank]


def open_while_full(device_rows: int) -> tuple[int, list[int], dict[int, bytes]]:
    """A forward waits for its backward while a full table evicts: its rows stay, and no others because of it."""
    dmp = shard(device_rows=device_rows, max_rows=40, full_policy="evict")
    pending = dmp(bag_of(list(range(10))))
    num_refused = 0
    for step in range(30):
        try:
            dmp(bag_of([100 + 2 * step, 101 + 2 * step])).backward()
        except HybridRecError:
            num_refused += 1
    pending.backward()
    return num_refused, sorted(bits_of_one(dmp)), bits_of_one(dmp)


def test_a_pending_backward_keeps_its_rows_alone(pool_1: RankPool) -> None:
    ((num_refused, ids, small),) = pool_1.run(open_while_full, 2)
    ((_, _, large),) = pool_1.run(open_while_full, 200)
    assert num_refused == 0 and set(range(10)) < set(ids) and small == large


def refused(kind: str) -> dict[str, Any]:
    """A batch that would go in passes is refused: by this rank's quota or budget, or by another rank's input."""
    limit: dict[str, Any] = {"max_rows": 60, "full_policy": "error"}
    if kind == "budget":
        limit = {"host_memory_bytes": 3_000_000}  # a chunk of rows takes 2 MiB, and this batch needs a second one
    elif kind == "other rank":
        limit = {}
    dmp = shard(device_rows=4, **limit)
    for step in range(3):
        dmp(bag_of(list(range(10 * step, 10 * step + 10)))).backward()
    before, counted = bits_of_one(dmp), counters(dmp)
    features = bag_of(list(range(20, 100_000)) if kind == "budget" else list(range(20, 120)))
    if kind == "other rank" and dist.get_rank() == 1:
        features = KeyedJaggedTensor(keys=["g"], values=torch.tensor([1]), lengths=torch.tensor([1]))
    try:
        dmp(features)
        error = ""
    except HybridRecError as e:
        error = str(e)
    unchanged = bits_of_one(dmp) == before and counters(dmp) == counted
    dmp(bag_of(list(range(10)))).backward()
    goes_on = bits_of_one(dmp) != before and all(s.pins == 0 for s in dmp.module.ebc.stats())
    return {"error": error, "unchanged": unchanged, "goes on": goes_on}


@pytest.mark.parametrize(
    ("kind", "match"), [("quota", "full_policy='error'"), ("budget", "host memory"), ("other rank", "'f'")]
)
def test_refused_on_all_ranks(pool_2: RankPool, kind: str, match: str) -> None:
    results = pool_2.run(refused, kind)
    for result in results:
        assert match in result["error"] and result["error"] == results[0]["error"], result
        assert result["unchanged"] and result["goes on"], result


def bits_of_one(dmp: torch.nn.Module) -> dict[int, bytes]:
    (rows,) = state_of(dmp)
    return {i: row.tobytes() for i, row in rows.items()}


# ---- what is told --------------------------------------------------------------------------------------------------


def warned() -> tuple[list[str], list[Any], int]:
    records: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: records.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("hybridrec").addHandler(handler)
    try:
        dmp = shard(device_rows=4)
        for step in range(5):
            dmp(bag_of(list(range(10 * step, 10 * step + 10)))).backward()
            dmp(bag_of([10 * step])).backward()
        passes = dmp.module.ebc.lookup._passes.num_passes
    finally:
        logging.getLogger("hybridrec").removeHandler(handler)
    return records, list(dmp.module.ebc.stats()), passes


def test_said_once_and_counted(pool_1: RankPool) -> None:
    ((records, (stats,), passes),) = pool_1.run(warned)
    said = [r for r in records if "in passes" in r]
    assert len(said) == 1 and "table 't' (rank 0 of 1)" in said[0] and "10 slots" in said[0] and "has 4" in said[0]
    assert stats.oversized == 5 and stats.rejected == 0
    assert stats.oversized_bytes == 5 * 10 * 2 * 4 * DIM  # there and back
    assert passes == 5
    assert stats.accesses == 55


# ---- mutants ---------------------------------------------------------------------------------------------------------


def mutated(name: str) -> None:
    """Each breaks one rule of `PassLookup`'s; the runs above must then differ from their oracles."""
    lookup = PooledLookup.update
    patches = {
        "no write-back before": mock.patch.object(TransactionLog, "flush", lambda self: self.settle()),
        "slots of resident rows are forgotten": mock.patch(
            "hybridrec.distributed.oversized.np.flatnonzero", lambda is_resident: np.empty(0, dtype=np.int64)
        ),
        "rows are not stored": mock.patch.object(PassLookup, "_store", lambda *args: None),
        "the step's number is lost": mock.patch.object(
            PooledLookup, "update", lambda self, b, s, g: (setattr(self.log, "committed", 0), lookup(self, b, s, g))
        ),
    }
    with patches[name]:
        if name == "the step's number is lost":
            run_against_oracle(Scenario(cache="one", optimizer="adam", steps=6, transient_bytes=FEW_BYTES))
        elif name == "slots of resident rows are forgotten":
            small, large = nested(True, "sgd"), nested(False, "sgd")
            assert small == large
        else:
            run_against_oracle(Scenario(cache="below", optimizer="sgd", steps=30, transient_bytes=FEW_BYTES))


@pytest.mark.parametrize(
    "name",
    [
        "no write-back before",
        "slots of resident rows are forgotten",
        "rows are not stored",
        "the step's number is lost",
    ],
)
def test_mutant_is_caught(pool_1: RankPool, name: str) -> None:
    with pytest.raises(Exception, match="is not|loss|assert|newer in slot"):
        pool_1.run(mutated, name)


@pytest.mark.parametrize(
    ("unique", "room", "passes"),
    [(0, 1, 0), (1, 1, 1), (8, 4, 2), (9, 4, 3), (16 * 2**20 + 1, 2**20, 17), (2**32 - 1, 2**31, 2)],
)
def test_no_row_is_beyond_the_last_pass(unique: int, room: int, passes: int) -> None:
    """A quotient in float32 would leave the last row of 16,777,217 out."""
    sizes = _Sizes(unique_T=torch.tensor([0, unique]), room_T=torch.tensor([1, room]))
    assert sizes.num_passes == passes and sizes.is_one_pass is (passes <= 1)
