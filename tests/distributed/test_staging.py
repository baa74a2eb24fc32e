"""The way of a device whose memory the host core cannot touch: rows go through staging buffers, both ways."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from hybridrec.backend import resolve_backend
from hybridrec.cache.swap import StagedSwapper
from hybridrec.distributed import sharder
from tests.distributed.scenario import Scenario, build, make_batch, run_against_oracle, to_kjt
from tests.ranks import RankPool


class Remote:
    """The host's backend, claiming that slots are out of the core's reach."""

    is_host_memory = False

    def __init__(self) -> None:
        self._host = resolve_backend("cpu")

    def __getattr__(self, name: str) -> Any:
        return getattr(self._host, name)


def staged_run(scenario: Scenario) -> dict[str, object]:
    with mock.patch.object(sharder, "resolve_backend", lambda device_type: Remote()):
        return run_against_oracle(scenario)


@pytest.mark.parametrize("optimizer", ["rowwise_adagrad", "adam"])
@pytest.mark.parametrize("world_size", [1, 2])
def test_staged_rows_equal_the_oracle(pools: dict[int, RankPool], world_size: int, optimizer: str) -> None:
    scenario = Scenario(cache="minimum", optimizer=optimizer, steps=60)
    for result in pools[world_size].run(staged_run, scenario):
        assert all(s.loads > 0 and s.write_backs > 0 for s in result["stats"])


def eval_after_staged_training() -> bool:
    with mock.patch.object(sharder, "resolve_backend", lambda device_type: Remote()):
        scenario = Scenario(steps=20)
        dmp, optimizer = build(scenario, {"user": 40, "item": 60, "word": 40})
        assert isinstance(dmp.module.ebc._lookups[0].log.swapper, StagedSwapper)
        for step in range(10):
            batch = make_batch(scenario, step, dist.get_rank(), dist.get_world_size())
            optimizer.zero_grad()
            dmp(to_kjt(scenario, batch), batch.labels).backward()
            optimizer.step()
        batch = make_batch(scenario, 4, dist.get_rank(), dist.get_world_size())
        dmp.eval()  # first, so that some of its rows are read from the store and some from slots
        read = dmp(to_kjt(scenario, batch), batch.labels)
        dmp.train()
        trained = dmp(to_kjt(scenario, batch), batch.labels)
        return torch.equal(read.detach(), trained.detach())


def test_eval_reads_both_tiers(pool_2: RankPool) -> None:
    assert pool_2.run(eval_after_staged_training) == [True, True]
