"""A snapshot in the background, a delta that is due, SIGTERM and the end of the data meet at one batch."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from hybridrec import checkpoint
from hybridrec.checkpoint import files
from hybridrec.checkpoint.points import newest_point
from hybridrec.checkpoint.snapshot import snapshots
from tests.checkpoint.runs import build, records_of
from tests.checkpoint.test_deltas import EVICTING, everyone, followed, train
from tests.distributed.pipelines import all_batches, mine
from tests.ranks import RankPools

MOMENTS = ("before the batch", "before it is told", "while it is told", "after it", "at the end", "when it is saved")
"""When the last rank is asked to end, around the last batch that there is."""
EVERY, DELTA_EVERY = 8, 4


def run_into_all(path: Path, last: int, when: str, *, saves: bool, is_slow: bool) -> dict[str, Any]:
    """Train until the data ends after some batches, or the job is asked to; what the rows were after the last ones."""
    dmp, pipeline = build(EVICTING, max_rows=160)
    original, states, losses = files.HashedFile.write, {}, []

    def write(file: files.HashedFile, data: memoryview, *, rows: int = 0) -> None:
        if is_slow and threading.current_thread().name == "hybridrec-save":
            time.sleep(0.02)
        original(file, data, rows=rows)

    def moment(now: str, at: int) -> None:
        if (now, pipeline.batches_committed) == (when, at) and dist.get_rank() == dist.get_world_size() - 1:
            os.kill(os.getpid(), signal.SIGTERM)

    with (
        pytest.MonkeyPatch.context() as patch,
        checkpoint.Checkpointer(
            path, dmp, pipeline._optimizer, pipeline, every=EVERY, delta_every=DELTA_EVERY, in_background=True
        ) as checkpointer,
    ):
        agree = checkpointer._agree
        patch.setattr(checkpointer, "_agree", lambda: (agree(), moment("while it is told", last))[0])
        patch.setattr(files.HashedFile, "write", write)
        first = checkpointer.resume()
        states[first] = everyone(dmp)
        batches = iter(mine(EVICTING, all_batches(EVICTING)[first:last]))
        try:
            while not checkpointer.is_stopping:
                moment("before the batch", last - 1)
                losses.append(pipeline.progress(batches).item())
                if pipeline.batches_committed % DELTA_EVERY == 0 or pipeline.batches_committed >= last - 1:
                    pipeline.withdraw()
                    states[pipeline.batches_committed] = everyone(dmp)
                moment("before it is told", last)
                checkpointer.after_batch()
                moment("after it", last)
        except StopIteration:
            moment("at the end", last)
            if saves:
                checkpointer.save()
            moment("when it is saved", last)
    dist.barrier()
    return {"first": first, "states": states, "losses": losses, "final": records_of(dmp)}


def check_whole(path: Path, states: dict[int, Any]) -> int:
    """All that can be seen is complete, and is the rows of its step; the step of the newest one."""
    assert snapshots(path) and not [p for p in path.rglob(".*") if p.name != ".metadata"]
    for folder in snapshots(path):
        point = newest_point(folder)
        for layer, file in point.files():
            layer.verify(file)
        follower = checkpoint.follow(folder)
        assert followed(follower) == states[follower.step]
    return checkpoint.follow(path).step


def cases(lasts: tuple[int, ...]) -> list[tuple[int, str, bool, bool]]:
    return [(last, when, saves, last % 3 > 0) for last in lasts for when in MOMENTS for saves in (False, True)]


@pytest.mark.parametrize(
    ("world_size", "lasts"),
    [
        (2, (16,)),
        pytest.param(1, (12, 13, 16, 20), marks=pytest.mark.slow),
        pytest.param(2, (12, 13, 15, 20), marks=pytest.mark.slow),
    ],
)
def test_all_at_once_leaves_what_is_whole(pools: RankPools, tmp_path: Path, world_size: int, lasts: tuple[int]) -> None:
    alone = pools[world_size].run(train, EVICTING, 160)
    for number, (last, when, saves, is_slow) in enumerate(cases(lasts)):
        path = tmp_path / str(number)
        ended = pools[world_size].run(run_into_all, path, last, when, saves=saves, is_slow=is_slow)
        step = check_whole(path, ended[0]["states"])
        is_asked_in_time = when in ("before the batch", "before it is told")
        assert step == last if saves or is_asked_in_time else last - DELTA_EVERY * 2 < step <= last
        again = pools[world_size].run(run_into_all, path, EVICTING.steps, "never", saves=True, is_slow=False)
        check_whole(path, ended[0]["states"] | again[0]["states"])
        for rank in range(world_size):
            assert again[rank]["first"] == step
            assert ended[rank]["losses"] == alone[rank]["losses"][: len(ended[rank]["losses"])]
            assert again[rank]["losses"] == alone[rank]["losses"][step:]
            assert again[rank]["final"] == alone[rank]["final"]
