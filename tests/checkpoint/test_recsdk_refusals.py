"""Saves of RecSDK that are damaged, incomplete or of another kind are refused by their file, and described."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch.distributed as dist

from hybridrec import ConfigError, HybridRecError, StateError, checkpoint
from hybridrec.checkpoint import recsdk_scan
from hybridrec.checkpoint.__main__ import main
from hybridrec.distributed.lookup import PooledLookup
from tests.checkpoint.recsdk_writer import USER, float_contents, write_dynamic, write_merged, write_ranks, write_slice
from tests.checkpoint.runs import build, records_of
from tests.distributed.pipelines import all_batches, mine
from tests.distributed.scenario import Scenario
from tests.ranks import RankPools


def _append(path: Path, data: bytes) -> None:
    with open(path, "ab") as file:
        file.write(data)


def _cut(path: Path, num_bytes: int) -> None:
    path.write_bytes(path.read_bytes()[:-num_bytes])


def _double(path: Path) -> None:
    """Every attribute and array is longer: those of the first rank and of itself."""
    for name, dim in (("key", ()), ("embedding", (8,)), ("momentum1", (8,)), ("momentum2", (8,))):
        dtype = "<f4" if dim else "<i8"
        data = np.fromfile(path / name / "slice.data", dtype).reshape(-1, *dim)
        write_slice(path / name, np.concatenate([data, data[:1]]), 4 if dim else 8)


def _link(path: Path) -> None:
    moved = path.with_name("moved")
    path.rename(moved)
    path.symlink_to(moved)


def _rows(path: Path, name: str, dtype: str, item_bytes: int, dim: int = 8) -> None:
    write_slice(path / name, np.zeros((10, dim) if dim else (10,), dtype), item_bytes)


Break = Callable[[Path], object]
RANK_FAULTS: dict[str, tuple[Break, str]] = {
    "data cut": (
        lambda p: _cut(p / "user/rank1/momentum2/slice.data", 4),
        "rank1/momentum2/slice.data is cut: it has 316",
    ),
    "data longer": (
        lambda p: _append(p / "user/rank0/embedding/slice.data", bytes(32)),
        "rank0/embedding/slice.data has 32 bytes more than its attribute tells: an older save was in that folder, and",
    ),
    "data missing": (lambda p: (p / "user/rank1/key/slice.data").unlink(), "rank1/key/slice.data is missing"),
    "attribute missing": (
        lambda p: (p / "user/rank1/key/slice.attribute").unlink(),
        "rank1/key/slice.attribute is missing",
    ),
    "attribute cut": (
        lambda p: _cut(p / "user/rank0/embedding/slice.attribute", 8),
        "rank0/embedding/slice.attribute is damaged: it has 16 bytes, not 24",
    ),
    "attribute negative": (
        lambda p: np.array([8, -1], "<i8").tofile(p / "user/rank0/key/slice.attribute"),
        "rank0/key/slice.attribute is damaged: it tells the shape [-1]",
    ),
    "first rank missing": (lambda p: shutil.rmtree(p / "user/rank0"), "user/rank0 is missing; there are the ranks [1]"),
    "last rank missing": (
        lambda p: shutil.rmtree(p / "user/rank1"),
        "has the ranks 0 to 0, and its ids do not tell whether there were more, whose folders are missing. If there "
        "were none, pass world_size=1.",
    ),
    "rank of another save": (
        lambda p: shutil.copytree(p / "user/rank1", p / "user/rank2"),
        "rank0/key/slice.data has the id 1000, which of 3 ranks belongs to rank 1",
    ),
    "id twice": (lambda p: _double(p / "user/rank1"), "user/rank1/key/slice.data: the id 1007 comes twice"),
    "other dim": (
        lambda p: [
            _rows(p / f"user/rank{r}", n, "<f4", 4, 4) for r in (0, 1) for n in ("embedding", "momentum1", "momentum2")
        ],
        "table 'user' has rows of 4 columns, embedding_dim is 8 here",
    ),
    "one rank's dim": (
        lambda p: [_rows(p / "user/rank1", n, "<f4", 4, 4) for n in ("embedding", "momentum1", "momentum2")],
        "rank1/embedding/slice.data has 4 columns, ",
    ),
    "moment of another save": (
        lambda p: write_slice(p / "user/rank1/momentum1", np.zeros((9, 8), "<f4"), 4),
        "rank1/momentum1/slice.data has the shape [9, 8], which does not fit [10, 8]",
    ),
    "moment missing": (
        lambda p: [shutil.rmtree(p / f"user/rank{r}/momentum2") for r in (0, 1)],
        "table 'user' was saved with 1 moments (SGD has 0, Adagrad 1, Adam 2), its optimizer here, 'adam', has 2",
    ),
    "first moment missing": (
        lambda p: shutil.rmtree(p / "user/rank0/momentum1"),
        "rank0/momentum1 is missing beside momentum2",
    ),
    "moment of one rank missing": (
        lambda p: shutil.rmtree(p / "user/rank0/momentum2"),
        "user/rank1 has 2 momenta, ",
    ),
    "narrow keys": (
        lambda p: _rows(p / "user/rank0", "key", "<i4", 4, 0),
        "rank0/key/slice.attribute tells elements of 4 bytes. Known: int64, 8 bytes.",
    ),
    "wide rows": (
        lambda p: _rows(p / "user/rank0", "embedding", "<f8", 8),
        "rank0/embedding/slice.attribute tells elements of 8 bytes. Known: float32, 4 bytes.",
    ),
    "link": (lambda p: _link(p / "user/rank0/key/slice.data"), "rank0/key/slice.data is a symbolic link"),
    "no table": (lambda p: (p / "user").rename(p / "users"), "no collection has the table 'users'. Tables: ['user']"),
    "merged in part": (
        lambda p: shutil.copytree(p / "user/rank0/key", p / "user/key"),
        "user/rank0 is left of a save that did not finish",
    ),
    "not merged": (
        lambda p: (p / "meta.ini").write_text("incremental=False\n"),
        "user/rank0 is left of a save that did not finish",
    ),
    "empty": (lambda p: shutil.rmtree(p / "user"), "has no tables of RecSDK: neither TABLE/key"),
    "no folder": (shutil.rmtree, "is no folder. Pass the one"),
    "second table with fewer ranks": (
        lambda p: shutil.copytree(p / "user/rank0", p / "item/rank0"),
        "user has the ranks [0, 1], ",
    ),
    "times cut": (
        lambda p: _cut(p / "user/rank0/evict_timestamp/slice_evict_ts.data", 8),
        "slice_evict_ts.data have 16 and 8 bytes, slice.attribute beside them tells 2 int64 each",
    ),
    "times missing": (
        lambda p: [_cut(p / f"user/rank0/evict_timestamp/slice_evict_{n}.data", 8) for n in ("key", "ts")],
        "slice_evict_ts.data have 8 and 8 bytes, slice.attribute beside them tells 2 int64 each",
    ),
}
MERGED_FAULTS: dict[str, tuple[Break, str]] = {
    "appended": (
        lambda p: [_append(p / "user" / n / "slice.data", bytes(b)) for n, b in (("key", 8), ("embedding", 32))],
        "user/key/slice.data has 8 bytes more than its attribute tells: an older save was in that folder",
    ),
    "incremental": (
        lambda p: (p / "meta.ini").write_text("incremental=True\n"),
        "is an incremental save and comes first. Pass a full save, then its increments.",
    ),
    "meta": (lambda p: (p / "meta.ini").write_text("[a]\n"), "meta.ini says '[a]\\n'. Known: incremental=True or"),
    "id twice": (lambda p: _double(p / "user"), "user/key/slice.data: the id 1000 comes twice"),
}
WRONG_ARGUMENTS: dict[str, tuple[dict[str, Any], str]] = {
    "no step": (
        {"adam_step": None},
        "of ['user'] go on from a step of Adam that RecSDK does not save. Pass adam_step=",
    ),
    "negative step": ({"adam_step": -1}, "adam_step=-1, but accepted: an int, 0 or more"),
    "other step": (
        {"adam_step": 7},
        "adam_step=7, but the collection has trained 1 steps, and all its tables share one",
    ),
    "useless step": ({"with_states": False}, "no table that comes with its moments has Adam"),
    "ranks": ({"world_size": 3}, "world_size=3, but "),
    "tables": ({"tables": ["user", "item"]}, "tables=: 'item' is not in "),
}


def refused_imports(scenario: Scenario, cases: list[tuple[Any, dict[str, Any]]]) -> tuple[list[str], bool, int]:
    """What each import says; whether the model is as it was; and rows of the last import, which is fine."""
    dmp, pipeline = build(scenario)
    iterator = iter(mine(scenario, all_batches(scenario)))
    pipeline.progress(iterator)
    dmp.module.ebc.take_back_prepared()
    before, ordinal = records_of(dmp), dmp.module.ebc.lookup.log.group.ordinal
    messages = []
    for path, kwargs in cases:
        try:
            checkpoint.import_recsdk(path, dmp, **{"adam_step": 1} | kwargs)
        except HybridRecError as e:
            messages.append(str(e))
        else:
            messages.append("")
    log = dmp.module.ebc.lookup.log
    is_as_before = records_of(dmp) == before and log.committed == 1 and log.group.ordinal == ordinal
    pipeline.progress(iterator)
    return messages, is_as_before, len(before["user"])


def test_a_save_that_is_not_whole_is_refused_by_its_file(pools: RankPools, tmp_path: Path) -> None:
    scenario = Scenario(optimizer="adam", steps=3, ids_per_table=40, tables=USER)
    content = float_contents(scenario, 20, num_moments=2)["user"]
    content.times = [(1000, 1), (1007, 2)]
    cases: list[tuple[str, Any, dict[str, Any], str]] = []
    for kind, write, faults in (
        ("ranks", lambda path: write_ranks(path, {"user": content}, 2), RANK_FAULTS),
        ("merged", lambda path: write_merged(path, {"user": content}), MERGED_FAULTS),
    ):
        for name, (damage, words) in faults.items():
            folder = tmp_path / kind / name.replace(" ", "_").replace("'", "")
            write(folder)
            damage(folder)
            cases.append((f"{kind}, {name}", folder, {}, words))
    fine = tmp_path / "fine"
    write_ranks(fine, {"user": content}, 2)
    cases += [(name, fine, kwargs, words) for name, (kwargs, words) in WRONG_ARGUMENTS.items()]
    cases.append(("two full saves", [fine, fine], {}, "of the layout 'ranks', which has no increments"))
    cases.append(("nothing", [], {}, "no path was given"))
    found = pools[2].run(refused_imports, scenario, [(path, kwargs) for _, path, kwargs, _ in cases])
    assert found[0][0] == found[1][0]
    for (name, _, _, words), message in zip(cases, found[0][0], strict=True):
        assert words in message, (name, message)
    assert [(is_as_before, n > 0) for _, is_as_before, n in found] == [(True, True)] * 2


@pytest.mark.parametrize("name", ["meta.ini", "user/key/slice.attribute"])
def test_a_file_that_is_too_long_is_not_read(tmp_path: Path, name: str) -> None:
    content = float_contents(Scenario(optimizer="adam", steps=3, ids_per_table=40, tables=USER), 20, num_moments=2)
    write_merged(tmp_path, content)
    os.truncate(tmp_path / name, 2**40)
    with pytest.raises(HybridRecError, match="meta.ini says 'incremental=|key/slice.attribute is damaged: it has 1099"):
        checkpoint.read_recsdk(tmp_path)


def refused_by_the_table(scenario: Scenario, path: Path, kwargs: dict[str, Any]) -> str:
    dmp, _ = build(scenario)
    try:
        checkpoint.import_recsdk(path, dmp, **kwargs)
    except ConfigError as e:
        return str(e)
    return ""


def test_tables_that_cannot_hold_the_rows_are_refused(pools: RankPools, tmp_path: Path) -> None:
    scenario = Scenario(optimizer="rowwise_adagrad", steps=1, ids_per_table=30, tables=USER)
    content = float_contents(scenario)["user"]
    write_merged(tmp_path / "merged", {"user": content})
    found = pools[2].run(refused_by_the_table, scenario, tmp_path / "merged", {})
    assert "with 1 moments" in found[0] and "'rowwise_adagrad', has one value a row" in found[0]
    content.rows[1007][0][3] = 1e6
    write_merged(tmp_path / "large", {"user": content})
    half = Scenario(optimizer="adagrad", steps=1, ids_per_table=30, tables=(replace(USER[0], row_type="float16"),))
    found = pools[2].run(refused_by_the_table, half, tmp_path / "large", {})
    assert "user/embedding/slice.data: weights reach 1e+06, table 'user' holds torch.float16" in found[0]
    write_dynamic(tmp_path / "v2", {"user": content}, 2)
    found = pools[2].run(refused_by_the_table, replace(half, optimizer="adagrad"), tmp_path / "v2", {})
    assert "has optimizer values (opt_values), in an order that is not documented" in found[0]


def import_at_a_bad_moment(scenario: Scenario, here: Path, there: Path) -> list[str]:
    """Ranks that see different files, a batch in flight, a host budget that ends half-way; and what comes after."""
    dmp, pipeline = build(scenario)
    messages = []

    def attempt(path: Path) -> None:
        try:
            checkpoint.import_recsdk(path, dmp)
        except HybridRecError as e:
            messages.append(f"{type(e).__name__}: {e}")

    attempt(there if dist.get_rank() else here)
    batch = mine(scenario, all_batches(scenario)[:1])
    loss = dmp(batch[0])[0]
    attempt(here)
    loss.backward()
    original, calls = PooledLookup.import_rows, 0

    def import_rows(lookup: PooledLookup, table: str, rows: Any) -> None:
        nonlocal calls
        calls += 1
        if dist.get_rank() and calls == 2:
            raise StateError("no room")
        original(lookup, table, rows)

    patches = (
        mock.patch.object(PooledLookup, "import_rows", import_rows),
        mock.patch.object(recsdk_scan, "CHUNK_BYTES", 99),
    )
    with patches[0], patches[1]:
        attempt(here)
    try:
        pipeline.progress(iter(batch))
    except HybridRecError as e:
        messages.append(str(e))
    return messages


def test_an_import_at_a_bad_moment_is_refused_on_all_ranks(pools: RankPools, tmp_path: Path) -> None:
    scenario = Scenario(optimizer="adagrad", steps=1, ids_per_table=30, tables=USER)
    content = float_contents(scenario)["user"]
    write_merged(tmp_path / "1", {"user": content})
    write_merged(tmp_path / "2", {"user": replace(content, rows=dict(list(content.rows.items())[1:]))})
    found = pools[2].run(import_at_a_bad_moment, scenario, tmp_path / "1", tmp_path / "2")
    assert found[0][0].startswith("ConfigError: import_recsdk: the ranks see different files under ")
    assert "batches are in flight (1)" in found[0][1] and found[0][1] == found[1][1]
    assert found[0][2] == found[1][2] == "StateError: no room (on rank 1 of 2)"
    for _, _, _, afterwards in found:
        assert "tables of RecSDK were imported only in part: StateError: no room" in afterwards


# ---- description -----------------------------------------------------------------------------------------


def test_a_save_is_described(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    content = float_contents(Scenario(tables=USER), 20, num_moments=2)["user"]
    content.counts, content.times = {}, [(1000, 1), (1007, 2)]
    write_merged(tmp_path / "20250101000000", {"item": content, "user": content}, incremental=True)
    write_ranks(tmp_path / "20250102000000", {"user": content}, 2)
    (tmp_path / "20250103").mkdir()
    _append(tmp_path / "20250102000000/user/rank1/momentum1/slice.data", bytes(8))
    save = checkpoint.read_recsdk(tmp_path)
    assert (save.path.name, save.layout, save.world_size, save.is_incremental) == ("20250102000000", "ranks", 2, False)
    assert [(t.name, t.rows, t.dim, t.num_moments) for t in save.tables] == [("user", 20, 8, 2)]
    assert main(["recsdk", str(tmp_path)]) == 0
    assert capsys.readouterr().out == (
        f"{tmp_path}/20250102000000: save of RecSDK, layout 'ranks', 2 ranks\n"
        "  table 'user': 20 rows x 8, moments: 2, admission counts: 20, times of last use: 4, bytes of an older save: "
        "8\n"
    )
    assert main(["recsdk", str(tmp_path / "20250101000000")]) == 0
    assert ": incremental save of RecSDK, layout 'merged', merged\n  table 'item': 20" in capsys.readouterr().out
    (tmp_path / "20250101000000/item/key/slice.data").write_bytes(b"")
    assert main(["recsdk", str(tmp_path / "20250101000000")]) == 2
    assert "StateError: " in capsys.readouterr().err


def test_an_empty_table_and_a_missing_rank_of_torch_rec_v2(tmp_path: Path) -> None:
    content = float_contents(Scenario(tables=USER), 20)["user"]
    write_ranks(tmp_path / "ranks", {"user": replace(content, rows={})}, 2)
    (tmp_path / "ranks/user/rank0/key/slice.data").unlink()  # hybrid_torchrec leaves an empty one out
    (table,) = checkpoint.read_recsdk(tmp_path / "ranks").tables
    assert (table.rows, table.dim) == (0, 8)
    write_dynamic(tmp_path / "v2", {"user": content, "item": content}, 2)
    save = checkpoint.read_recsdk(tmp_path / "v2")
    assert [(t.name, t.rows, t.dim) for t in save.tables] == [("item", 20, 8), ("user", 20, 8)]
    _cut(tmp_path / "v2/collection/item_emb_values.rank_0.world_size_2", 4)
    with pytest.raises(HybridRecError, match=r"item_emb_values\.rank_0\.world_size_2 is cut"):
        checkpoint.read_recsdk(tmp_path / "v2")
    (tmp_path / "v2/collection/item_emb_keys.rank_1.world_size_2").unlink()
    with pytest.raises(HybridRecError, match=r"item_emb_values\.rank_0\.world_size_2 is cut|keys\.rank_1"):
        checkpoint.read_recsdk(tmp_path / "v2")
