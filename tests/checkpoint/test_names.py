"""Names of snapshots: a step that is saved again, which one is the newest, and which ones are let go."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from hybridrec import checkpoint
from hybridrec.checkpoint import snapshot
from hybridrec.checkpoint.entries import folder_name
from hybridrec.checkpoint.files import remove_folder
from hybridrec.checkpoint.manifest import MANIFEST


def publish(root: Path, step: int, keep: int | None, second: int) -> str:
    """A snapshot without contents, finished at a second."""
    name, lock = snapshot.begin(root, step)
    manifest = snapshot.unfinished(root, name) / MANIFEST
    manifest.touch()
    os.utime(manifest, ns=(second * 10**9, second * 10**9))
    snapshot.publish(root, name, keep)
    lock.release()
    return name


def names(root: Path) -> list[str]:
    return [p.name for p in snapshot.snapshots(root)]


def test_a_step_that_is_saved_again_replaces_nothing(tmp_path: Path) -> None:
    """The clock of the file system stands still: what is newest is told by the numbers then, of which none returns."""
    expected = ["step_000000000007", *(f"step_000000000007_{n}" for n in range(2, 12))]
    assert [publish(tmp_path, 7, 3, 0) for _ in expected] == expected
    assert names(tmp_path) == expected[-3:]
    assert checkpoint.latest(tmp_path) == tmp_path / expected[-1]
    (tmp_path / "latest").unlink()
    assert checkpoint.latest(tmp_path) == tmp_path / expected[-1]
    assert publish(tmp_path, 7, 1, 0) == "step_000000000007_12" and len(names(tmp_path)) == 1
    assert publish(tmp_path, 7, None, 0) == "step_000000000007_13"


def test_a_run_that_went_back_keeps_what_it_writes_now(tmp_path: Path) -> None:
    for second, step in enumerate((100, 200, 300)):
        publish(tmp_path, step, None, second)
    publish(tmp_path, 150, None, 3)  # resumed at 100
    assert names(tmp_path)[-1] == "step_000000000150" == (tmp_path / "latest").read_text().strip()
    (tmp_path / "step_000000000100" / "deltas").mkdir()  # what is added to an older one makes it no newer
    (tmp_path / "latest").unlink()
    assert checkpoint.latest(tmp_path) == tmp_path / "step_000000000150"
    publish(tmp_path, 200, 2, 4)
    assert names(tmp_path) == ["step_000000000150", "step_000000000200_2"]


def test_folders_of_others_are_neither_snapshots_nor_let_go(tmp_path: Path) -> None:
    mine = tmp_path / "step_000000000001.old"
    mine.mkdir()
    (mine / MANIFEST).touch()
    for step in range(3):
        publish(tmp_path, step, 1, step)
    assert mine.is_dir() and names(tmp_path) == ["step_000000000002"]


def test_a_clock_that_is_put_back_does_not_change_the_order(tmp_path: Path) -> None:
    for second, step in ((300, 1), (200, 2), (100, 3), (250, 4)):
        publish(tmp_path, step, 2, second)
    assert names(tmp_path) == ["step_000000000003", "step_000000000004"]
    (tmp_path / "latest").unlink()
    assert checkpoint.latest(tmp_path) == tmp_path / "step_000000000004"


def test_a_snapshot_that_goes_while_the_newest_is_looked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its writer removes it between two looks of a reader."""
    for step in (1, 2):
        publish(tmp_path, step, None, step)
    (tmp_path / "latest").unlink()
    listed = list(tmp_path.iterdir())
    remove_folder(tmp_path / "step_000000000001")
    monkeypatch.setattr(Path, "iterdir", lambda path: iter(listed))
    assert names(tmp_path) == ["step_000000000002"]


@pytest.mark.parametrize("letter", ["x", "表", "%"])
def test_long_names_are_names_of_folders(tmp_path: Path, letter: str) -> None:
    long = [letter * n for n in (60, 254, 255, 256, 1000)]
    folders = {folder_name(name) for name in long}
    assert len(folders) == len(long)
    for name in folders:
        (tmp_path / name).mkdir()
