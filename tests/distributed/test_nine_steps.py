"""The user's script runs unchanged but for the device, and gives the bits of its plain loop."""

from __future__ import annotations

import dataclasses
import multiprocessing.process

import pytest
import torch

from tests.distributed.nine_steps import Script, run
from tests.ranks import RankPools


def same(script: Script) -> tuple[bool, int, list[bool]]:
    """Whether the pipeline's results are the plain loop's; batches; which tables had all rows on the device."""
    allow_workers()
    expected, _, _ = run(dataclasses.replace(script, use_pipeline=False))
    results, stats, _ = run(script)
    equal = len(results) == len(expected) and all(map(torch.equal, results, expected))
    assert all(s.pins == 0 for s in stats)
    return equal, len(results), [s.write_backs == 0 for s in stats]


@pytest.mark.parametrize("constrained", [False, True])
@pytest.mark.parametrize("world_size", [1, 2])
def test_nine_steps(pools: RankPools, world_size: int, constrained: bool) -> None:
    script = Script(device="cpu", constrained=constrained, device_as_str=constrained)
    for equal, num_batches, is_resident in pools[world_size].run(same, script):
        assert equal and num_batches == 24 and all(is_resident)


@pytest.mark.parametrize("constrained", [False, True])
@pytest.mark.parametrize("world_size", [1, 2])
def test_nine_steps_on_the_simulated_npu(npu_pools: RankPools, world_size: int, constrained: bool) -> None:
    script = Script(device="npu", constrained=constrained, device_as_str=constrained, epochs=1)
    for equal, num_batches, is_resident in npu_pools[world_size].run(same, script):
        assert equal and num_batches == 12 and all(is_resident)


def allow_workers() -> None:
    """The ranks of a pool are daemons, which may have no children; a loader has two."""
    multiprocessing.process.current_process()._config["daemon"] = False


def copied_once(device: str) -> None:
    allow_workers()
    host, _, none = run(Script(device=device, epochs=1))
    on_device, _, copied = run(Script(device=device, epochs=1, ids_on_device=True))
    assert all(map(torch.equal, host, on_device))
    assert none == 0 and copied > 0


def test_ids_that_come_on_the_device_are_copied_once_and_metered(npu_pools: RankPools) -> None:
    npu_pools[2].run(copied_once, "npu")
