"""Snapshots of tables whose slots the host cannot reach: the oracle's bits before and after."""

from __future__ import annotations

from pathlib import Path

from tests.checkpoint.runs import load_and_go_on, save_and_go_on
from tests.distributed.scenario import Scenario
from tests.ranks import RankPools

SCENARIO = Scenario(optimizer="adam", steps=9, ids_per_table=40, device="npu")


def test_a_run_goes_on_as_if_it_had_not_been_interrupted(npu_pools: RankPools, tmp_path: Path) -> None:
    saved = npu_pools[2].run(save_and_go_on, SCENARIO, tmp_path, 4)
    again = npu_pools[2].run(load_and_go_on, SCENARIO, tmp_path)
    for before, after in zip(saved, again, strict=True):
        assert before["records"] == after["records"] and all(before["records"].values())
        assert before["losses"][4:] == after["losses"]
        assert before["final"] == after["final"]
