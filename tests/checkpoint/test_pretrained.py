"""Rows that were trained elsewhere come into a sharded model by id."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from hybridrec import ConfigError, StateError, checkpoint
from hybridrec.modules.hash_table import PROTECTED_BATCHES
from tests.checkpoint.runs import Records, build, records_of
from tests.distributed.oracle import mix64, owner
from tests.distributed.pipelines import all_batches, mine
from tests.distributed.scenario import Scenario
from tests.distributed.test_sharding_types import MIXED
from tests.ranks import RankPools

SCENARIO = Scenario(optimizer="adam", steps=4, ids_per_table=40, tables=MIXED)
IDS = (0, -1, 2**63 - 1, -(2**63), *range(100, 130))


def rows_of(dim: int) -> torch.Tensor:
    return torch.arange(len(IDS) * dim, dtype=torch.float32).view(len(IDS), dim)


def import_into(scenario: Scenario, steps: int) -> Records:
    dmp, pipeline = build(scenario)
    batches = iter(mine(scenario, all_batches(scenario)))
    for _ in range(steps):
        pipeline.progress(batches)
    for table in scenario.tables:
        for part in torch.arange(len(IDS)).split(20):
            ids = torch.tensor(IDS)[part]
            rows = rows_of(table.dim)[part]
            checkpoint.import_rows(dmp, table.name, *((ids, rows) if steps else (ids.tolist(), rows.numpy())))
    records, ordinal = records_of(dmp), dmp.module.ebc.lookup.log.group.ordinal
    assert ordinal == steps + 2 * len(scenario.tables) * (1 + PROTECTED_BATCHES)
    for _ in range(2):
        pipeline.progress(batches)
    return records


@pytest.mark.parametrize("steps", [0, 2])
def test_rows_are_where_they_belong_with_new_states(pools: RankPools, steps: int) -> None:
    found = pools[2].run(import_into, SCENARIO, steps)
    weights = {table.name: rows_of(table.dim) for table in MIXED}
    tables = [table.name for table in MIXED]
    for rank, records in enumerate(found):
        for i, id_ in enumerate(IDS):
            for table in ("user", "site"):  # row-wise
                assert (id_ in records[table]) == (owner(id_, 2) == rank)
            for name, rows in records.items():
                if id_ not in rows:
                    continue
                table, _, columns = name.partition("[")
                first, last = map(int, columns[:-1].split(":")) if columns else (0, weights[table].shape[1])
                expected = torch.cat([weights[table][i, first:last], torch.zeros(2 * (last - first))])
                chunk = 2 * tables.index(table) + i // 20
                assert rows[id_] == (expected.numpy().tobytes(), steps + chunk * (1 + PROTECTED_BATCHES) + 1)
    everything = {name for records in found for name, rows in records.items() if set(IDS) <= set(rows)}
    assert everything == {"page", "item[0:4]", "item[4:8]", "word", "town[0:3]", "town[3:4]", "town[4:9]"}


def import_beyond_the_quota(scenario: Scenario, steps: int) -> tuple[Records, Records, set[int]]:
    """Rows after the import of more than there may be, and after the next batch; the ids of that."""
    dmp, pipeline = build(scenario, 1, max_rows=30)
    everything = all_batches(scenario)
    batches = iter(mine(scenario, everything[: steps + 1]))
    for _ in range(steps):
        pipeline.progress(batches)
    pipeline._thread.settle()
    checkpoint.import_rows(dmp, "user", torch.tensor(IDS), rows_of(8))
    before = records_of(dmp)
    pipeline.progress(batches)
    pipeline._thread.settle()
    return before, records_of(dmp), {i for b in everything[steps] for bag in b.bags["user"] for i, _ in bag}


@pytest.mark.parametrize("steps", [0, 2])
def test_imported_rows_can_be_evicted_by_the_next_batch(pools: RankPools, steps: int) -> None:
    """Those that the model had go first."""
    scenario = Scenario(optimizer="adagrad", steps=4, ids_per_table=300, batch_size=3, tables=MIXED[:1])
    ((before, after, new),) = pools[1].run(import_beyond_the_quota, scenario, steps)
    rows = before["user"]
    in_order = sorted(rows, key=lambda i: (rows[i][1], mix64(i)))
    staying = [i for i in in_order if i not in new][-(30 - len(new)) :]
    assert set(after["user"]) == {*staying, *new} and len(staying) < len(rows)
    assert {rows[i][1] for i in IDS} == {max(score for _, score in rows.values())}


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
