"""`export_rows` of sharded collections, alone and while a pipeline prepares batches to come."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from hybridrec.distributed.sharded_embedding_bag import ShardedHashEmbeddingBagCollection
from tests.distributed.oracle import owner
from tests.distributed.pipelines import all_batches, build_pipelined, mine
from tests.distributed.scenario import Scenario, state_of
from tests.ranks import RankPools


def exported(ebc: ShardedHashEmbeddingBagCollection) -> list[dict[int, list[float]]]:
    """As `state_of`, out of chunks of three rows; what is read is asked to be in order, and this rank's."""
    tables = []
    for config in ebc.embedding_bag_configs():
        rows: dict[int, list[float]] = {}
        for chunk in ebc.export_rows(config.name, chunk_rows=3):
            parts = [chunk.weights_ND, *(s if s.dim() == 2 else s.unsqueeze(1) for s in chunk.states.values())]
            rows |= zip(chunk.ids_N.tolist(), torch.cat(parts, 1).tolist(), strict=True)
        if list(rows) != sorted(rows) or any(owner(i, dist.get_world_size()) != dist.get_rank() for i in rows):
            raise AssertionError(f"table {config.name}: {list(rows)}")
        tables.append(rows)
    return tables


def export_beside_a_pipeline(scenario: Scenario, depth: int) -> int:
    batches = all_batches(scenario)
    dmp, pipeline = build_pipelined(scenario, batches, depth)
    iterator = iter(mine(scenario, batches))
    num_rows = 0
    for step in range(scenario.steps):
        pipeline.progress(iterator)
        if step % 3 == 0:
            rows = exported(dmp.module.ebc)  # takes back what the pipeline prepared
            expected = [{i: record.tolist() for i, record in t.items()} for t in state_of(dmp)]
            if rows != expected:
                raise AssertionError(f"step {step}: {rows} is not {expected}")
            if any(max(_scores(dmp.module.ebc, t), default=0) > step + 1 for t in range(len(rows))):
                raise AssertionError("scores of batches that are not committed")
            num_rows += sum(map(len, rows))
    return num_rows


def _scores(ebc: ShardedHashEmbeddingBagCollection, table: int) -> list[int]:
    _, _, scores, _, _ = ebc.lookup.log.group.entries(table)
    return list(scores)


@pytest.mark.parametrize(("world_size", "depth", "optimizer"), [(1, 3, "adam"), (2, 4, "rowwise_adagrad")])
def test_an_export_is_what_the_committed_batches_left(
    pools: RankPools, world_size: int, depth: int, optimizer: str
) -> None:
    scenario = Scenario(optimizer=optimizer, steps=13, ids_per_table=40)
    found: list[Any] = pools[world_size].run(export_beside_a_pipeline, scenario, depth)
    assert all(n > 40 for n in found)
