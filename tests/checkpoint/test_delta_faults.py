"""One rank fails, once, in each stage of a delta: all say the same, and no id is lost to the next one."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from hybridrec import HybridRecError, checkpoint
from hybridrec.checkpoint import contents, delta_chain, delta_saving, saving, snapshot
from hybridrec.checkpoint.manifest import MANIFEST
from hybridrec.native import ShardGroup
from tests.checkpoint.runs import build
from tests.checkpoint.test_deltas import EVICTING, MAX_ROWS, compare
from tests.distributed.pipelines import all_batches, mine
from tests.ranks import RankPools

OF_BOTH: dict[str, tuple[Any, str, int]] = {
    "orders": (saving, "gradient_order", -1),
    "copies": (contents, "copy_of", -1),
    "lists": (ShardGroup, "export_begin", -1),
    "small files": (saving, "write_file", -1),
    "rows": (saving, "write_rows", -1),
    "reads rows": (ShardGroup, "export_next", -1),
    "names": (saving, "sync_tree", -1),
    "sees": (saving, "require_here", 0),
    "manifest": (saving, "write_file", 0),
}
"""What is called in a stage, and on which rank it fails: the last one, or the one that does it."""
OF_DELTAS = OF_BOTH | {
    "begins": (delta_saving, "begin_delta", 0),
    "ids": (delta_saving, "write_file", -1),
    "appears": (delta_saving, "publish_delta", 0),
    "is named": (delta_chain, "replace_file", 0),
}
OF_SNAPSHOTS = OF_BOTH | {
    "begins": (snapshot, "begin", 0),
    "appears": (snapshot, "publish", 0),
    "is named": (snapshot, "replace_file", 0),
}


@contextlib.contextmanager
def failing(stages: dict[str, tuple[Any, str, int]], stage: str) -> Iterator[list[str]]:
    """The disk is full at the first call; that it was is told."""
    owner, name, rank = stages[stage]
    original, told = getattr(owner, name), []

    def call(*args: Any, **kwargs: Any) -> Any:
        if not told and (stage != "manifest" or MANIFEST in args):
            told.append(stage)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), stage)
        return original(*args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        if dist.get_rank() == rank % dist.get_world_size():
            patch.setattr(owner, name, call)
        yield told


def fail_in_every_stage(path: Path, kind: str, *, in_background: bool) -> dict[str, str]:
    """Stage -> what all ranks say; after each a delta is written, and a follower has the tables."""
    stages = OF_DELTAS if kind == "delta" else OF_SNAPSHOTS
    scenario, world_size = replace(EVICTING, steps=34 + 3 * len(stages)), dist.get_world_size()
    dmp, pipeline = build(scenario, max_rows=MAX_ROWS[world_size])
    group = dist.new_group(backend="gloo") if world_size > 1 else None
    writer = checkpoint.DeltaWriter(path, dmp, pipeline._optimizer, pipeline=pipeline, group=group)
    batches, said = iter(mine(scenario, all_batches(scenario))), {}
    for _ in range(32):
        pipeline.progress(batches)
    writer.save_full()
    dist.barrier()
    follower = checkpoint.follow(path)
    for stage in stages:
        pipeline.progress(batches)
        with failing(stages, stage) as told:
            try:
                if in_background:
                    writer.start_delta() if kind == "delta" else writer.start_full()
                    pipeline.progress(batches)
                    writer.finish()
                else:
                    writer.save_delta() if kind == "delta" else writer.save_full()
                said[stage] = "nothing"
            except HybridRecError as e:
                said[stage] = f"{type(e).__name__}: {e}"
        everyone: list[Any] = [None] * world_size
        dist.all_gather_object(everyone, (said[stage], bool(told)))
        if len({text for text, _ in everyone}) > 1 or not any(was_told for _, was_told in everyone):
            raise AssertionError(f"{stage}: {everyone}")
        pipeline.progress(batches)
        before = follower.number
        writer.save_delta()
        dist.barrier()
        follower.update()
        if follower.number != before + 1:
            raise AssertionError(f"{stage}: the chain has {follower.number} deltas, not {before + 1}")
        compare(follower, dmp, pipeline.batches_committed)
        left = [p.name for p in path.rglob(".*") if p.name.startswith((".unfinished", ".writer"))]
        dist.barrier()
        if left:
            raise AssertionError(f"{stage}: {left} is left")
    return said


@pytest.mark.parametrize("in_background", [False, True])
@pytest.mark.parametrize(
    ("kind", "world_size"),
    [
        ("delta", 2),
        ("full", 2),
        pytest.param("delta", 1, marks=pytest.mark.slow),
    ],
)
def test_a_failure_in_any_stage_loses_nothing(
    pools: RankPools, tmp_path: Path, kind: str, world_size: int, in_background: bool
) -> None:
    said, *_ = pools[world_size].run(fail_in_every_stage, tmp_path, kind, in_background=in_background)
    stages = OF_DELTAS if kind == "delta" else OF_SNAPSHOTS
    for stage, (_, _, rank) in stages.items():
        where = f" (on rank {rank % world_size} of {world_size})" if world_size > 1 else ""
        assert said[stage] == f"StateError: {stage}: No space left on device{where}"


def carries_nothing(path: Path) -> None:
    """A mutant: what left before a delta that failed is forgotten."""
    original = checkpoint.DeltaWriter._carry

    def carry(self: Any, c: str, module: Any, t: int) -> None:
        self._carried.pop((c, module.lookup.tables[t].name), None)
        original(self, c, module, t)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checkpoint.DeltaWriter, "_carry", carry)
        fail_in_every_stage(path, "delta", in_background=False)


def test_a_mutant_is_caught(pools: RankPools, tmp_path: Path) -> None:
    with pytest.raises(Exception, match="the rows by deltas are not those of step"):
        pools[1].run(carries_nothing, tmp_path)
