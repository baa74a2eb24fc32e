"""The oracle test must be able to fail: each named mutation of the code breaks it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from hybridrec.cache.swap import HostMemorySwapper
from hybridrec.cache.transaction import BatchTransaction, TransactionLog
from hybridrec.distributed import input_dist, output_dist
from hybridrec.distributed.lookup import PooledLookup
from hybridrec.native import ShardGroup
from hybridrec.native.protocol import Plan
from tests.distributed.scenario import Scenario, run_against_oracle
from tests.distributed.test_refusal import forward_only, refuse_one
from tests.ranks import RankFailure, RankPool


@contextlib.contextmanager
def _around_swaps(mutate: Callable[[list[Tensor], list[Tensor]], None], *, victims: bool) -> Iterator[None]:
    """Let ``mutate(weights, slots)`` (one tensor a table) loose on the victims before, or the loads after, one swap."""
    bind, swap = ShardGroup.bind_slots, HostMemorySwapper.swap
    weights: dict[tuple[int, int], Tensor] = {}
    done = []

    def bind_slots(self: ShardGroup, table: int, *arrays: Any) -> None:
        weights[id(self), table] = arrays[0]
        bind(self, table, *arrays)

    def mutated(self: HostMemorySwapper, plan: Plan, *fence_and_lock: Any) -> None:
        strike = not done and plan.ordinal > 5 and plan.num_write_backs > 1 and plan.num_loads > 1
        if strike:
            done.append(plan.ordinal)
            mine = [array for (group, _), array in sorted(weights.items()) if group == id(self._group)]
            counts = torch.empty((len(mine), 2), dtype=torch.int64)
            self._group.swap_counts(plan.ordinal, counts)
            loaded = torch.empty(plan.num_loads + plan.num_inits, dtype=torch.int64)
            written = torch.empty(plan.num_write_backs, dtype=torch.int64)
            self._group.swap_slots(plan.ordinal, loaded, written)
        if strike and victims:
            mutate(mine, list(written.split(counts[:, 1].tolist())))
        swap(self, plan, *fence_and_lock)
        if strike and not victims:
            mutate(mine, list(loaded.split(counts[:, 0].tolist())))

    with (
        mock.patch.object(ShardGroup, "bind_slots", bind_slots),
        mock.patch.object(HostMemorySwapper, "swap", mutated),
    ):
        yield


@contextlib.contextmanager
def lose_a_write_back() -> Iterator[None]:
    """The victims of one batch arrive in the store as zeros."""

    def zero(weights: list[Tensor], slots: list[Tensor]) -> None:
        for array, part in zip(weights, slots, strict=True):
            array[part] = 0.0

    with _around_swaps(zero, victims=True):
        yield


@contextlib.contextmanager
def swap_loads() -> Iterator[None]:
    """The rows of one batch land in each other's slots."""

    def rotate(weights: list[Tensor], slots: list[Tensor]) -> None:
        for array, part in zip(weights, slots, strict=True):
            array[part] = array[part].roll(1, 0)

    with _around_swaps(rotate, victims=False):
        yield


@contextlib.contextmanager
def step_twice() -> Iterator[None]:
    """Adam's bias correction is one step ahead."""
    real = PooledLookup.update

    def update(self: PooledLookup, *args: Any) -> None:
        self.log.committed += 1
        real(self, *args)
        self.log.committed -= 1

    with mock.patch.object(PooledLookup, "update", update):
        yield


@contextlib.contextmanager
def sum_in_reverse() -> Iterator[None]:
    """Partial pools are added from the last rank to the first."""
    real = output_dist._SumInRankOrder.apply

    def apply(partial: Tensor, received: Tensor, layout: Any) -> Tensor:
        parts = received.view(len(layout.sizes), -1)
        return real(partial, parts.flip(0).reshape(-1), layout)

    with mock.patch.object(output_dist._SumInRankOrder, "apply", apply):
        yield


@contextlib.contextmanager
def route_by_id() -> Iterator[None]:
    """Ids are sent by their own value: some land on a rank that does not own them."""
    with mock.patch.object(input_dist, "mix64", lambda ids: ids.clone()):
        yield


@contextlib.contextmanager
def no_undo() -> Iterator[None]:
    """A refused or abandoned batch keeps what it changed."""
    with mock.patch.object(BatchTransaction, "undo", lambda self: None):
        yield


@contextlib.contextmanager
def forget_abandoned() -> Iterator[None]:
    """A freed graph keeps its pins."""
    with mock.patch.object(TransactionLog, "settle", lambda self: self.abandoned.clear()):
        yield


MUTATIONS: dict[str, Callable[[], contextlib.AbstractContextManager[None]]] = {
    f.__name__: f
    for f in (lose_a_write_back, swap_loads, step_twice, sum_in_reverse, route_by_id, no_undo, forget_abandoned)
}


def run_mutant(name: str, scenario: Scenario) -> str:
    """What the oracle comparison says of a mutated run."""
    with MUTATIONS[name]():
        try:
            run_against_oracle(scenario)
        except AssertionError as e:
            return f"caught: {e}"
    return "not caught"


@pytest.mark.parametrize(
    ("name", "world_size", "optimizer"),
    [
        ("lose_a_write_back", 1, "adagrad"),
        ("swap_loads", 1, "sgd"),
        ("step_twice", 1, "adam"),
        ("sum_in_reverse", 3, "sgd"),
        ("route_by_id", 1, "sgd"),
    ],
)
def test_oracle_catches(pools: dict[int, RankPool], name: str, world_size: int, optimizer: str) -> None:
    scenario = Scenario(steps=40, optimizer=optimizer, batch_size=5 if world_size > 2 else 8, ids_per_table=200)
    results = pools[world_size].run(run_mutant, name, scenario)
    assert any(r.startswith("caught") for r in results), results


def run_refusal_mutant(name: str, function: str) -> bool:
    """Whether the mutated refusal run still looks right. An error leaves the job: the other ranks may wait for it."""
    with MUTATIONS[name]():
        if function == "refuse":
            result = refuse_one("float ids", 1)
            return bool(result["unchanged"] and result["goes on"])
        result = forward_only("abandoned")
        return result["pins"] == 0 and bool(result["goes on"])


@pytest.mark.parametrize(("name", "function"), [("no_undo", "refuse"), ("forget_abandoned", "abandon")])
def test_refusal_tests_catch(pool_2: RankPool, name: str, function: str) -> None:
    try:
        results = pool_2.run(run_refusal_mutant, name, function)
    except RankFailure:
        return
    assert not all(results)
