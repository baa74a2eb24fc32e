"""Manifests that say what no writer says, their own hash being right: refused by name before anything is read."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hybridrec import ConfigError, StateError, checkpoint
from hybridrec.checkpoint.delta_chain import RemovedEntry, newest_delta
from hybridrec.checkpoint.manifest import MANIFEST, FileEntry, digest_of, read_manifest
from hybridrec.checkpoint.safetensors import SafetensorsFile
from tests.checkpoint.made_snapshots import rows_of, snapshot_of, table_in


def forge(folder: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    """What a manifest says is changed, and hashed anew."""
    content = json.loads((folder / MANIFEST).read_bytes())
    del content["sha256"]
    change(content)
    content["sha256"] = digest_of(content)
    (folder / MANIFEST).write_text(json.dumps(content))


def table(content: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = content["collections"][0]["tables"][0]
    return found


FORGERIES: dict[str, tuple[Callable[[dict[str, Any]], Any], str]] = {
    "a file outside": (lambda c: c["dense"].update(name="../dense.pt"), r"'\.\./dense\.pt', which is not inside"),
    "a file anywhere": (lambda c: c["dense"].update(name="/dense.pt"), "'/dense.pt', which is not inside"),
    "the folder itself": (lambda c: c["dense"].update(name="."), "'.', which is not inside"),
    "more rows": (lambda c: table(c)["files"][0].update(rows=2**40), "1,099,511,627,776 rows"),
    "fewer than no rows": (lambda c: table(c)["files"][0].update(rows=-1), r"rows of 'rows/user/00000\.rows' is -1"),
    "no chunks": (lambda c: table(c).update(chunk_rows=0), "by chunks of 0"),
    "other columns": (lambda c: table(c).update(dim=5), "20 rows of 56 bytes in"),
    "another type": (lambda c: table(c).update(row_type="INT3"), "INT3"),
    "a rank that was not": (lambda c: table(c)["files"][0].update(rank=1), "of rank 1 of 1"),
    "another field": (lambda c: c["dense"].update(mode="x"), "mode"),
}


@pytest.mark.parametrize("name", FORGERIES)
def test_a_forged_manifest_is_refused(tmp_path: Path, name: str) -> None:
    folder = tmp_path / "snapshot"
    folder.mkdir()
    snapshot_of(folder, [table_in(folder, "user", *rows_of(20, 4))])
    forge(folder, lambda content: None)
    assert read_manifest(folder).collections[0].tables[0].rows == 20
    change, words = FORGERIES[name]
    forge(folder, change)
    for read in (read_manifest, checkpoint.follow, lambda path: checkpoint.export_safetensors(path, tmp_path / "out")):
        with pytest.raises(StateError, match=rf"manifest\.json is damaged or forged: .*{words}"):
            read(folder)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("there", [(), ("00000001",), ("00000001", "00000002"), ("00000003",)])
def test_deltas_without_the_name_of_the_newest(tmp_path: Path, there: tuple[str, ...]) -> None:
    """A writer that died can have left delta 1 so, and none behind it."""
    for name in there:
        (tmp_path / "deltas" / name).mkdir(parents=True)
    if there in {(), ("00000001",)}:
        assert newest_delta(tmp_path) == (0, "")
        return
    with pytest.raises(StateError, match=f"deltas/newest is missing, but delta {there[-1]} is there"):
        newest_delta(tmp_path)


def test_json_without_an_end_of_brackets(tmp_path: Path) -> None:
    text = b"[" * 200_000
    (tmp_path / MANIFEST).write_bytes(text)
    with pytest.raises(StateError, match=r"manifest\.json is damaged: it is no manifest"):
        read_manifest(tmp_path)
    path = tmp_path / "t.safetensors"
    path.write_bytes(len(text).to_bytes(8, "little") + text)
    with pytest.raises(ConfigError, match=r"t\.safetensors is neither Parquet nor safetensors"):
        SafetensorsFile(path, 4)


def test_ids_that_a_delta_cannot_hold_are_none_of_it() -> None:
    file = FileEntry(name="removed/c/t/00000.ids", rank=0, bytes=16, sha256="", rows=3)
    with pytest.raises(ValueError, match="3 ids in 16 bytes"):
        RemovedEntry(collection="c", table="t", file=file)
