"""``python -m hybridrec.checkpoint``: what it says of snapshots."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hybridrec import StateError, checkpoint
from hybridrec.checkpoint.__main__ import main
from hybridrec.checkpoint.delta_chain import read_delta
from hybridrec.checkpoint.manifest import read_manifest
from hybridrec.checkpoint.points import read_point, rows_at
from hybridrec.checkpoint.saved_tables import layout_of
from tests.checkpoint.runs import build
from tests.checkpoint.test_deltas import EVICTING, write_chain
from tests.distributed.pipelines import all_batches, mine
from tests.distributed.scenario import Scenario, state_of

SCENARIO = Scenario(optimizer="rowwise_adagrad", steps=6, ids_per_table=30)


def save_at_each_step(scenario: Scenario, path: Path) -> dict[int, list[float]]:
    dmp, pipeline = build(scenario)
    batches = iter(mine(scenario, all_batches(scenario)))
    for _ in range(2):
        pipeline.progress(batches)
        checkpoint.save(path, dmp, pipeline._optimizer, pipeline=pipeline)
    return {i: record.tolist() for i, record in state_of(dmp)[0].items()}


def test_it_tells_what_is_there(pool_1: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (rows,) = pool_1.run(save_at_each_step, SCENARIO, tmp_path)
    known, record = next(iter(rows.items()))
    assert main(["inspect", str(tmp_path), "--verify", "--id", "user", str(known)]) == 0
    text = capsys.readouterr().out
    assert "step 2, 1 ranks" in text and "collection 'ebc': 2 steps, newest ordinal 2" in text
    assert f"table 'user': {len(rows)} rows x 8, rowwise_adagrad (states: sum (row-wise))" in text
    assert (
        f"id {known}: last used by batch" in text and f"weights: {record[:8]}" in text and f"sum: {record[8:]}" in text
    )
    assert "5 files are what was written" in text
    assert main(["inspect", str(tmp_path), "--id", "user", "123456789"]) == 0
    assert "id 123456789 has no row" in capsys.readouterr().out
    for wrong in (["--id", "users", "1"], ["--id", "user", "x"]):
        assert main(["inspect", str(tmp_path), *wrong]) == 2
    assert main(["inspect", str(tmp_path / "nothing")]) == 2

    first, second = (str(tmp_path / f"step_{n:012d}") for n in (1, 2))
    assert main(["diff", second, str(tmp_path)]) == 0
    assert main(["diff", first, second]) == 1
    text = capsys.readouterr().out
    assert "no difference" in text and "step: 1 and 2" in text
    assert "table 'user': " in text and "rows only in the second" in text and "rows with other values" in text
    assert "or the optimizer, differ" in text

    damaged = tmp_path / "step_000000000002" / "dense.pt"
    damaged.write_bytes(damaged.read_bytes()[:-1])
    capsys.readouterr()
    assert main(["inspect", second, "--verify"]) == 2
    assert str(damaged) in capsys.readouterr().err


def test_it_tells_of_deltas(pool_1: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pool_1.run(write_chain, EVICTING, tmp_path, first=32, every=4, max_rows=160)
    (snapshot,) = tmp_path.glob("step_*")
    points = [snapshot, *(snapshot / "deltas" / f"{number:08d}" for number in range(1, 5))]
    assert main(["inspect", str(tmp_path), "--verify"]) == 0
    text = capsys.readouterr().out
    digest, num_files = read_manifest(snapshot).digest, len(read_manifest(snapshot).files())
    for number in range(1, 5):
        delta = read_delta(snapshot, number, digest)
        digest, num_files = delta.digest, num_files + len(delta.files())
        rows = sum(t.rows for c in delta.collections for t in c.tables)
        removed = sum(entry.file.rows for entry in delta.removed)
        step = 32 + 4 * number
        assert f"delta {number}: step {step}, 1 ranks, {rows} rows changed, {removed} ids removed, " in text
    assert f"{num_files} files are what was written" in text
    follower = checkpoint.follow(tmp_path)
    assert f"step 48, 4 deltas after {snapshot.name}, " in repr(follower)
    assert f"'item': {len(follower.rows('item').ids_N)} rows" in repr(follower)

    # A row that a delta changed, and one that left with another
    chunks = [rows_of(point) for point in points]
    changed = next(i for i in chunks[0] if i in chunks[2] and chunks[0][i] != chunks[2][i])
    gone = next(iter(chunks[0].keys() - chunks[4].keys()))
    for point, wanted, words in (
        (points[0], changed, f"id {changed}: last used by batch {chunks[0][changed][0]}"),
        (points[2], changed, f"id {changed} after delta 2: last used by batch {chunks[2][changed][0]}"),
        (points[0], gone, f"id {gone}: last used by batch"),
        (tmp_path, gone, f"id {gone} has no row after delta 4"),
    ):
        assert main(["inspect", str(point), "--id", "item", str(wanted)]) == 0
        assert words in capsys.readouterr().out
    assert main(["diff", str(points[4]), str(tmp_path)]) == 0
    assert main(["diff", str(points[0]), str(points[4])]) == 1
    text = capsys.readouterr().out
    assert "step: 32 and 48" in text and "rows only in the first" in text and "rows only in the second" in text

    file = next(f for f in sorted(points[3].rglob("*.rows")) if f.stat().st_size)
    file.write_bytes(file.read_bytes()[:-1])
    assert main(["inspect", str(points[2]), "--verify"]) == 0
    for path in (tmp_path, snapshot, points[3]):
        capsys.readouterr()
        assert main(["inspect", str(path), "--verify"]) == 2
        assert "delta 3 of" in capsys.readouterr().err
    with pytest.raises(StateError, match="00000002 is a delta. Pass its snapshot"):
        checkpoint.follow(points[2])
    for path, what in ((tmp_path / "x", "does not exist"), (points[2].parent / "newest", "is a file")):
        with pytest.raises(StateError, match=f"{path} {what}. Pass the folder"):
            checkpoint.follow(path)


def rows_of(path: Path) -> dict[int, tuple[int, list[float]]]:
    """Id -> (last use, weights) of table "item" at a point."""
    point = read_point(path)
    entry = next(t for c in point.collections for t in c.tables if t.name == "item")
    return {
        i: (score, weights)
        for chunk in rows_at(point, "ebc", "item", layout_of(entry))
        for i, score, weights in zip(
            chunk.ids_N.tolist(), chunk.scores_N.tolist(), chunk.weights_ND.tolist(), strict=True
        )
    }
