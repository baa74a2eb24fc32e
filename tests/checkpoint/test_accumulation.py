"""Snapshots while gradients are accumulated: they are as of the last step, and a run goes on as if uninterrupted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hybridrec.checkpoint import Checkpointer, save
from tests.checkpoint.runs import records_of
from tests.distributed.pipelines import all_batches, build_pipelined, mine
from tests.distributed.scenario import Scenario
from tests.ranks import RankPools

SCENARIO = Scenario(steps=16, ids_per_table=100, cache="all")
BATCHES_A_STEP = 4


def run(path: Path, *, at: int | None = None, every: int | None = None) -> dict[str, Any]:
    """Train to the end from the newest snapshot, and save after so many batches, in the middle of a step or not."""
    batches = all_batches(SCENARIO)
    dmp, pipeline = build_pipelined(SCENARIO, batches, 3, accumulation_steps=BATCHES_A_STEP)
    losses, seen = [], []
    with Checkpointer(path, dmp, pipeline._optimizer, pipeline, every=every, keep=100) as checkpointer:
        first = checkpointer.resume()
        iterator = iter(mine(SCENARIO, batches[first:]))
        for number in range(first, SCENARIO.steps):
            losses.append(pipeline.progress(iterator).item())
            checkpointer.after_batch()
            seen.append(len(list(path.glob("step_*"))))
            if number + 1 == at:
                save(path, dmp, pipeline._optimizer, pipeline=pipeline)
    return {"first": first, "losses": losses, "records": records_of(dmp), "seen": seen}


@pytest.mark.parametrize(("world_size", "at"), [(1, 4), (1, 6), (2, 7)])
def test_it_goes_on_from_the_last_step(pools: RankPools, tmp_path: Path, world_size: int, at: int) -> None:
    """Scores included: what is evicted later depends on them."""
    expected = pools[world_size].run(run, tmp_path, at=at)
    for before, after in zip(expected, pools[world_size].run(run, tmp_path), strict=True):
        assert after["first"] == 4 and after["losses"] == before["losses"][4:]
        assert after["records"] == before["records"]


def test_batches_between_snapshots_are_counted_over_steps(pools: RankPools, tmp_path: Path) -> None:
    """Every 6 batches: after the step at 8 and that at 12; none before the first step, none twice."""
    (result,) = pools[1].run(run, tmp_path, every=6)
    assert result["seen"] == [0] * 7 + [1] * 4 + [2] * 5
    assert sorted(p.name for p in tmp_path.glob("step_*")) == ["step_000000000008", "step_000000000012"]
