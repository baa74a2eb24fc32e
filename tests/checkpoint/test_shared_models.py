"""A model that two pipelines train in turns, with evaluations between: it is saved and goes on like any other."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from hybridrec import HybridTrainPipelineSparseDist, checkpoint
from tests.checkpoint.runs import build, records_of
from tests.distributed.pipelines import all_batches, mine
from tests.distributed.scenario import Scenario
from tests.ranks import RankPools

SCENARIO = Scenario(optimizer="rowwise_adagrad", steps=40, ids_per_table=300, batch_size=2)
TURN, MAX_ROWS = 5, {1: 150, 2: 160}


class TwoPipelines:
    """Turns of some batches each; after each turn the model is evaluated, with batches of the future among them."""

    def __init__(self, max_rows: int) -> None:
        self.dmp, first = build(SCENARIO, 3, max_rows)
        device = torch.device(SCENARIO.device)
        self.optimizer = first._optimizer
        self.pipelines = [first, HybridTrainPipelineSparseDist(self.dmp, self.optimizer, device, pipe_n_batch=2)]
        self.batches = mine(SCENARIO, all_batches(SCENARIO))

    def train(self, first: int, last: int) -> list[float]:
        losses = []
        for turn in range(first // TURN, last // TURN):
            pipeline = self.pipelines[turn % 2]
            pipeline.attach()
            batches = iter(self.batches[turn * TURN : (turn + 1) * TURN])
            losses += [pipeline.progress(batches).item() for _ in range(TURN)]
            pipeline.detach()
            self.dmp.eval()
            with torch.no_grad():
                losses += [self.dmp(batch)[0].item() for batch in self.batches[(turn + 3) * TURN % 40 :][:2]]
            self.dmp.train()
        return losses


def save_between(path: Path, max_rows: int) -> dict[str, Any]:
    run = TwoPipelines(max_rows)
    run.train(0, 25)
    checkpoint.save(path, run.dmp, run.optimizer)
    saved = records_of(run.dmp)
    return {"saved": saved, "losses": run.train(25, 40), "rows": records_of(run.dmp)}


def load_between(path: Path, max_rows: int) -> dict[str, Any]:
    run = TwoPipelines(max_rows)
    run.train(0, 10)
    loaded = checkpoint.load(path, run.dmp, run.optimizer)
    saved = records_of(run.dmp)
    assert loaded.batches_committed == 25
    return {"saved": saved, "losses": run.train(25, 40), "rows": records_of(run.dmp)}


@pytest.mark.parametrize("world_size", [1, 2])
def test_two_pipelines_take_turns_before_and_after(pools: RankPools, tmp_path: Path, world_size: int) -> None:
    saved = pools[world_size].run(save_between, tmp_path, MAX_ROWS[world_size])
    assert pools[world_size].run(load_between, tmp_path, MAX_ROWS[world_size]) == saved
    assert all(set(one["saved"]["item"]) - set(one["rows"]["item"]) for one in saved)
