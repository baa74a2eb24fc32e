"""A rank dies while all save: the others raise in time, say who it was and where, and the snapshot before is whole."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import pytest

from hybridrec import checkpoint
from hybridrec.checkpoint import files
from hybridrec.checkpoint.manifest import read_manifest
from tests.checkpoint.dying_saver import EVERY, SCENARIO, WORLD_SIZE
from tests.checkpoint.jobs import ROOT
from tests.checkpoint.runs import build
from tests.checkpoint.strikes import Strike
from tests.distributed.test_dead_ranks import SECONDS, START_SECONDS
from tests.ports import free_port
from tests.ranks import RankPools


def survivors(folder: Path, kind: str, strike: Strike) -> dict[int, dict[str, object]]:
    """Rank -> what it was told."""
    arguments = [str(free_port()), str(folder), kind, json.dumps(asdict(strike))]
    command = [sys.executable, "-W", "ignore", "-m", "tests.checkpoint.dying_saver"]
    ranks = []
    for rank in range(WORLD_SIZE):
        with open(folder / f"rank_{rank}.txt", "w") as out:
            ranks.append(subprocess.Popen([*command, str(rank), *arguments], cwd=ROOT, stdout=out, stderr=out))
    try:
        ranks[strike.rank].wait(START_SECONDS)
        for rank, process in enumerate(ranks):
            if rank != strike.rank:
                status = process.wait(2 * SECONDS)
                assert status == 3, (rank, status, (folder / f"rank_{rank}.txt").read_text()[-3000:])
    finally:
        for process in ranks:
            process.kill()
            process.wait()
    others = [rank for rank in range(WORLD_SIZE) if rank != strike.rank]
    return {rank: json.loads((folder / f"told_{rank}.json").read_text()) for rank in others}


def load_step(path: Path) -> int:
    dmp, pipeline = build(SCENARIO)
    return checkpoint.load(path, dmp, pipeline._optimizer, pipeline=pipeline).batches_committed


CASES = [
    ("Saving", Strike(stage="rows", number=2, when=1.0, rank=1), "SAVE"),
    *(
        pytest.param(kind, Strike(stage=stage, number=number, when=when, rank=rank), place, marks=pytest.mark.slow)
        for kind, stage, number, when, rank, place in (
            ("save", "list", 2, 0.0, 2, "SAVE"),
            ("save", "rows", 3, 0.5, 1, "SAVE"),
            ("save", "told", 3, 0.0, 2, "SAVE"),
            ("save", "begin", 1, 1.0, 0, "SAVE"),
            ("save", "manifest", 1, 0.5, 0, "SAVE"),
            ("save", "publish", 1, 0.0, 0, "SAVE"),
            ("save", "latest", 1, 0.0, 0, "SAVE"),
            ("save", "latest", 1, 1.0, 0, "SAVE"),
            ("Saving", "export", 2, 0.0, 0, "SAVE"),
            ("Saving", "told", 4, 0.0, 1, "SAVE"),
            ("Saving", "publish", 1, 1.0, 0, "SAVE"),
            ("Checkpointer", "agree", 1, 0.0, 1, "AFTER_BATCH"),
            ("Checkpointer", "rows", 2, 0.0, 2, "SAVE"),
        )
    ),
]


@pytest.mark.parametrize(("kind", "strike", "place"), CASES)
def test_survivors_name_the_dead_rank_and_the_older_snapshot_is_whole(
    pools: RankPools, tmp_path: Path, kind: str, strike: Strike, place: str
) -> None:
    for rank, told in survivors(tmp_path, kind, strike).items():
        error = str(told["error"])
        assert f"rank {strike.rank} of {WORLD_SIZE}" in error, error
        assert f"while rank {rank} waited in {place}" in error, error
        assert float(str(told["seconds"])) < SECONDS, told
    older = tmp_path / "snapshots" / f"step_{EVERY:012d}"
    for file in read_manifest(older).files():
        files.verify(older, file)
    assert pools[1].run(load_step, older) == [EVERY]
    newest = checkpoint.latest(tmp_path / "snapshots")
    assert newest is not None
    for file in read_manifest(newest).files():
        files.verify(newest, file)
