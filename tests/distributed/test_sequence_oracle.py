"""G1 for sequences: losses, rows and states are, bit for bit, those of plain unlimited tables, after every step."""

from __future__ import annotations

import pytest

from tests.distributed.oracle import Table
from tests.distributed.pipelines import run_pipeline_against_oracle
from tests.distributed.scenario import Scenario, run_against_oracle
from tests.ranks import RankPool

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
