"""Snapshots, state_dicts, exports and imports of tables whose rows have 16 bits."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from hybridrec import ConfigError, checkpoint
from tests.checkpoint.runs import build, load_and_go_on, save_and_go_on
from tests.checkpoint.test_safetensors import read, save_small_chunks
from tests.checkpoint.test_save_load import state_dicts
from tests.distributed.pipelines import all_batches, mine
from tests.distributed.scenario import Scenario
from tests.distributed.test_row_types import TABLES
from tests.ranks import RankFailure, RankPools

ADAM = Scenario(optimizer="adam", steps=10, ids_per_table=50, tables=TABLES)
OTHERS = replace(ADAM, tables=tuple(replace(t, row_type="float16") for t in TABLES))
TYPES = {"user": ("BF16", torch.bfloat16, 8), "item": ("F16", torch.float16, 4), "word": ("BF16", torch.bfloat16, 5)}


def test_a_run_goes_on(pools: RankPools, tmp_path: Path) -> None:
    saved = pools[2].run(save_and_go_on, ADAM, tmp_path, 5)
    again = pools[2].run(load_and_go_on, replace(ADAM, cache="all"), tmp_path)
    for before, after in zip(saved, again, strict=True):
        assert before["records"] == after["records"] and all(before["records"].values())
        assert before["losses"][5:] == after["losses"] and before["final"] == after["final"]
    with pytest.raises(RankFailure, match="data_type is 'BFLOAT16' in the snapshot and 'FLOAT16' in the model"):
        pools[2].run(load_and_go_on, OTHERS, tmp_path)


def test_state_dicts(pools: RankPools) -> None:
    saved = pools[2].run(state_dicts, ADAM, 3, None)
    found = pools[1].run(state_dicts, ADAM, 3, [one["state"] for one in saved])
    for name, rows in found[0]["records"].items():
        assert rows == {i: r for one in saved for i, r in one["records"][name].items()}
    with pytest.raises(RankFailure, match="no .*records_float16.*tables of the same data_type"):
        pools[1].run(state_dicts, OTHERS, 3, [one["state"] for one in saved])


def test_others_can_read_the_tables(pools: RankPools, tmp_path: Path) -> None:
    saved = pools[1].run(save_small_chunks, ADAM, tmp_path / "snapshots")
    checkpoint.export_safetensors(tmp_path / "snapshots", tmp_path / "out")
    for name, (called, dtype, dim) in TYPES.items():
        header, tensors = read(tmp_path / "out" / f"{name}.safetensors")
        assert header["embedding"]["dtype"] == called
        rows = torch.from_numpy(tensors["embedding"].copy()).view(dtype)
        assert rows.shape == (len(tensors["id"]), dim) and len(rows) > 10
        for id_, row in zip(tensors["id"].tolist(), rows, strict=True):
            assert row.view(torch.uint8).numpy().tobytes() == saved[0][name][id_][0][: 2 * dim]


def exported_and_imported(scenario: Scenario) -> dict[str, Any]:
    dmp, pipeline = build(scenario)
    data = iter(mine(scenario, all_batches(scenario)))
    pipeline.progress(data)
    result: dict[str, Any] = {}
    ids = torch.arange(900, 910)
    for name, (_, _, dim) in TYPES.items():
        checkpoint.import_rows(dmp, name, ids, torch.linspace(-1, 1, 10 * dim).view(10, dim))
        chunks = list(dmp.module.ebc.export_rows(name, chunk_rows=7))
        weights = {i: row for c in chunks for i, row in zip(c.ids_N.tolist(), c.weights_ND, strict=True)}
        result[name] = torch.stack([weights[i] for i in ids.tolist()])
        states = {i: row for c in chunks for i, row in zip(c.ids_N.tolist(), c.states["exp_avg"], strict=True)}
        result[name + " state"] = torch.stack([states[i] for i in ids.tolist()])
    with pytest.raises(ConfigError, match="weights reach 70000, table 'item' holds torch.float16, up to 65504"):
        checkpoint.import_rows(dmp, "item", ids, torch.full((10, 4), 7e4))
    return result


def test_rows_come_in_rounded_and_go_out_as_they_are(pools: RankPools) -> None:
    (found,) = pools[1].run(exported_and_imported, ADAM)
    for name, (_, dtype, dim) in TYPES.items():
        assert found[name].dtype == dtype and found[name + " state"].dtype == torch.float32
        assert torch.equal(found[name], torch.linspace(-1, 1, 10 * dim).view(10, dim).to(dtype))
        assert not found[name + " state"].any()
