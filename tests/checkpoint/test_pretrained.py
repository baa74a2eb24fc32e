"""Rows that were trained elsewhere come into a sharded model by id."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from hybridrec import ConfigError, StateError, checkpoint
from tests.checkpoint.runs import Records, build, records_of
from tests.distributed.oracle import owner
from tests.distributed.pipelines import all_batches, mine
from tests.distributed.scenario import Scenario
from tests.distributed.test_sharding_types import MIXED
from tests.ranks import RankPools

SCENARIO = Scenario(optimizer="adam", steps=4, ids_per_table=40, tables=MIXED)
IDS = (0, -1, 2**63 - 1, -(2**63), *range(100, 130))


def rows_of(dim: int) -> torch.Tensor:
    return torch.arange(len(IDS) * dim, dtype=torch.float32).view(len(IDS), dim)


def import_into(scenario: Scenario, steps: int) -> tuple[Records, int]:
    dmp, pipeline = build(scenario)
    batches = iter(mine(scenario, all_batches(scenario)))
    for _ in range(steps):
        pipeline.progress(batches)
    for table in scenario.tables:
        for part in torch.arange(len(IDS)).split(20):
            ids = torch.tensor(IDS)[part]
            checkpoint.import_rows(dmp, table.name, ids, rows_of(table.dim)[part])
    records, ordinal = records_of(dmp), dmp.module.ebc.lookup.log.group.ordinal
    for _ in range(2):
        pipeline.progress(batches)
    return records, ordinal


@pytest.mark.parametrize("steps", [0, 2])
def test_rows_are_where_they_belong_with_new_states(pools: RankPools, steps: int) -> None:
    found = pools[2].run(import_into, SCENARIO, steps)
    weights = {table.name: rows_of(table.dim) for table in MIXED}
    for rank, (records, ordinal) in enumerate(found):
        assert ordinal == max(1, steps)
        for i, id_ in enumerate(IDS):
            for table in ("user", "site"):  # row-wise
                assert (id_ in records[table]) == (owner(id_, 2) == rank)
            for name, rows in records.items():
                if id_ not in rows:
                    continue
                table, _, columns = name.partition("[")
                first, last = map(int, columns[:-1].split(":")) if columns else (0, weights[table].shape[1])
                expected = torch.cat([weights[table][i, first:last], torch.zeros(2 * (last - first))])
                assert rows[id_] == (expected.numpy().tobytes(), ordinal)
    everything = {name for records, _ in found for name, rows in records.items() if set(IDS) <= set(rows)}
    assert everything == {"page", "item[0:4]", "item[4:8]", "word", "town[0:3]", "town[3:4]", "town[4:9]"}


def wrong_imports(scenario: Scenario) -> list[str]:
    dmp, pipeline = build(scenario)
    ids = torch.tensor(IDS)
    last = dist.get_rank() == dist.get_world_size() - 1
    messages = []
    for table, wrong_ids, rows in (
        ("users", ids, rows_of(8)),
        ("user", ids, rows_of(4) if last else rows_of(8)),
        ("user", ids.int(), rows_of(8)),
    ):
        try:
            checkpoint.import_rows(dmp, table, wrong_ids, rows)
        except ConfigError as e:
            messages.append(str(e))
    loss = dmp(mine(scenario, all_batches(scenario)[:1])[0])[0]
    try:
        checkpoint.import_rows(dmp, "user", ids, rows_of(8))
    except StateError as e:
        messages.append(str(e))
    loss.backward()
    return messages


def test_wrong_rows_are_refused_on_all_ranks(pools: RankPools) -> None:
    found: list[Any] = pools[2].run(wrong_imports, SCENARIO)
    assert found[0] == found[1]
    assert "no collection has the table 'users'. Tables: ['item', 'page'" in found[0][0]
    assert "[34, 4] on cpu. Accepted: float32 [34, 8] in host memory: the embedding_dim of table 'user'." in found[0][1]
    assert "ids are torch.int32 [34]" in found[0][2]
    assert "batches are in flight (1)" in found[0][3]
