"""Reading leaves no trace (G6): a million unknown ids, plain and through the pipeline, at every placement."""

from __future__ import annotations

import random
import resource
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torchrec.distributed import DistributedModelParallel
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from hybridrec.kernels.optimizer import OptimizerSpec
from tests.distributed.oracle import Batch, Oracle, mix64
from tests.distributed.pipelines import PipelineBatch, all_batches, build_pipelined, mine, settle
from tests.distributed.scenario import (
    OPTIMIZERS,
    Scenario,
    compare_state,
    make_dense,
    raise_together,
    state_of,
    to_kjt,
    universe,
)
from tests.ranks import RankPool

NUM_READS = 100
IDS_PER_READ = 10_000
WARM_UP_READS = 20
MOST_GROWTH_BYTES = 4 * 2**20
TRAIN_STEPS = 12

# placement, slots, weighted, through the pipeline
CASES = [
    ("fused_uvm_caching", "tenth", False, False),
    ("fused_uvm", "default", True, True),
    ("fused", "all", True, False),
    ("fused_uvm_caching", "minimum", False, True),
]


def unknown_id(table: str, n: int) -> int:
    """The n-th id that no batch of the scenario has; its bits are spread over the whole range."""
    return mix64(n + 2**40 + len(table)) - 2**63


def resident_bytes() -> int:
    with open("/proc/self/statm", encoding="ascii") as f:
        return int(f.read().split()[1]) * resource.getpagesize()


def trace(dmp: DistributedModelParallel) -> dict[str, Any]:
    """All that a read might change: entries, counters, records, Adam's step, parameters."""
    lookup = dmp.module.ebc.lookup
    tables = range(len(lookup.table_names))
    return {
        "entries": [[a.tobytes() for a in lookup.log.group.entries(t)] for t in tables],
        "records": [{i: r.tobytes() for i, r in rows.items()} for rows in state_of(dmp)],
        "stats": dmp.module.ebc.stats(),
        "committed": lookup.log.committed,
        "groups": [repr({k: v for k, v in g.items() if k != "params"}) for g in dmp.fused_optimizer.param_groups],
        "parameters": [p.detach().clone().numpy().tobytes() for p in dmp.parameters()],
    }


class Readers:
    """A trained model, its oracle, which has rows for some unknown ids too, and the two ways to read."""

    def __init__(self, scenario: Scenario, is_pipelined: bool) -> None:
        self.scenario, self.is_pipelined = scenario, is_pipelined
        self.batches = all_batches(scenario)
        self.batches_of_rank = mine(scenario, self.batches)
        self.dmp, self.pipeline = build_pipelined(scenario, self.batches, 3)
        dense = DistributedDataParallel(
            make_dense(sum(t.dim * len(t.features) for t in scenario.tables)),
            gradient_as_bucket_view=True,
            broadcast_buffers=False,
            static_graph=True,
        )
        self.dense_optimizer = torch.optim.Adagrad(dense.parameters(), lr=0.1)
        optimizer_class, kwargs = OPTIMIZERS[scenario.optimizer]
        ids = {t.name: [*universe(scenario, t), *(unknown_id(t.name, n) for n in range(200))] for t in scenario.tables}
        self.oracle = Oracle(
            scenario.tables,
            ids,
            OptimizerSpec.from_class(optimizer_class, dict(kwargs), table="oracle"),
            dense,
            is_weighted=scenario.is_weighted,
            rank=dist.get_rank(),
            world_size=dist.get_world_size(),
        )

    def train(self, iterator: Iterator[PipelineBatch], steps: range) -> None:
        for step in steps:
            loss = self.pipeline.progress(iterator)
            expected = self.oracle.step(self.batches[step], self.dense_optimizer)
            raise_together(
                "" if loss.item() == expected.item() else f"{loss.item()!r} is not {expected.item()!r}", step
            )
        settle(self.pipeline)

    def read(self, batches: list[PipelineBatch]) -> Iterator[float]:
        self.dmp.eval()
        iterator = iter(batches)
        for _ in range(len(batches)):
            if self.is_pipelined:
                yield self.pipeline.progress(iterator).item()
            else:
                with torch.no_grad():
                    yield self.dmp(next(iterator))[1].item()
        self.dmp.train()

    def mixed_batch(self, seed: int, rank: int) -> Batch:
        """Bags of 0 to 4 ids, half of them unknown, of all ranks."""
        rng = random.Random(f"{seed} {rank}")
        bags: dict[str, list[list[tuple[int, float]]]] = {}
        for table in self.scenario.tables:
            known = universe(self.scenario, table)
            for feature in table.features:
                bags[feature] = []
                for _ in range(0 if seed == 3 else 6 + rank):
                    ids = [
                        rng.choice(known) if rng.random() < 0.5 else unknown_id(table.name, rng.randrange(200))
                        for _ in range(rng.randrange(5))
                    ]
                    bags[feature].append([(i, round(rng.uniform(-1, 1), 3)) for i in ids])
        num_bags = len(next(iter(bags.values())))
        return Batch(bags=bags, labels=torch.ones(num_bags), num_bags=num_bags)

    def unknown_batch(self, number: int) -> PipelineBatch:
        """10,000 ids that were never seen, in bags of 0 to 99."""
        features = [(t.name, f) for t in self.scenario.tables for f in t.features]
        count = IDS_PER_READ // len(features)
        first = (number * dist.get_world_size() + dist.get_rank()) * IDS_PER_READ + 1000
        values = [
            torch.arange(first + k * count, first + (k + 1) * count) * 0x9E3779B97F4A7C1 for k in range(len(features))
        ]
        bounds = np.random.default_rng(number).integers(0, count + 1, (len(features), 49))
        bounds = np.sort(np.concatenate([np.zeros((len(features), 1)), bounds, np.full((len(features), 1), count)], 1))
        lengths = np.diff(bounds, axis=1).astype(np.int64)
        ids = torch.cat(values)
        weights = torch.rand(len(ids)) if self.scenario.is_weighted else None
        kjt = KeyedJaggedTensor(
            keys=[f for _, f in features], values=ids, lengths=torch.from_numpy(lengths.reshape(-1)), weights=weights
        )
        return PipelineBatch(kjt, torch.zeros(50))


def read_a_million(scenario: Scenario, is_pipelined: bool) -> dict[str, Any]:
    """Train, read what is known and what is not, read 10^6 unknown ids, and train on: the oracle sees no difference."""
    readers = Readers(scenario, is_pipelined)
    loader = iter(readers.batches_of_rank[:TRAIN_STEPS])
    readers.train(loader, range(TRAIN_STEPS))
    world_size = dist.get_world_size()
    before = trace(readers.dmp)

    mixed = [[readers.mixed_batch(seed, rank) for rank in range(world_size)] for seed in range(6)]
    inputs = [PipelineBatch(to_kjt(scenario, m[dist.get_rank()]), m[dist.get_rank()].labels) for m in mixed]
    for step, (everyone, loss) in enumerate(zip(mixed, readers.read(inputs), strict=True)):
        expected = readers.oracle.step(everyone, readers.dense_optimizer, train=False).item()
        raise_together("" if loss == expected else f"read {loss!r}, not {expected!r}", step)

    unknown = [readers.unknown_batch(n) for n in range(NUM_READS)]
    at_first, finite = 0, True
    for n, loss in enumerate(readers.read(unknown)):
        finite = finite and np.isfinite(loss)
        if n == WARM_UP_READS:
            at_first = resident_bytes()
    growth = resident_bytes() - at_first
    settle(readers.pipeline)
    after = trace(readers.dmp)

    readers.train(iter(readers.batches_of_rank[TRAIN_STEPS:]), range(TRAIN_STEPS, scenario.steps))
    raise_together(compare_state(scenario, readers.oracle, state_of(readers.dmp)), scenario.steps)
    changed = [name for name in before if before[name] != after[name]]
    read = sum(b.features.values().numel() for b in unknown)
    return {"changed": changed, "growth": growth, "finite": finite, "read": read, "rows": len(before["records"][0])}


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize(("kernel", "cache", "is_weighted", "is_pipelined"), CASES)
def test_dr252_a_million_unknown_ids_leave_no_trace(
    pools: dict[int, RankPool], kernel: str, cache: str, is_weighted: bool, is_pipelined: bool, world_size: int
) -> None:
    scenario = Scenario(optimizer="adam", kernel=kernel, cache=cache, is_weighted=is_weighted, steps=TRAIN_STEPS + 4)
    for result in pools[world_size].run(read_a_million, scenario, is_pipelined):
        assert result["changed"] == []
        assert result["finite"] and result["rows"] > 0
        assert result["read"] == NUM_READS * IDS_PER_READ
        assert result["growth"] < MOST_GROWTH_BYTES, result


def no_grad_between_steps(num_rounds: int) -> dict[str, Any]:
    """One step, then one forward under ``no_grad`` in training mode, over and over; afterwards steps alone."""
    scenario = Scenario(optimizer="adagrad", cache="tenth", steps=num_rounds)
    batches = all_batches(scenario)
    loader = mine(scenario, batches)
    dmp, pipeline = build_pipelined(scenario, batches, 1)
    alone, plain = build_pipelined(scenario, batches, 1)
    at_first = 0
    for step, batch in enumerate(loader):
        pipeline.progress(iter([batch]))
        with torch.no_grad():
            dmp(loader[step - 7])
        if step == num_rounds // 3:
            at_first = resident_bytes()
    growth = resident_bytes() - at_first
    for batch in loader:
        plain.progress(iter([batch]))
    stats = [model.module.ebc.stats() for model in (dmp, alone)]
    return {"pins": sum(s.pins for s in stats[0]), "growth": growth, "same": stats[0] == stats[1]}


@pytest.mark.parametrize("num_rounds", [100, pytest.param(10_000, marks=pytest.mark.slow)])
def test_fb6120_no_grad_forwards_between_steps_hold_no_pins(pool_1: RankPool, num_rounds: int) -> None:
    (result,) = pool_1.run(no_grad_between_steps, num_rounds, watchdog=500)
    assert result["pins"] == 0
    assert result["same"]  # hits, victims and all other counters, as without the reads
    assert result["growth"] < MOST_GROWTH_BYTES, result
