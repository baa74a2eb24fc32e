"""``python -m hybridrec.checkpoint``: what it says of snapshots."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hybridrec import checkpoint
from hybridrec.checkpoint.__main__ import main
from tests.checkpoint.runs import build
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
