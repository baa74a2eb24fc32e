"""G1 for sequences: losses, rows and states are, bit for bit, those of plain unlimited tables, after every step."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from hybridrec.debug import verified
from tests.distributed.oracle import Table
from tests.distributed.pipelines import run_pipeline_against_oracle
from tests.distributed.scenario import Scenario, build, make_batch, run_against_oracle, state_of, to_kjt
from tests.ranks import RankFailure, RankPool

SEQUENCES = (
    Table(name="user", dim=8, features=("user",)),
    Table(name="item", dim=8, features=("clicked", "bought"), seed=3),
)
ODD_DIM = (Table(name="item", dim=5, features=("clicked", "bought")), Table(name="word", dim=5, features=("word",)))
"""Not a multiple of 4: another kernel on the host."""

# (W, cache, optimizer, dedups): with the rest, every pair of values occurs.
PLAIN = [
    (1, "tenth", "sgd", False),
    (2, "below", "rowwise_adagrad", True),
    (3, "minimum", "adagrad", True),
    (2, "all", "adam", False),
]
PLAIN_REST = [
    (1, "all", "adam", False),
    (1, "minimum", "rowwise_adagrad", False),
    (1, "below", "adagrad", False),
    (2, "all", "sgd", True),
    (2, "tenth", "adam", True),
    (2, "minimum", "adagrad", False),
    (3, "all", "rowwise_adagrad", False),
    (3, "tenth", "adagrad", True),
    (3, "minimum", "sgd", True),
    (3, "below", "adam", False),
]


@pytest.mark.parametrize(
    ("world_size", "cache", "optimizer", "dedups"),
    [*PLAIN, *(pytest.param(*case, marks=pytest.mark.slow) for case in PLAIN_REST)],
)
def test_plain_loop(pools: dict[int, RankPool], world_size: int, cache: str, optimizer: str, dedups: bool) -> None:
    scenario = Scenario(
        is_sequence=True, tables=SEQUENCES, cache=cache, optimizer=optimizer, dedups=dedups, steps=30, batch_size=6
    )
    for result in pools[world_size].run(run_against_oracle, scenario):
        if cache == "below":
            assert sum(s.oversized for s in result["stats"]) > 0
        elif cache != "all":
            assert all(s.write_backs > 0 and s.loads > 0 for s in result["stats"])


OWNED = (
    Table(name="user", dim=8, features=("user",), owners=((8, 1),)),
    Table(name="item", dim=8, features=("clicked", "bought"), seed=3),
    Table(name="word", dim=8, features=("word",), owners=((8, 1),)),
)


@pytest.mark.parametrize(
    ("tables", "world_size", "dedups"), [(OWNED, 2, True), (OWNED, 3, False), (OWNED[:1], 3, True)]
)
def test_tables_on_single_ranks(
    pools: dict[int, RankPool], tables: tuple[Table, ...], world_size: int, dedups: bool
) -> None:
    """Table-wise, beside a row-wise table and alone, so that two ranks have no rows."""
    scenario = Scenario(is_sequence=True, tables=tables, dedups=dedups, steps=25, batch_size=6, ids_per_table=300)
    for result in pools[world_size].run(run_against_oracle, scenario):
        assert all(s.victims > 0 for s in result["stats"] if s.rows)


@pytest.mark.parametrize("kernel", ["fused", "fused_uvm"])
def test_other_placements(pools: dict[int, RankPool], kernel: str) -> None:
    scenario = Scenario(is_sequence=True, tables=SEQUENCES, kernel=kernel, cache="default", optimizer="adam", steps=20)
    pools[1].run(run_against_oracle, scenario)
    for result in pools[2].run(run_pipeline_against_oracle, scenario, 3, delay_seed=1):
        assert all(s.rows > 0 for s in result["stats"])


COLUMNS = (
    Table(name="user", dim=8, features=("user",), owners=((2, 1), (2, 0), (4, 1))),
    Table(name="item", dim=8, features=("clicked", "bought"), seed=3),
    Table(name="word", dim=8, features=("word",), owners=((8, 0),)),
    Table(name="shop", dim=8, features=("shop", "linked"), owners=((4, 2), (4, 1))),
)
"""Parts of several widths, two of one table on one rank."""


@pytest.mark.parametrize(
    ("tables", "world_size", "cache", "optimizer", "dedups"),
    [
        (COLUMNS, 1, "minimum", "adam", False),
        (COLUMNS, 2, "below", "adagrad", True),
        (COLUMNS, 3, "minimum", "adam", False),
        (COLUMNS[:1], 3, "minimum", "adagrad", True),
    ],
)
def test_columns_on_single_ranks(
    pools: dict[int, RankPool],
    tables: tuple[Table, ...],
    world_size: int,
    cache: str,
    optimizer: str,
    dedups: bool,
) -> None:
    """Column-wise, beside row-wise and table-wise tables, and alone, so that a rank has no rows."""
    scenario = Scenario(
        is_sequence=True,
        tables=tables,
        cache=cache,
        optimizer=optimizer,
        dedups=dedups,
        steps=20,
        batch_size=5,
        ids_per_table=150,
    )
    for result in pools[world_size].run(run_against_oracle, scenario):
        assert all(s.victims > 0 or s.oversized > 0 for s in result["stats"] if s.rows)


@pytest.mark.parametrize(("world_size", "depth", "cache"), [(2, 3, "minimum"), (3, 6, "below")])
def test_columns_in_a_pipeline(pools: dict[int, RankPool], world_size: int, depth: int, cache: str) -> None:
    scenario = Scenario(
        is_sequence=True,
        tables=COLUMNS,
        cache=cache,
        optimizer="adam",
        dedups=world_size == 3,
        steps=20,
        batch_size=5,
        ids_per_table=150,
    )
    pools[world_size].run(run_pipeline_against_oracle, scenario, depth)


@pytest.mark.parametrize(
    ("world_size", "depth", "cache", "optimizer", "dedups"),
    [
        (1, 3, "below", "adam", False),
        (1, 12, "minimum", "sgd", False),
        (2, 1, "tenth", "rowwise_adagrad", True),
        (2, 3, "minimum", "adagrad", False),
        (2, 12, "below", "adagrad", True),
        (3, 3, "all", "sgd", True),
        (3, 12, "tenth", "adam", False),
    ],
)
def test_pipeline(
    pools: dict[int, RankPool], world_size: int, depth: int, cache: str, optimizer: str, dedups: bool
) -> None:
    scenario = Scenario(
        is_sequence=True,
        tables=ODD_DIM if cache == "tenth" else SEQUENCES,
        cache=cache,
        optimizer=optimizer,
        dedups=dedups,
        steps=30,
        batch_size=5,
    )
    for result in pools[world_size].run(run_pipeline_against_oracle, scenario, depth, delay_seed=depth):
        assert result["asked"] == scenario.steps + 1
        assert [(c.is_hashed, c.is_prefetched) for c in result["report"].collections] == [(True, True)]
        if cache == "below":
            assert sum(s.oversized for s in result["stats"]) > 0
        elif cache != "all":
            assert all(s.write_backs > 0 and s.loads > 0 for s in result["stats"])


def test_columns_with_row_wise_state_are_refused(pool_2: RankPool) -> None:
    scenario = Scenario(is_sequence=True, tables=COLUMNS[:1], optimizer="rowwise_adagrad", steps=1)
    with pytest.raises(RankFailure, match="'user'.*cannot be sharded 'column_wise'.*one value a row"):
        pool_2.run(run_against_oracle, scenario)


def train_beside_frozen_columns() -> None:
    """What does not train gives the rows that it has, beside rows of other widths that train, and keeps them."""
    scenario = Scenario(is_sequence=True, tables=COLUMNS, steps=6, batch_size=5, ids_per_table=60)
    rank, world_size = dist.get_rank(), dist.get_world_size()
    batches = [make_batch(scenario, step, rank, world_size) for step in range(6)]
    dmp, optimizer = build(scenario, {table.name: 60 for table in COLUMNS})
    parts = [part.table.name for part in sorted(dmp.module.ebc.parts, key=lambda p: p.table.name != "user")]
    for step, batch in enumerate(batches):
        features = to_kjt(scenario, batch)
        if step == 3:
            for name, parameter in dmp.module.ebc.named_parameters():
                parameter.requires_grad_(".user." not in name)
            before = state_of(dmp)
        with torch.no_grad():
            dmp.eval()
            expected = dmp(features, batch.labels)
        dmp.train()
        optimizer.zero_grad()
        loss = dmp(features, batch.labels)
        assert torch.equal(loss, expected)
        loss.backward()
        optimizer.step()
    for name, old, new in zip(parts, before, state_of(dmp), strict=True):
        is_same = old.keys() == new.keys() and all(old[i].tobytes() == new[i].tobytes() for i in old)
        assert is_same == (name == "user"), name


def test_frozen_columns(pool_2: RankPool) -> None:
    pool_2.run(train_beside_frozen_columns)


def shadowed_columns() -> None:
    scenario = Scenario(is_sequence=True, tables=COLUMNS, steps=3, batch_size=5, ids_per_table=60)
    dmp, optimizer = build(scenario, {table.name: 60 for table in COLUMNS})
    with verified(dmp.module.ebc) as result:
        for step in range(3):
            batch = make_batch(scenario, step, dist.get_rank(), dist.get_world_size())
            optimizer.zero_grad()
            dmp(to_kjt(scenario, batch), batch.labels).backward()
            optimizer.step()
    assert result.difference is None and result.steps == 3 and result.rows > 20


def test_columns_are_verified(pool_2: RankPool) -> None:
    pool_2.run(shadowed_columns)
