"""From what is known of the data to the configs of the hashed tables."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from examples.little_demo.batch import TableFacts, expected_distinct
from examples.little_demo.model import EMBEDDING_DIM
from hybridrec import HashEmbeddingBagConfig

MOST_DEVICE_ROWS = 65_536
"""Of one table on one rank, as long as its batches fit: the demo is to be a good neighbour."""


def build_tables(
    facts: Sequence[TableFacts], *, batch_size: int, world_size: int, depth: int, seed: int
) -> list[HashEmbeddingBagConfig]:
    """One hashed table a feature.

    Args:
        facts: One entry a table.
        batch_size: Rows of a batch, over all ranks.
        world_size: Number of ranks.
        depth: Batches in flight.
        seed: Of the initial rows.
    """
    return [
        HashEmbeddingBagConfig(
            name=table.feature,
            feature_names=[table.feature],
            embedding_dim=EMBEDDING_DIM,
            num_embeddings=10**12,  # nominal: nothing is allocated for it, and ids are not bounded by it
            pooling=table.pooling,
            # (hybridrec) The rows that will really live, so that the planner accounts those.
            planned_rows=table.planned_rows,
            # (hybridrec) Of most tables only a part stays on the device.
            device_rows=choose_device_rows(table, batch_size, world_size, depth) if table.is_cached else None,
            seed=seed,
        )
        for table in facts
    ]


def choose_device_rows(table: TableFacts, batch_size: int, world_size: int, depth: int) -> int:
    """Rows of one table that a rank keeps on its device: a quarter of its share, so that rows really have to move.

    But about as many as the batches in flight need, so that they do not wait for each other's rows, and never fewer
    than one batch needs: a rank owns U / W of the batch's U distinct rows, give or take sqrt(U / W) by chance. Five
    times that is never exceeded in practice.
    """
    quarter = min(math.ceil(table.planned_rows / world_size / 4), MOST_DEVICE_ROWS)
    one_batch = _distinct(table, batch_size) / world_size
    return max(
        quarter,
        math.ceil(_distinct(table, depth * batch_size) / world_size),
        math.ceil(one_batch + 5 * math.sqrt(one_batch)),
    )


def _distinct(table: TableFacts, num_rows: int) -> float:
    """How many different ids so many rows have on average, or at most if only a sample of the ids is known."""
    if table.is_sample:  # later batches may hold what the sample lacks
        return float(min(num_rows, max(table.planned_rows, len(torch.unique(table.ids)))))
    return expected_distinct(table.ids, num_rows)
