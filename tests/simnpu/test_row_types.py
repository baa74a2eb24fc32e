"""Rows of 16 bits on the simulated NPU: the oracle's bits."""

from __future__ import annotations

import pytest

from tests.distributed.pipelines import run_pipeline_against_oracle
from tests.distributed.scenario import Scenario, run_against_oracle
from tests.distributed.test_row_types import SEQUENCES, TABLES
from tests.ranks import RankPool


@pytest.mark.parametrize(
    ("world_size", "depth", "cache", "optimizer", "is_sequence"),
    [(1, 0, "below", "adam", False), (2, 3, "minimum", "rowwise_adagrad", False), (2, 3, "tenth", "adagrad", True)],
)
def test_oracle(
    npu_pools: dict[int, RankPool], world_size: int, depth: int, cache: str, optimizer: str, is_sequence: bool
) -> None:
    """Depth 0: a plain loop."""
    scenario = Scenario(
        tables=SEQUENCES if is_sequence else TABLES,
        is_sequence=is_sequence,
        cache=cache,
        optimizer=optimizer,
        steps=15,
        ids_per_table=300,
        device="npu",
    )
    if depth:
        npu_pools[world_size].run(run_pipeline_against_oracle, scenario, depth, delay_seed=depth)
    else:
        npu_pools[world_size].run(run_against_oracle, scenario)
