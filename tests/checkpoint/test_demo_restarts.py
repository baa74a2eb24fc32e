"""`torchrun --max-restarts`: a job whose ranks are killed goes on by itself, ends with status 0 and the same bits."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import pytest

from tests.checkpoint import struck_loop
from tests.checkpoint.jobs import end_of, start, start_demo, strikes_in, times_trained, uninterrupted
from tests.checkpoint.strikes import Strike
from tests.checkpoint.struck_loop import EVERY, SCENARIO
from tests.checkpoint.test_demo_kills import OPTIONS
from tests.ranks import RankPools


def test_the_documented_loop_goes_on_by_itself(pools: RankPools, tmp_path: Path) -> None:
    expected = pools[2].run(struck_loop.run, tmp_path / "other_snapshots")
    strikes = [Strike(stage="commit", number=3 * EVERY - 1, when=0.5, rank=1)]
    arguments = [str(tmp_path), json.dumps([asdict(s) for s in strikes]), str(tmp_path / "snapshots")]
    job = start(tmp_path, "tests.checkpoint.struck_loop", arguments, max_restarts=1)
    assert job.wait() == 0, job.log()
    assert len(strikes_in(tmp_path)) == 1
    for before, after in zip(expected, end_of(tmp_path, 2), strict=True):
        assert {name: after[name] for name in before} == before and before["batches"] == SCENARIO.steps
        assert {len(losses) for losses in after["losses"].values()} == {1}  # again, and to the same bits
    again = times_trained(tmp_path)
    assert again[2 * EVERY] == 1 and again[2 * EVERY + 1] == 2, again


@pytest.mark.slow
def test_a_demo_that_is_killed_three_times_goes_on_by_itself(
    tmp_path_factory: pytest.TempPathFactory, tmp_path: Path
) -> None:
    expected = uninterrupted(tmp_path_factory.getbasetemp(), 2, *OPTIONS)
    strikes = [
        Strike(stage="commit", number=15, when=0.5, rank=1),
        Strike(stage="rows", number=5, when=0.0, rank=0, restart=1),
        Strike(stage="map", number=24, when=1.0, rank=0, target="all", restart=2),
    ]
    job = start_demo(tmp_path / "job", tmp_path / "snapshots", *OPTIONS, strikes=strikes, max_restarts=3)
    assert job.wait() == 0, job.log()
    assert [hit["stage"] for hit in strikes_in(tmp_path / "job")] == ["commit", "rows", "map"]
    assert end_of(tmp_path / "job", 2) == expected
