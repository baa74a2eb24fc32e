"""What ranks do in the cases of checkpoints."""

from __future__ import annotations

import os
import random
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from hybridrec import checkpoint
from hybridrec.checkpoint import files
from hybridrec.store import row_export
from tests.checkpoint.runs import Records, build, records_of
from tests.distributed import scenario as scenarios
from tests.distributed.pipelines import all_batches, delays, mine
from tests.distributed.scenario import Scenario

EVICTING = Scenario(optimizer="rowwise_adagrad", steps=48, ids_per_table=300, batch_size=2)
MAX_ROWS = {1: 160, 2: 160, 3: 240}


def by_step(scenario: Scenario, max_rows: dict[int, int]) -> dict[str, Any]:
    """A run without snapshots and without batches in flight: its losses, and its rows after every step."""
    dmp, pipeline = build(scenario, 1, max_rows[dist.get_world_size()])
    batches, losses, records = iter(mine(scenario, all_batches(scenario))), [], {}
    for step in range(1, scenario.steps + 1):
        losses.append(pipeline.progress(batches).item())
        records[step] = records_of(dmp)
    return {"losses": losses, "records": records}


def snapshots_at_random_moments(
    scenario: Scenario, path: Path, max_rows: dict[int, int], seed: int
) -> tuple[dict[int, Records], list[float], int]:
    """The same run with batches in flight, delays in every stage, and snapshots that are written meanwhile.

    Returns:
        (step -> the rows that its snapshot gives back, losses, rows that left while a snapshot was being written)
    """
    rng, world_size = random.Random(seed), dist.get_world_size()
    dmp, pipeline = build(scenario, rng.randint(2, 5), max_rows[world_size])
    batches, group = iter(mine(scenario, all_batches(scenario))), dist.new_group(backend="gloo")
    losses, steps, evicted, saving, before, may_write = [], [], 0, None, 0, threading.Event()
    with pytest.MonkeyPatch.context() as patch, delays(seed):
        patch.setattr(row_export, "CHUNK_BYTES", 200)  # a few rows
        patch.setattr(files.HashedFile, "write", _slowly(files.HashedFile.write, seed, may_write))
        for step in range(1, scenario.steps + 1):
            losses.append(pipeline.progress(batches).item())
            now, dice = sum(s.evicted for s in dmp.module.ebc.stats()), rng.random()
            evicted += now - before if saving is not None and not saving.is_written else 0
            before = now
            may_write.set()  # a batch was trained beside it
            if saving is None and dice < 0.5:
                saving = checkpoint.Saving(path, dmp, pipeline._optimizer, pipeline=pipeline, group=group)
                may_write.clear()
                saving.start()
                steps.append(step)
            elif saving is not None and (dice < 0.3 or step == scenario.steps):
                saving.finish()
                saving = None
        if saving is not None:
            may_write.set()
            saving.finish()
    found, (again, other) = {}, build(scenario, 1, max_rows[world_size])
    for step in steps:
        checkpoint.load(path / f"step_{step:012d}", again, other._optimizer, pipeline=other)
        found[step] = records_of(again)
    return found, losses, evicted


def load_rows(scenario: Scenario, path: Path, max_rows: int | None = None) -> dict[str, Any]:
    dmp, pipeline = build(scenario, max_rows=max_rows)
    checkpoint.load(path, dmp, pipeline._optimizer, pipeline=pipeline)
    log = dmp.module.ebc.lookup.log
    progress = log.group.ordinal, log.committed, log.num_batches, pipeline.batches_committed
    resident = sum(s.resident for s in dmp.module.ebc.stats())
    return {"records": records_of(dmp), "progress": progress, "resident": resident}


def _slowly(write: Callable[..., None], seed: int, may_write: threading.Event) -> Callable[..., None]:
    rng = random.Random(seed)

    def slow(file: files.HashedFile, data: memoryview, *, rows: int = 0) -> None:
        may_write.wait()
        time.sleep(rng.random() * 0.001)
        write(file, data, rows=rows)

    return slow


def on_machines(local_world_size: int, fn: Callable[..., Any], *args: Any) -> Any:
    """As if so many of the ranks were on each machine."""
    original = scenarios.Topology
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(os.environ, "LOCAL_WORLD_SIZE", str(local_world_size))
        patch.setattr(
            scenarios, "Topology", lambda **kwargs: original(**(kwargs | {"local_world_size": local_world_size}))
        )
        return fn(*args)


def peak_growth(fn: Callable[[], Any]) -> int:
    """Bytes by which a call raises this process's resident memory, at most, above what it was before."""
    before = _status("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    fn()
    return _status("VmHWM") - before


def _status(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:"))
