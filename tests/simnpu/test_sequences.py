"""Sequences on the simulated NPU: the oracle's bits, and no two accesses unordered."""

from __future__ import annotations

import pytest

from tests.distributed.pipelines import run_pipeline_against_oracle
from tests.distributed.scenario import Scenario, run_against_oracle
from tests.distributed.test_sequence_oracle import COLUMNS, SEQUENCES
from tests.ranks import RankPool


@pytest.mark.parametrize(
    ("world_size", "depth", "cache", "optimizer", "dedups"),
    [(1, 0, "minimum", "adam", False), (2, 0, "below", "adagrad", True), (2, 3, "tenth", "sgd", True)],
)
def test_oracle(
    npu_pools: dict[int, RankPool], world_size: int, depth: int, cache: str, optimizer: str, dedups: bool
) -> None:
    """Depth 0: a plain loop."""
    scenario = Scenario(
        is_sequence=True,
        tables=SEQUENCES,
        cache=cache,
        optimizer=optimizer,
        dedups=dedups,
        steps=15,
        device="npu",
    )
    if depth:
        npu_pools[world_size].run(run_pipeline_against_oracle, scenario, depth, delay_seed=depth)
    else:
        npu_pools[world_size].run(run_against_oracle, scenario)


@pytest.mark.parametrize("depth", [0, 3])
def test_columns(npu_pools: dict[int, RankPool], depth: int) -> None:
    """Rows of several widths."""
    scenario = Scenario(is_sequence=True, tables=COLUMNS, optimizer="adam", steps=12, batch_size=5, device="npu")
    if depth:
        npu_pools[2].run(run_pipeline_against_oracle, scenario, depth, delay_seed=depth)
    else:
        npu_pools[2].run(run_against_oracle, scenario)
