"""Tables of snapshots as safetensors: read back here by the format's own rules."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hybridrec import ConfigError, checkpoint
from hybridrec.checkpoint import entries
from hybridrec.checkpoint.__main__ import main
from tests.checkpoint.runs import Records, build, records_of
from tests.distributed.pipelines import all_batches, mine
from tests.distributed.scenario import Scenario
from tests.ranks import RankPools

SCENARIO = Scenario(optimizer="adagrad", steps=4, ids_per_table=50)


def save_small_chunks(scenario: Scenario, path: Path) -> Records:
    dmp, pipeline = build(scenario)
    batches = iter(mine(scenario, all_batches(scenario)))
    for _ in range(scenario.steps):
        pipeline.progress(batches)
    sizes = itertools.count(3)  # another one for whoever asks again: what is written is what the manifest has
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(entries, "rows_of_chunk", lambda layout: next(sizes))
        checkpoint.save(path, dmp, pipeline=pipeline)
    return records_of(dmp)


def read(path: Path) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    content = path.read_bytes()
    length = int.from_bytes(content[:8], "little")
    header, data = json.loads(content[8 : 8 + length]), content[8 + length :]
    types = {"I64": np.int64, "F32": np.float32, "BF16": np.int16, "F16": np.int16}
    tensors = {
        name: np.frombuffer(data[slice(*t["data_offsets"])], types[t["dtype"]]).reshape(t["shape"])
        for name, t in header.items()
        if name != "__metadata__"
    }
    assert max(t["data_offsets"][1] for n, t in header.items() if n != "__metadata__") == len(data) and length % 8 == 0
    return header, tensors


def test_tables_can_be_read_by_others(pools: RankPools, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    saved = pools[2].run(save_small_chunks, SCENARIO, tmp_path / "snapshots")
    assert main(["export", str(tmp_path / "snapshots"), str(tmp_path / "out")]) == 0
    assert capsys.readouterr().out.split() == [
        str(tmp_path / "out" / f"{t}.safetensors") for t in ("user", "item", "word")
    ]
    for name, dim in (("user", 8), ("item", 4), ("word", 5)):
        _, tensors = read(tmp_path / "out" / f"{name}.safetensors")
        expected = {i: record[: 4 * dim] for one in saved for i, (record, _) in one[name].items()}
        found = zip(tensors["id"].tolist(), (row.tobytes() for row in tensors["embedding"]), strict=True)
        assert dict(found) == expected and len(tensors["id"]) == len(expected) > 10
    with pytest.raises(ConfigError, match="user.safetensors exists"):
        checkpoint.export_safetensors(tmp_path / "snapshots", tmp_path / "out")
