"""`--save-every` and `--resume` of the Little Demo."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch.distributed as dist

from examples.little_demo import main
from examples.little_demo.launch import Ranks
from examples.little_demo.options import parse_args
from hybridrec import checkpoint
from hybridrec.checkpoint.__main__ import main as look_into
from tests.examples.test_demo import join
from tests.ranks import RankPool

SMALL = (
    "--data",
    "powerlaw",
    "--rows",
    "2000",
    "--ids",
    "300",
    "--features",
    "2",
    "--batch-size",
    "128",
    "--workers",
    "0",
)


def run(folder: Path, *options: str) -> None:
    ranks: Ranks = join()
    given = [*SMALL, "--snapshots", str(folder), "--picture", str(folder / "picture.png"), *options]
    assert main.run(parse_args(given), ranks) == 0


def run_at_once_and_in_two_parts(folder: Path) -> str:
    run(folder / "one", "--batches", "9", "--save-every", "3")
    run(folder / "two", "--batches", "5", "--save-every", "3", "--resume")
    run(folder / "two", "--batches", "9", "--save-every", "3", "--resume")
    run(folder / "two", "--batches", "9", "--resume")  # nothing is left to do
    dist.barrier()
    found = checkpoint.latest(folder / "two")
    return "" if found is None else found.name


def test_a_resumed_demo_ends_with_the_same_rows(
    pool_2: RankPool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert pool_2.run(run_at_once_and_in_two_parts, tmp_path) == ["step_000000000009"] * 2
    assert look_into(["diff", str(tmp_path / "one"), str(tmp_path / "two")]) == 0, capsys.readouterr().out
    assert look_into(["inspect", str(tmp_path / "two"), "--verify"]) == 0
    assert "step 9, 2 ranks" in capsys.readouterr().out
