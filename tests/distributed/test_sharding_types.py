"""Row-wise, table-wise and column-wise tables in one collection: bit for bit what plain tables do."""

from __future__ import annotations

import pytest

from tests.distributed.oracle import Table
from tests.distributed.scenario import Scenario, run_against_oracle
from tests.ranks import RankPool

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
