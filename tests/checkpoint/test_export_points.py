"""Exports of a snapshot with its deltas: the tables as they were then, bit for bit, ascending by id."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from hybridrec import StateError, checkpoint
from hybridrec.checkpoint import entries, files, saved_tables
from hybridrec.checkpoint.__main__ import main
from hybridrec.checkpoint.points import read_point
from hybridrec.checkpoint.saved_tables import layout_of
from hybridrec.checkpoint.sorted_rows import sorted_rows
from tests.checkpoint.made_snapshots import delta_of, snapshot_of, table_in
from tests.checkpoint.runs import Records
from tests.checkpoint.test_delta_resume import write_until
from tests.checkpoint.test_deltas import ADAM, EVICTING, MAX_ROWS
from tests.checkpoint.test_export import EXPORTS, READERS, every_format
from tests.checkpoint.test_plain_collections import config
from tests.distributed.scenario import Scenario
from tests.distributed.test_sharding_types import MIXED
from tests.ranks import RankPools

Made = dict[int, list[float]]
"""Id -> weights."""


def write_small_chunks(scenario: Scenario, path: Path, **kwargs: Any) -> Any:
    """A chain whose files have many chunks, of a few rows each."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(entries, "rows_of_chunk", lambda layout: 2 + layout.dim % 3)
        return write_until(scenario, path, **kwargs)


def points_of(everyone: list[Any]) -> dict[str, Records]:
    """Folder of a point -> the rows of all ranks then."""
    found: dict[str, Records] = {}
    for one in everyone:
        for point, (_, records) in one["points"].items():
            for name, rows in records.items():
                found.setdefault(point, {}).setdefault(name, {}).update(rows)
    return found


def exported(kind: str, path: Path, out: Path, names: list[str]) -> dict[str, dict[int, bytes]]:
    EXPORTS[kind](path, out)
    found = {}
    for name in names:
        ids, weights = READERS[kind](out / f"{name}.{kind}")
        assert bool((ids[1:] > ids[:-1]).all()) and len(ids) == len(weights)
        found[name] = dict(zip(ids.tolist(), (row.numpy().tobytes() for row in weights), strict=True))
    return found


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_every_point_is_exported_as_it_was(pools: RankPools, tmp_path: Path, world_size: int) -> None:
    path, max_rows = tmp_path / "s", MAX_ROWS[world_size]
    points = points_of(
        pools[world_size].run(write_small_chunks, EVICTING, path, first=30, every=6, at=48, max_rows=max_rows)
    )
    (snapshot,) = path.glob("step_*")
    last = list(points)[-1]
    named = {**{point: point for point in points}, str(path): last, str(snapshot / "deltas"): last}
    dims = {table.name: table.dim for table in EVICTING.tables}
    begin, end = (points[point] for point in (list(points)[0], last))
    assert any(begin[name].keys() - end[name].keys() for name in dims)  # ids come and go
    assert any(end[name].keys() - begin[name].keys() for name in dims)
    for number, (given, point) in enumerate(named.items()):
        expected = {
            name: {i: record[: 4 * dims[name]] for i, (record, _) in rows.items()}
            for name, rows in points[point].items()
        }
        for kind in EXPORTS:
            assert exported(kind, Path(given), tmp_path / f"{number}", list(dims)) == expected, (given, kind)


def test_columns_at_a_point_are_put_together(pools: RankPools, tmp_path: Path) -> None:
    scenario = replace(ADAM, tables=MIXED)
    points = points_of(pools[2].run(write_small_chunks, scenario, tmp_path / "s", first=2, every=2, at=6))
    found = exported("safetensors", tmp_path / "s", tmp_path / "out", [table.name for table in MIXED])
    records = points[list(points)[-1]]
    assert any("[" in name for name in records)
    for table in MIXED:
        names = sorted(
            (n for n in records if n.partition("[")[0] == table.name),
            key=lambda n: int(n[len(table.name) + 1 :].partition(":")[0] or 0),
        )
        rows: dict[int, bytes] = {}
        for name in names:
            first, last = map(int, name[:-1].partition("[")[2].split(":")) if "[" in name else (0, table.dim)
            for id_, (record, _) in records[name].items():
                rows[id_] = rows.get(id_, b"") + record[: 4 * (last - first)]
        assert found[table.name] == rows and rows


# ---- made by hand ----------------------------------------------------------------------------------------------------


def made_chain(path: Path, *, seed: int = 0, num_deltas: int = 4) -> list[Made]:
    """Rows at each point of a chain whose deltas are of other numbers of ranks, whose ids come, go, and come again."""
    generator = torch.Generator().manual_seed(seed)
    universe = torch.cat([torch.tensor([-(2**63), -1, 0, 2**63 - 1]), torch.arange(1, 26)]).sort().values

    def some(share: float) -> Tensor:
        return universe[torch.rand(len(universe), generator=generator) < share]

    now: Made = {}
    points: list[Made] = []
    for number in range(num_deltas + 1):
        folder = path / f"deltas/{number:08d}" if number else path
        gone, ids = some(0.3), some(0.5 if number else 0.7)  # some leave and are put in again by one delta
        weights = torch.randn((len(ids), 3), generator=generator)
        entry = table_in(folder, "user", ids, weights, chunk_rows=1 + number % 3, num_ranks=1 + number % 3)
        if number:
            delta_of(path, number, [entry], {"user": [gone[::2], gone[1::2]]} if number % 2 else {"user": [gone]})
            now = {i: row for i, row in now.items() if i not in gone.tolist()}
        else:
            snapshot_of(path, [entry])
        now = now | dict(zip(ids.tolist(), weights.tolist(), strict=True))
        points.append(now)
    return points


@pytest.mark.parametrize("seed", range(8))
def test_rows_of_all_layers_are_merged(tmp_path: Path, seed: int) -> None:
    points = made_chain(tmp_path / "s", seed=seed)
    with mock.patch.object(files, "_BLOCK_IDS", 2):
        for number, expected in enumerate(points):
            point = read_point(tmp_path / "s" / f"deltas/{number:08d}" if number else tmp_path / "s")
            layout = layout_of(point.collections[0].tables[0])
            ids = torch.cat([rows.ids_N for rows in sorted_rows(point, "c0", "user", layout, "ids")])
            assert ids.tolist() == sorted(expected)
            found = list(sorted_rows(point, "c0", "user", layout))
            assert [
                (i, row) for r in found for i, row in zip(r.ids_N.tolist(), r.weights_ND.tolist(), strict=True)
            ] == sorted(expected.items())
            assert all(bool((r.scores_N == 1).all() and (r.states["sum"] == 1).all()) for r in found)
            assert all(r.states["steps"].shape == r.ids_N.shape for r in found)


def test_a_point_without_rows(tmp_path: Path) -> None:
    ids, none = torch.arange(5), torch.empty(0, dtype=torch.int64)
    snapshot_of(tmp_path / "s", [table_in(tmp_path / "s", "user", ids, torch.ones(5, 2))])
    empty = table_in(tmp_path / "s/deltas/00000001", "user", none, torch.ones(0, 2))
    delta_of(tmp_path / "s", 1, [empty], {"user": [ids]})
    for kind, read in READERS.items():
        EXPORTS[kind](tmp_path / "s/deltas", tmp_path / "out")
        found, weights = read(tmp_path / "out" / f"user.{kind}")
        assert len(found) == 0 and weights.shape == (0, 2)


def test_the_tool_compares_and_exports_points(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first, *_, last = made_chain(tmp_path / "s")
    assert main(["diff", str(tmp_path / "s"), str(tmp_path / "s/deltas/00000004")]) == 1
    text = capsys.readouterr().out
    both = first.keys() & last.keys()
    assert f"{len(first) - len(both)} rows only in the first, {len(last) - len(both)} rows only in the second" in text
    assert f"{sum(first[i] != last[i] for i in both)} rows with other values" in text and "last use" not in text
    assert main(["diff", str(tmp_path / "s/deltas"), str(tmp_path / "s/deltas/00000004")]) == 0
    assert capsys.readouterr().out == "no difference\n"
    with mock.patch("sys.stderr.isatty", return_value=True):
        assert main(["export", str(tmp_path / "s/deltas"), str(tmp_path / "out")]) == 0
    assert f"{len(last)}.0 rows" in capsys.readouterr().err  # how many there are in all nobody knows before
    assert READERS["safetensors"](tmp_path / "out/user.safetensors")[0].tolist() == sorted(last)


def test_plain_collections_of_a_point(tmp_path: Path) -> None:
    ids = torch.arange(20)
    snapshot_of(
        tmp_path / "s", [table_in(tmp_path / "s", "user", ids, torch.zeros(20, 4), initializer="Constant(value=5.0)")]
    )
    changed = table_in(
        tmp_path / "s/deltas/00000001", "user", ids[::4], torch.ones(5, 4), initializer="Constant(value=5.0)"
    )
    delta_of(tmp_path / "s", 1, [changed], {"user": [ids[::3]]})
    expected = torch.zeros(20, 4)
    expected[::3] = 5
    expected[::4] = 1
    plain = checkpoint.to_embedding_bag_collection(tmp_path / "s/deltas/00000001", [config(rows=20)])
    assert torch.equal(plain.embedding_bags["user"].weight, expected)
    before = checkpoint.to_embedding_bag_collection(tmp_path / "s", [config(rows=20)])
    assert torch.equal(before.embedding_bags["user"].weight, torch.zeros(20, 4))


def _shuffle(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[:8], content[8:16] = content[8:16], content[:8]
    file.write_bytes(content)


@every_format
@pytest.mark.parametrize("what", ["*.rows", "*.ids"])
def test_a_damaged_delta_is_refused(tmp_path: Path, kind: str, what: str) -> None:
    made_chain(tmp_path / "s")
    file = sorted((tmp_path / "s/deltas/00000003").rglob(what))[0]
    whole = file.read_bytes()
    file.write_bytes(whole[:-1] + b"x")
    export: Callable[..., Any] = EXPORTS[kind]
    with pytest.raises(StateError, match=f"delta 3 of .*{file.name} is damaged"):
        export(tmp_path / "s/deltas", tmp_path / "out")
    export(tmp_path / "s/deltas/00000002", tmp_path / "out")  # what is before it is whole
    file.write_bytes(whole)
    _shuffle(file)
    with mock.patch.object(saved_tables.SavedTable, "verify"), pytest.raises(StateError, match="ids do not ascend"):
        export(tmp_path / "s/deltas", tmp_path / "other")
    assert list((tmp_path / "other").iterdir()) == []
