"""Gradients of N batches and one step: bit for bit that of one batch with the samples of all, on an unlimited table."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from hybridrec import ConfigError, HybridRecError, accumulate_gradients
from hybridrec.distributed.gradient_group import GradientGroup
from tests.cases import small
from tests.distributed import beside_torchrec
from tests.distributed.beside_torchrec import Script
from tests.distributed.oracle import Batch, Oracle
from tests.distributed.pipelines import all_batches, build_oracle, build_pipelined, check_pins, mine, settle
from tests.distributed.scenario import Scenario, compare_state, raise_together, scenario_loss, state_of
from tests.ranks import RankFailure, RankPool


def step_together(
    oracle: Oracle, group: Sequence[Sequence[Batch]], dense_optimizer: torch.optim.Optimizer
) -> list[float]:
    """Every batch is looked up in the rows before the group; one step for all, by one lookup of all their bags.

    Returns:
        This rank's loss of each batch.
    """
    losses, grads = [], []
    dense_optimizer.zero_grad()
    for everyone in group:
        own = everyone[oracle.rank]
        partial, _ = oracle._partial_pools(everyone)
        leaf = oracle._exchange_pools(partial, everyone).clone().requires_grad_()
        loss = scenario_loss(oracle.dense(oracle._mean(leaf, own)), own.labels)
        loss.backward()
        losses.append(loss.item())
        of_ranks: list[Tensor] = [torch.empty(0)] * oracle.world_size
        dist.all_gather_object(of_ranks, leaf.grad / oracle.world_size)
        grads += of_ranks
    _, saved = oracle._partial_pools([batch for everyone in group for batch in everyone])
    oracle.step_number += 1
    grad = torch.cat(grads)
    for part, kernel, kept in zip(oracle.mine, oracle.kernels, saved, strict=True):
        kernel.backward(kept, grad[:, oracle._columns_of(part)].contiguous(), step=oracle.step_number)
    dense_optimizer.step()
    return losses


def plain_loop(dmp: Any, optimizer: Any, batches: Sequence[Any], num_steps: int) -> Iterator[float]:
    """torch's own way to accumulate."""
    accumulate_gradients(dmp)
    for i, batch in enumerate(batches):
        if i % num_steps == 0:
            optimizer.zero_grad()
        loss, _ = dmp(batch)
        loss.backward()
        if i % num_steps == num_steps - 1 or i == len(batches) - 1:
            optimizer.step()
        yield loss.item()


def run(scenario: Scenario, num_steps: int, depth: int) -> dict[str, Any]:
    """Train this rank's side and the oracle; depth 0 is the plain loop. The last group is a partial one.

    Returns:
        What a test asserts on besides.
    """
    batches = all_batches(scenario)
    in_pipeline = {} if depth == 0 else {"accumulation_steps": num_steps}
    dmp, pipeline = build_pipelined(scenario, batches, max(depth, 1), **in_pipeline)
    oracle, dense_optimizer = build_oracle(scenario)
    ours = mine(scenario, batches)
    iterator = iter(ours)
    plain = plain_loop(dmp, pipeline._optimizer, ours, num_steps) if depth == 0 else None
    for first in range(0, len(batches), num_steps):
        group = batches[first : first + num_steps]
        losses = [next(plain) if plain is not None else pipeline.progress(iterator).item() for _ in group]
        if depth and len(group) < num_steps:
            before = pipeline.batches_committed
            with pytest.raises(StopIteration):
                pipeline.progress(iterator)
            assert pipeline.batches_committed == before + len(group)
        expected = step_together(oracle, group, dense_optimizer)
        difference = "" if losses == expected else f"losses {losses}, not {expected}"
        settle(pipeline)
        raise_together(difference or compare_state(scenario, oracle, state_of(dmp)), first)
    check_pins(dmp)
    stats = dmp.module.ebc.stats()
    return {
        "committed": pipeline.batches_committed,
        "oversized": sum(s.oversized for s in stats),
        "victims": sum(s.victims for s in stats),
        "steps": dmp.module.ebc.lookup.log.committed,
    }


@pytest.mark.parametrize(
    ("world_size", "optimizer", "cache", "num_steps", "depth", "is_weighted"),
    [
        (1, "adam", "tenth", 3, 0, False),
        (1, "adagrad", "minimum", 4, 3, True),  # less slots than a group has rows
        (2, "sgd", "tenth", 4, 0, False),
        (2, "adam", "all", 4, 12, False),
        (2, "rowwise_adagrad", "minimum", 3, 1, False),
        (3, "adagrad", "below", 2, 3, False),
    ],
)
def test_equals_one_batch_of_all(
    pools: dict[int, RankPool],
    world_size: int,
    optimizer: str,
    cache: str,
    num_steps: int,
    depth: int,
    is_weighted: bool,
) -> None:
    steps = 5 * num_steps + 1
    scenario = Scenario(
        optimizer=optimizer, cache=cache, steps=steps, ids_per_table=300, is_weighted=is_weighted, transient_bytes=2048
    )
    results = pools[world_size].run(run, scenario, num_steps, depth)
    for result in results:
        assert result["steps"] == 6
        if depth:
            assert result["committed"] == steps
    if cache in ("minimum", "below"):
        assert sum(result["oversized"] for result in results) > 0
    if cache == "all":
        assert sum(result["oversized"] for result in results) == 0


def test_host_placement(pool_2: RankPool) -> None:
    """Tables whose slots are for the batches in flight alone."""
    for result in pool_2.run(run, Scenario(kernel="fused_uvm", cache="minimum", steps=16, ids_per_table=300), 3, 3):
        assert result["committed"] == 16


def against_torch() -> float:
    """Largest difference to one unsharded batch of all: torch's own accumulation sums the same gradients."""
    kwargs = {"optimizer": torch.optim.Adagrad, "lr": 0.1}
    tables = [small.table("t", 8, ["f", "g"])]
    dmp, reference = small.sharded(tables, device_rows=64, **kwargs), small.unsharded(tables, **kwargs)
    accumulate_gradients(dmp)
    for step in range(10):
        bags = [{f: [[step + i, 3 * i, step], [i + len(f)]] for f in ("f", "g")} for i in range(4)]
        dmp.fused_optimizer.zero_grad()
        for one in bags:
            dmp(small.kjt(one)).square().sum().backward()
        dmp.fused_optimizer.step()
        reference(small.kjt(small.glued(bags))).values().square().sum().backward()
    ids = small.kjt({"f": [[i] for i in range(20)], "g": [[i] for i in range(20)]})
    return float((dmp.eval()(ids) - reference.eval()(ids).values()).abs().max())


def test_agrees_with_the_unsharded_collection(pool_1: RankPool) -> None:
    (difference,) = pool_1.run(against_torch)
    assert difference < 1e-6


def drop_one() -> Any:
    """Mutant: the first gradient of a group is lost."""
    real = GradientGroup.add

    def add(self: GradientGroup, batch: Any, grads: Sequence[Tensor]) -> None:
        real(self, batch, [torch.zeros_like(g) for g in grads] if self.num_waiting == 0 else grads)

    return mock.patch.object(GradientGroup, "add", add)


def step_twice() -> Any:
    """Mutant: rows are stepped in the backward as well."""
    real = GradientGroup.add

    def add(self: GradientGroup, batch: Any, grads: Sequence[Tensor]) -> None:
        for kernel, one, grad in zip(self._lookup.kernels, batch.inputs, grads, strict=True):
            kernel.backward(kernel.forward(*one)[1], grad, step=1)
        real(self, batch, grads)

    return mock.patch.object(GradientGroup, "add", add)


def step_at_once() -> Any:
    """Mutant: a step a batch."""
    real = GradientGroup.add

    def add(self: GradientGroup, batch: Any, grads: Sequence[Tensor]) -> None:
        real(self, batch, grads)
        self.step()

    return mock.patch.object(GradientGroup, "add", add)


def run_mutant(mutant: Callable[[], Any]) -> None:
    with mutant():
        run(Scenario(cache="all", steps=8, ids_per_table=50), 4, 0)


@pytest.mark.parametrize("mutant", [drop_one, step_twice, step_at_once])
def test_mutants_are_noticed(pool_1: RankPool, mutant: Callable[[], Any]) -> None:
    with pytest.raises(RankFailure, match="is not|losses"):
        pool_1.run(run_mutant, mutant)


def bits(dmp: Any) -> list[dict[int, bytes]]:
    return [{i: np.asarray(r).tobytes() for i, r in t.items()} for t in state_of(dmp)]


class Planted(Exception):
    """Raised in the middle of a group."""


def interrupted(how: str) -> dict[str, Any]:
    """A group that ends before its step leaves no trace: the rest trains as if it had never been."""
    scenario = Scenario(steps=12, ids_per_table=60, cache="all")
    batches = all_batches(scenario)
    (dmp, pipeline), (other, expected) = (build_pipelined(scenario, batches, 3, accumulation_steps=4) for _ in range(2))
    first, second = mine(scenario, batches[:6]), mine(scenario, batches[6:])
    iterator = iter(first)
    for _ in range(6 if how != "failure" else 5):
        pipeline.progress(iterator)
    waiting = [s.pins > 0 for s in dmp.module.ebc.stats()]
    if how == "reset":
        pipeline.reset()
    elif how == "failure":
        with mock.patch.object(pipeline, "_backward", side_effect=Planted), pytest.raises(Planted):
            pipeline.progress(iterator)
        pipeline.reset()
    elif how == "zero_grad":
        dmp.fused_optimizer.zero_grad()
        pipeline.reset()
    settle(pipeline)
    before = mine(scenario, batches[:4])
    for source, target in ((before, expected), (second, pipeline), (second, expected)):
        it = iter(source)
        for _ in source:
            target.progress(it)
        with pytest.raises(StopIteration):
            target.progress(it)
    return {
        "waits": all(waiting),
        "same": bits(dmp) == bits(other),
        "committed": pipeline.batches_committed,
        "dropped": pipeline.stats().batches_dropped,
        "in flight": pipeline.stats().batches_in_flight,
    }


@pytest.mark.parametrize("how", ["reset", "failure", "zero_grad"])
def test_an_interrupted_group_leaves_no_trace(pool_2: RankPool, how: str) -> None:
    for result in pool_2.run(interrupted, how):
        assert result == {"waits": True, "same": True, "committed": 10, "dropped": 2, "in flight": 0}


def misuse() -> list[str]:
    tables = [small.table("t", 8, ["f"])]
    dmp = small.sharded(tables, device_rows=64)
    accumulate_gradients(dmp)
    loss = dmp(small.kjt({"f": [[1, 2], [3]]})).sum()
    loss.backward(retain_graph=True)
    said = []
    for call in (
        loss.backward,
        lambda: accumulate_gradients(dmp, False),
        lambda: accumulate_gradients(small.unsharded(tables)),
        lambda: accumulate_gradients(torch.nn.Linear(1, 1)),
        lambda: accumulate_gradients(torch.nn.ModuleList([dmp, beside_torchrec.build_torchrec(Script(), None)])),
    ):
        try:
            call()
            said.append("nothing")
        except HybridRecError as e:
            said.append(f"{type(e).__name__}: {e}")
    dmp.fused_optimizer.step()
    accumulate_gradients(dmp, False)
    return said


def test_misuse_is_refused(pool_1: RankPool) -> None:
    (said,) = pool_1.run(misuse)
    assert said[0].startswith("StateError: second backward")
    assert said[1].startswith("StateError: accumulate_gradients: the gradients of 1 batches wait")
    assert said[2].startswith("ConfigError") and "not sharded" in said[2]
    assert said[4].startswith("ConfigError") and "'1" in said[4] and "TorchRec's own collections" in said[4]
    assert said[3].startswith("ConfigError") and "no sharded hashed collection" in said[3]


def wrong_steps(value: Any) -> str:
    scenario = Scenario(steps=2, ids_per_table=60)
    try:
        build_pipelined(scenario, all_batches(scenario), 3, accumulation_steps=value)
    except ConfigError as e:
        return str(e)
    return "nothing"


@pytest.mark.parametrize("value", [0, True, 1.5])
def test_wrong_numbers_are_refused(pool_1: RankPool, value: Any) -> None:
    (said,) = pool_1.run(wrong_steps, value)
    assert f"accumulation_steps={value!r}" in said
