"""Prefetch and cache: races, stale rows, rows evicted in use. Defects of other systems, and what is right here."""

from __future__ import annotations

import ast
import itertools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torchrec.distributed import DistributedModelParallel
from torchrec.distributed.planner import EmbeddingShardingPlanner, ParameterConstraints, Topology
from torchrec.distributed.types import ShardingEnv

from hybridrec import get_default_hybrid_sharders
from hybridrec.native import ShardGroup, mix64
from tests.cases.small import Pools, kjt, table, unsharded
from tests.distributed.pipelines import check_pins, run_pipeline_against_oracle
from tests.distributed.scenario import Scenario, state_of
from tests.distributed.test_hazards import (
    HAZARDS,
    SCENARIO,
    TABLE,
    hand_made,
    hazard,
    numbered_ids,
    reads_between_steps,
)
from tests.property.driver import Slots, make_specs
from tests.ranks import RankPool
from tests.repo.sources import repository_files, tree_of


@pytest.mark.parametrize("depth", [2, 3])
def test_fb1201_prefetched_row_is_evicted_before_use(pools: dict[int, RankPool], depth: int) -> None:
    """8 slots, batch i needs 6 and batch i + 1 six others: MAP waits, or the batch goes in passes."""
    for world_size in (1, 2):
        for stats in pools[world_size].run(hazard, HAZARDS["evicted_while_in_use"], depth):
            assert stats["victims"] > 0


def test_fb1883_an_id_a_thousand_times_is_released_once(pool_1: RankPool) -> None:
    (stats,) = pool_1.run(hazard, HAZARDS["same_id_a_thousand_times"], 3)
    assert stats["pins"] == 0


@pytest.mark.parametrize("depth", [0, 3])
def test_fb2843_ten_rows_through_two_slots_are_updated_once(pool_1: RankPool, depth: int) -> None:
    scenario = Scenario(optimizer="adam", cache="tenth", ids_per_table=20, tables=(TABLE,))
    (stats,) = pool_1.run(hazard, [list(range(10)), [1, 2], list(range(5, 15))] * 3, depth, scenario)
    assert stats["slots"] == 2 and stats["oversized"] == 6


def test_fb6120_fb6192_no_grad_forwards_between_steps_keep_no_locks(pool_1: RankPool) -> None:
    assert pool_1.run(reads_between_steps, 60) == [[0] * 60]


@pytest.mark.parametrize("core", ["compiled", "reference"])
def test_fb5184_inputs_are_free_once_plan_has_returned(core: Any) -> None:
    specs = make_specs(slots=(16, 8))
    expected, got = [], []
    for garbage, records in ((False, expected), (True, got)):
        group = ShardGroup(specs, core=core)
        slots = [Slots(spec, spec.num_slots) for spec in specs]
        for t, memory in enumerate(slots):
            group.bind_slots(t, *memory.bind())
        keys, offsets = mix64(torch.arange(10)), torch.tensor([0, 6, 10])
        tables, out = torch.tensor([0, 1]), torch.empty(10, dtype=torch.int64)
        plan = group.plan(keys, offsets, tables, out)
        if garbage:
            for tensor in (keys, offsets, tables):
                tensor.fill_(2**62)
        group.swap(plan.ordinal)
        records += [memory.read(part).tolist() for memory, part in zip(slots, out.split([6, 4]), strict=True)]
    assert got == expected


def train_eval_train() -> None:
    """Evaluation stops in the middle: what it queued is never trained."""
    steps = [[n, n + 1] for n in range(0, 60, 2)]
    run = hand_made(steps, 3)
    training, evaluation = run.loader(0, 10), run.loader(15, 25)
    run.train(training, range(5))
    run.dmp.eval()
    with torch.no_grad():
        for _ in range(3):
            run.pipeline.progress(evaluation)
    run.dmp.train()
    run.train(training, range(5, 10))
    run.check()
    run.pipeline.reset()
    ids = numbered_ids(SCENARIO)
    trained = {ids[n] for numbers in steps[:10] for n in numbers}
    live = set(state_of(run.dmp)[0])
    assert live <= trained
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, live)
    assert set().union(*everyone) == trained


def test_re314_batches_of_a_cut_evaluation_are_not_trained(pools: dict[int, RankPool]) -> None:
    pools[1].run(train_eval_train)
    pools[2].run(train_eval_train)


def mixed_placements() -> None:
    """One collection: cached with 8 rows, all on the device, host only, and three rows."""
    tables = [table("cached", 8, ["a"], device_rows=8), table("device", 8, ["b"]), table("host", 8, ["c"])]
    tables.append(table("three", 8, ["d"], planned_rows=3))
    kernels = {"cached": "fused_uvm_caching", "device": "fused", "host": "fused_uvm", "three": "fused"}
    model, world_size = Pools(unsharded(tables)), dist.get_world_size()
    sharders = get_default_hybrid_sharders(
        ShardingEnv(world_size=world_size, rank=dist.get_rank(), pg=dist.new_group(backend="gloo"))
    )
    planner = EmbeddingShardingPlanner(
        topology=Topology(world_size=world_size, local_world_size=world_size, compute_device="cpu"),
        constraints={name: ParameterConstraints(compute_kernels=[kernel]) for name, kernel in kernels.items()},
    )
    plan = planner.collective_plan(model, sharders, dist.GroupMember.WORLD)
    dmp = DistributedModelParallel(model, device=torch.device("cpu"), plan=plan, sharders=sharders)
    reference = unsharded(tables)
    for step in range(12):
        bags = {f: [[(step * 5 + i) % (3 if f == "d" else 40) for i in range(3)] for _ in range(2)] for f in "abcd"}
        features = kjt(bags)
        expected = reference(kjt({f: b * world_size for f, b in bags.items()})).values()
        pools = dmp(features)
        torch.testing.assert_close(pools.detach(), expected.detach()[: len(pools)], rtol=1e-6, atol=1e-7)
        pools.sum().backward()
        (expected.sum() / world_size).backward()
    stats = {s.table: s for s in dmp.module.ebc.stats()}
    assert stats["cached"].victims > 0 and stats["device"].victims == 0 and stats["three"].rows <= 3
    check_pins(dmp)


def test_re295_cached_and_other_tables_in_one_group(pools: dict[int, RankPool]) -> None:
    pools[1].run(mixed_placements)
    pools[2].run(mixed_placements)


DEPTHS_AND_CACHES = list(itertools.product((1, 2, 3, 4, 8), ("one", "minimum", "all")))


@pytest.mark.parametrize(("depth", "cache"), DEPTHS_AND_CACHES)
def test_re313_every_depth_and_cache_is_exact(pool_1: RankPool, depth: int, cache: str) -> None:
    (result,) = pool_1.run(run_pipeline_against_oracle, Scenario(cache=cache, steps=12, optimizer="adam"), depth)
    assert result["asked"] == 13


def is_unconditional_skip(node: ast.AST) -> bool:
    """``pytest.mark.skip`` or ``pytest.skip``; these folders need neither."""
    return isinstance(node, ast.Attribute) and node.attr == "skip"


def test_re280_re281_no_exactness_test_is_switched_off() -> None:
    folders = ("distributed", "simnpu", "model_check", "property", "cases")
    files = [path for folder in folders for path in repository_files(f"tests/{folder}", suffixes=(".py",))]
    found = [path for path in files if any(is_unconditional_skip(n) for n in ast.walk(tree_of(path)))]
    assert files and not found
    assert any(is_unconditional_skip(n) for n in ast.walk(ast.parse("@pytest.mark.skip\ndef test_a(): pass")))


def second_pass(depth: int) -> dict[str, int]:
    """Statistics that a second pass adds when the cache holds everything."""
    steps = [list(range(n, n + 4)) for n in range(0, 24, 4)]
    scenario = Scenario(optimizer="adagrad", cache="all", ids_per_table=80, tables=(TABLE,))
    run = hand_made(steps, depth, scenario)
    seen = []
    for _ in range(3):
        run.train(run.loader(0, len(steps)), range(len(steps)))
        run.check()
        (stats,) = run.dmp.module.ebc.stats()
        seen.append((stats.uniques - stats.unique_hits, stats.victims, stats.loads))
    return {"misses": seen[2][0] - seen[0][0], "victims": seen[2][1], "loads": seen[2][2], "first": seen[0][0]}


def test_hc278_a_cache_as_large_as_the_table_misses_nothing(pools: dict[int, RankPool]) -> None:
    for result in [*pools[1].run(second_pass, 3), *pools[2].run(second_pass, 3)]:
        assert result["first"] > 0
        assert (result["misses"], result["victims"], result["loads"]) == (0, 0, 0)


def reset_and_go_on(depth: int) -> None:
    run = hand_made(HAZARDS["dirty_load"], depth)
    run.train(run.loader(0, 12), range(3))
    run.pipeline.reset()
    check_pins(run.dmp)
    iterator = run.loader(3, 6)
    run.train(iterator, range(3, 6))
    run.ends(iterator)
    run.check()


def test_tr3540_reset_between_prefetched_batches(pools: dict[int, RankPool]) -> None:
    pools[1].run(reset_and_go_on, 3)
    pools[2].run(reset_and_go_on, 3)


@pytest.mark.parametrize("depth", [1, 4])
def test_recstore220_rows_of_step_k_are_those_of_batch_k(pool_1: RankPool, depth: int) -> None:
    """Ids say the step: a schedule that is off by one has no such row."""
    (stats,) = pool_1.run(hazard, [[step] for step in range(30)], depth)
    assert stats["rows"] == 30
