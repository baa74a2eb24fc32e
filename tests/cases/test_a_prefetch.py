"""Prefetch and cache: races, stale rows, rows evicted in use. Defects of other systems, and what is right here."""

from __future__ import annotations

import ast
import dataclasses
import itertools
import random
import threading
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torchrec.distributed import DistributedModelParallel
from torchrec.distributed.planner import EmbeddingShardingPlanner, ParameterConstraints, Topology
from torchrec.distributed.types import ShardingEnv

from hybridrec import get_default_hybrid_sharders
from hybridrec.native import ShardGroup, initial_rows, mix64
from tests.cases.small import Pools, kjt, sharded, table, unsharded
from tests.distributed.pipelines import check_pins, run_pipeline_against_oracle
from tests.distributed.scenario import Scenario, state_of
from tests.distributed.test_hazards import (
    HAZARDS,
    SCENARIO,
    TABLE,
    hand_made,
    hazard,
    memory_after,
    numbered_ids,
    reads_between_steps,
)
from tests.property.driver import Slots, make_specs
from tests.ranks import RankPool, RankPools
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


@pytest.mark.parametrize("num_rounds", [8, pytest.param(625, marks=pytest.mark.slow)])  # of 16 steps
def test_fb3186_memory_is_flat_without_a_pipeline(pool_1: RankPool, num_rounds: int) -> None:
    ((before, after),) = pool_1.run(memory_after, 0, num_rounds, watchdog=1200)
    assert after < 1.02 * before, (before, after)


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


@pytest.mark.parametrize("depth", [3, 5])
def test_tr4497_stages_on_streams_of_their_own_read_nothing_too_early(npu_pools: RankPools, depth: int) -> None:
    """The simulated device orders every access of every stream; freed memory that is used is an error there."""
    npu_pools[2].run(run_pipeline_against_oracle, Scenario(cache="tenth", steps=12, device="npu"), depth, delay_seed=2)


@pytest.mark.parametrize("core", ["compiled", "reference"])
@pytest.mark.parametrize("num_ids", [0, 1, 31, 32, 33, 63, 64, 65])
def test_fb1957_numbers_of_ids_around_a_word(core: Any, num_ids: int) -> None:
    """Nothing is written beyond the batch; the same walk runs under sanitizers in tests/native."""
    specs = make_specs(slots=(80, 80))
    group, slots = ShardGroup(specs, core=core), [Slots(spec, spec.num_slots) for spec in specs]
    for t, memory in enumerate(slots):
        group.bind_slots(t, *memory.bind())
    keys, offsets, tables = mix64(torch.arange(num_ids) * 7), torch.tensor([0, num_ids]), torch.tensor([0])
    padded = torch.full((num_ids + 64,), -7)
    plan = group.plan(keys, offsets, tables, padded[:num_ids])
    group.swap(plan.ordinal)
    assert sorted(padded[:num_ids].tolist()) == list(range(num_ids)) and set(padded[num_ids:].tolist()) == {-7}
    index, counts = torch.full((num_ids + 64,), -7), torch.empty(2, dtype=torch.int64)
    group.end_read(group.read_plan(keys, offsets, tables, index[:num_ids], counts))
    assert index[:num_ids].tolist() == list(range(num_ids)) and set(index[num_ids:].tolist()) == {-7}
    assert counts.tolist() == [num_ids, 0]


def read_ids_of_nobody() -> None:
    """A thousand ids that were never trained, among trained ones: each reads its own initial row."""
    dmp = sharded([table("t", 4, ["f"])], device_rows=16)
    for step in range(6):
        dmp(kjt({"f": [[*range(10 * step, 10 * step + 10)]]})).sum().backward()
    trained = {row[:4].tobytes() for row in state_of(dmp)[0].values()}
    dmp.eval()
    unknown = [10**15 + 3 * i for i in range(1000)]
    read = dmp(kjt({"f": [[i] for i in unknown]})).detach()
    fresh = unsharded([table("t", 4, ["f"])]).eval()
    assert torch.equal(read, fresh(kjt({"f": [[i] for i in unknown]})).values())
    assert not any(row.numpy().tobytes() in trained for row in read)


@pytest.mark.parametrize("world_size", [1, 2])
def test_fb4955_fb5048_an_unknown_id_reads_no_other_id_s_row(pools: dict[int, RankPool], world_size: int) -> None:
    pools[world_size].run(read_ids_of_nobody)


@pytest.mark.parametrize("core", ["compiled", "reference"])
def test_fb5151_unique_ids_of_a_batch_are_exact_a_hundred_times(core: Any) -> None:
    specs = make_specs(slots=(80, 80))
    rng = random.Random(3)
    keys = mix64(torch.tensor([rng.randrange(50) for _ in range(400)]))
    offsets, tables = torch.tensor([0, 400]), torch.tensor([0])
    results = set()
    for k in range(100):
        group = ShardGroup(specs, core=core, num_threads=1 + k % 3)
        index, counts = torch.full((400,), k), torch.full((2,), k)
        group.end_read(group.read_plan(keys, offsets, tables, index, counts))
        slots = torch.full((400,), -k)
        plan = group.plan(keys, offsets, tables, slots)
        results.add((*index.tolist(), *counts.tolist(), *slots.tolist(), plan.num_unique))
    (result,) = results
    assert result[-1] == result[400] == len(set(keys.tolist())) and result[401] == 0


def test_fb5480_reads_beside_training_see_whole_rows() -> None:
    """Four readers and a trainer share a group; the C++ walk of tests/native does it under sanitizers."""
    spec = dataclasses.replace(make_specs(slots=(256, 8))[0], num_row_states=0, num_row_wise_states=0, dim=8)
    spec = dataclasses.replace(spec, state_initial_values=())
    group, slots = ShardGroup([spec], num_threads=2), Slots(spec, spec.num_slots)
    group.bind_slots(0, *slots.bind())
    ids, tables = torch.arange(2000), torch.tensor([0])
    expected = initial_rows(spec, mix64(ids))
    ended, wrong = threading.Event(), []

    def read(seed: int) -> None:
        rng = random.Random(seed)
        while not ended.is_set():
            some = torch.tensor([rng.randrange(2000) for _ in range(64)])
            index, counts = torch.empty(64, dtype=torch.int64), torch.empty(1, dtype=torch.int64)
            with lock:
                handle = group.read_plan(mix64(some), torch.tensor([0, 64]), tables, index, counts)
                buffer = torch.empty((int(counts), 8))
                group.read_rows(handle, [buffer], host_only=False)
            if not torch.equal(buffer[index], expected[some]):
                wrong.append(some)

    lock = threading.Lock()  # no batch may be planned and not moved when rows are read
    readers = [threading.Thread(target=read, args=(seed,)) for seed in range(4)]
    for reader in readers:
        reader.start()
    for start in [*range(0, 2000, 200), *range(0, 2000, 100)]:
        keys = mix64(ids[start : start + 200])
        with lock:
            plan = group.plan(keys, torch.tensor([0, len(keys)]), tables, torch.empty_like(keys))
            group.swap(plan.ordinal)
        group.commit(plan.ordinal)
    ended.set()
    for reader in readers:
        reader.join(60)
    assert not wrong and group.counters(0).rows == 2000 and group.counters(0).write_backs > 1000


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
