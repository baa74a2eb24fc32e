"""Row-wise, table-wise and column-wise tables in one collection: bit for bit what plain tables do."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist
from torch import Tensor

from hybridrec import ConfigError
from hybridrec.debug import verified, where
from hybridrec.distributed import output_dist, sharder
from hybridrec.distributed.input_dist import Router
from hybridrec.distributed.output_columns import OutputColumns
from tests.distributed.oracle import Table
from tests.distributed.pipelines import run_pipeline_against_oracle
from tests.distributed.scenario import TABLES, Scenario, build, device_rows, make_batch, run_against_oracle, to_kjt
from tests.distributed.test_uneven_ranks import one_epoch
from tests.distributed.test_vbe import train_variable
from tests.ranks import RankFailure, RankPool

MIXED = (
    Table(name="user", dim=8, features=("user",)),
    Table(name="page", dim=8, features=("page",), owners=((8, 1),)),
    Table(name="item", dim=8, features=("clicked", "bought"), is_mean=True, seed=3, owners=((4, 1), (4, 0))),
    Table(name="word", dim=5, features=("word",), is_mean=True, owners=((5, 0),)),
    Table(name="site", dim=4, features=("site", "linked"), is_mean=True),
    Table(name="town", dim=9, features=("town",), seed=5, owners=((3, 1), (1, 2), (5, 1))),
)


def check(pool: RankPool, scenario: Scenario) -> None:
    for rank, result in enumerate(pool.run(run_against_oracle, scenario)):
        assert [s.table for s in result["stats"]] == [t.name for t in scenario.tables]
        for table, s in zip(scenario.tables, result["stats"], strict=True):
            assert s.rank == rank
            if not table.owners:
                assert s.rows > 0
            if s.rows and scenario.cache != "all":
                assert (s.victims > 0 and s.loads > 0) or s.oversized > 0


@pytest.mark.parametrize(
    ("world_size", "cache", "optimizer", "is_weighted"),
    [
        (1, "minimum", "adagrad", False),
        (2, "minimum", "adam", True),
        (2, "all", "sgd", False),
        (3, "minimum", "adagrad", False),
    ],
)
def test_mixed(pools: dict[int, RankPool], world_size: int, cache: str, optimizer: str, is_weighted: bool) -> None:
    check(
        pools[world_size],
        Scenario(
            tables=MIXED,
            cache=cache,
            optimizer=optimizer,
            is_weighted=is_weighted,
            steps=30,
            batch_size=5,
            ids_per_table=200,
        ),
    )


@pytest.mark.parametrize(("world_size", "cache", "depth"), [(2, "below", 3), (3, "minimum", 12)])
def test_mixed_in_a_pipeline(pools: dict[int, RankPool], world_size: int, cache: str, depth: int) -> None:
    scenario = Scenario(tables=MIXED, cache=cache, optimizer="adam", steps=24, batch_size=5, ids_per_table=200)
    pools[world_size].run(run_pipeline_against_oracle, scenario, depth)


WHOLE_ROWS = tuple(t for t in MIXED if len(t.owners) < 2)
"""What may have one value a row."""


@pytest.mark.parametrize(("world_size", "depth"), [(2, 0), (3, 3)])
def test_row_wise_state_of_row_wise_and_table_wise_tables(
    pools: dict[int, RankPool], world_size: int, depth: int
) -> None:
    """Depth 0: a plain loop."""
    scenario = Scenario(tables=WHOLE_ROWS, optimizer="rowwise_adagrad", steps=24, batch_size=5, ids_per_table=200)
    if depth:
        pools[world_size].run(run_pipeline_against_oracle, scenario, depth)
    else:
        check(pools[world_size], scenario)


VARIABLE = (
    dataclasses.replace(TABLES[0], owners=((5, 1), (3, 0))),
    dataclasses.replace(TABLES[1], owners=((4, 1),)),
    TABLES[2],
)
"""The tables of the tests of variable batches, sharded otherwise."""


@pytest.mark.parametrize("depth", [None, 3])
def test_variable_batches(pool_2: RankPool, depth: int | None) -> None:
    """None: a plain loop."""
    scenario = Scenario(tables=VARIABLE, steps=15, ids_per_table=60)
    assert all(loads > 0 for loads in pool_2.run(train_variable, scenario, depth))


@pytest.mark.parametrize("uneven_ranks", ["stop", "drain"])
def test_ranks_with_different_numbers_of_batches_end_together(pool_2: RankPool, uneven_ranks: str) -> None:
    """The rank that ends first owns tables, and serves the other's batches."""
    scenario = Scenario(tables=MIXED, optimizer="adam", cache="tenth", steps=12, ids_per_table=200)
    pool_2.run(one_epoch, (7, 5), 3, uneven_ranks, True, True, scenario)


def one_id_a_bag(scenario: Scenario) -> list[float]:
    """Losses of this rank when every bag has one id, so that nothing is added over ranks."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    batches = [[make_batch(scenario, s, r, world_size) for r in range(world_size)] for s in range(scenario.steps)]
    for batch in (b for everyone in batches for b in everyone):
        for feature, bags in batch.bags.items():
            batch.bags[feature] = [bag[:1] or [(7, 1.0)] for bag in bags]
    slots = {t.name: device_rows(scenario, t, batches, world_size) for t in scenario.tables}
    dmp, optimizer = build(scenario, slots)
    losses = []
    for everyone in batches:
        optimizer.zero_grad()
        loss = dmp(to_kjt(scenario, everyone[rank]), everyone[rank].labels)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def test_sharding_types_give_the_same_bits(pool_2: RankPool) -> None:
    """With one id a bag the arithmetic is the same: losses of row-, table- and column-wise tables are equal."""
    losses = []
    for owners in ((), ((8, 1),), ((4, 1), (4, 0))):
        tables = tuple(Table(name=n, dim=8, features=(n,), owners=owners) for n in ("user", "item"))
        losses.append(pool_2.run(one_id_a_bag, Scenario(tables=tables, steps=20, batch_size=6, ids_per_table=100)))
    assert losses[0] == losses[1] == losses[2]
    assert len(set(losses[0][0])) > 10


def looked_at(scenario: Scenario) -> dict[str, Any]:
    """Training steps under a shadow, then where a row of some tables is."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    everyone = [make_batch(scenario, 0, r, world_size) for r in range(world_size)]
    dmp, optimizer = build(scenario, {t.name: 100 for t in scenario.tables})
    with verified(dmp.module.ebc) as result:
        for _ in range(3):
            optimizer.zero_grad()
            dmp(to_kjt(scenario, everyone[rank]), everyone[rank].labels).backward()
            optimizer.step()
    ids = {t.name: next(e[0] for b in everyone for bag in b.bags[t.features[0]] for e in bag) for t in scenario.tables}
    town = [where(dmp, "town", ids["town"], column=c) for c in (0, 3, 4)]
    page = where(dmp, "page", ids["page"])
    exported = [len(chunk.ids_N) for chunk in dmp.module.ebc.export_rows("page")]
    return {
        "rows": result.rows,
        "town": [(p.owner, p.columns, p.weights is None) for p in town],
        "page": (page.owner, page.columns, page.weights is None),
        "exported": sum(exported),
        "text": str(town[1]),
    }


def test_tools_know_the_owners(pool_2: RankPool) -> None:
    scenario = Scenario(tables=MIXED, batch_size=6, ids_per_table=100)
    for rank, seen in enumerate(pool_2.run(looked_at, scenario)):
        assert seen["rows"] > 0
        assert seen["town"] == [(1, (0, 2), rank != 1), (0, (3, 3), rank != 0), (1, (4, 8), rank != 1)]
        assert seen["page"] == (1, None, rank != 1)
        assert (seen["exported"] > 0) == (rank == 1)
        assert "columns 3 to 3" in seen["text"]


def other_plans() -> str:
    """Each rank has a plan of its own, with the other owner of the table."""
    other = Table(name="page", dim=8, features=("page",), owners=((8, 1 - dist.get_rank()),))
    try:
        build(Scenario(tables=(other,), ids_per_table=60), {"page": 60})
    except ConfigError as e:
        return str(e)
    return "no error"


def test_plans_that_differ_between_ranks_are_refused(pool_2: RankPool) -> None:
    first, second = pool_2.run(other_plans)
    assert first == second
    assert "name or place them otherwise" in first and "collective_plan" in first


@contextlib.contextmanager
def wrong_owner() -> Iterator[None]:
    """What one rank owns goes to the next one."""
    real = Router.__init__

    def shifted(self: Router, num_features: int, owned_features: Any) -> None:
        real(self, num_features, list(owned_features)[::-1])

    with mock.patch.object(Router, "__init__", shifted):
        yield


@contextlib.contextmanager
def no_column_offset() -> Iterator[None]:
    """Initial rows of every column shard begin at column 0."""
    real = sharder.ShardSpec
    with mock.patch.object(sharder, "ShardSpec", lambda **fields: real(**{**fields, "first_column": 0})):
        yield


@contextlib.contextmanager
def owned_twice() -> Iterator[None]:
    """Columns that one rank has alone are added to themselves."""
    real = output_dist._SumInRankOrder.forward

    def forward(ctx: Any, partial: Tensor, received: Tensor, layout: Any) -> Tensor:
        pooled = real(ctx, partial, received, layout)
        pooled[:, layout.shared :] *= 2
        return pooled

    with mock.patch.object(output_dist._SumInRankOrder, "forward", staticmethod(forward)):
        yield


@contextlib.contextmanager
def columns_swapped() -> Iterator[None]:
    """Column shards of a table come out in the other order."""
    real = OutputColumns.__init__

    def reversed_columns(self: OutputColumns, tables: Any, fed: Any, *more: Any) -> None:
        real(self, tables, [dataclasses.replace(p, first_column=-p.first_column) for p in fed], *more)

    with mock.patch.object(OutputColumns, "__init__", reversed_columns):
        yield


MUTATIONS: dict[str, Callable[[], contextlib.AbstractContextManager[None]]] = {
    f.__name__: f for f in (wrong_owner, no_column_offset, owned_twice, columns_swapped)
}


def run_mutant(name: str, scenario: Scenario) -> str:
    with MUTATIONS[name]():
        try:
            run_against_oracle(scenario)
        except AssertionError as e:
            return f"caught: {e}"
    return "not caught"


@pytest.mark.parametrize("name", ["no_column_offset", "owned_twice", "columns_swapped"])
def test_oracle_catches(pool_2: RankPool, name: str) -> None:
    tables = (
        Table(name="page", dim=8, features=("page",), owners=((8, 1),)),
        Table(name="shop", dim=8, features=("shop",), owners=((8, 0),)),
        Table(name="item", dim=8, features=("item",), owners=((4, 1), (4, 0))),
    )
    results = pool_2.run(run_mutant, name, Scenario(tables=tables, steps=4, batch_size=5, ids_per_table=60))
    assert all(result.startswith("caught") for result in results), results


def test_a_wrong_owner_is_caught(pool_2: RankPool) -> None:
    """Its ids are not looked up where their rows are: an error, or other losses than the oracle's."""
    tables = (
        Table(name="page", dim=8, features=("page", "linked"), owners=((8, 1),)),
        Table(name="shop", dim=8, features=("shop",), owners=((8, 0),)),
    )
    try:
        results = pool_2.run(run_mutant, "wrong_owner", Scenario(tables=tables, steps=4, ids_per_table=60))
    except RankFailure:
        return
    assert all(result.startswith("caught") for result in results), results
