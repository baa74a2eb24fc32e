"""Tables of snapshots as Parquet and safetensors files, as others read them."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from torch import Tensor

from hybridrec import ConfigError, StateError, checkpoint
from hybridrec.checkpoint import parquet, saved_tables
from hybridrec.checkpoint.__main__ import main
from tests.checkpoint.made_snapshots import rows_of, snapshot_of, table_in
from tests.checkpoint.test_safetensors import read
from tests.checkpoint.test_without_torchrec import run

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
EXPORTS = {"safetensors": checkpoint.export_safetensors, "parquet": checkpoint.export_parquet}
every_format = pytest.mark.parametrize("kind", EXPORTS)


def read_parquet(path: Path) -> tuple[Tensor, Tensor]:
    """(ids, float32 embeddings), and that the file is what is promised."""
    table = pq.read_table(path)
    assert table.schema.names == ["id", "embedding"] and table.schema.field("id").type == pa.int64()
    kind = table.schema.field("embedding").type
    assert pa.types.is_fixed_size_list(kind) and kind.value_type == pa.float32()
    values = table["embedding"].combine_chunks().flatten().to_numpy()
    return torch.tensor(table["id"].to_numpy().copy()), torch.from_numpy(values.copy()).view(-1, kind.list_size)


def read_safetensors(path: Path) -> tuple[Tensor, Tensor]:
    header, tensors = read(path)
    dtype = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}[header["embedding"]["dtype"]]
    embeddings = torch.from_numpy(tensors["embedding"].copy())
    return torch.from_numpy(tensors["id"].copy()), embeddings if dtype == torch.float32 else embeddings.view(dtype)


READERS: dict[str, Callable[[Path], tuple[Tensor, Tensor]]] = {
    "safetensors": read_safetensors,
    "parquet": read_parquet,
}


def by_id(ids: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    order = ids.argsort()
    return ids[order], weights[order]


@every_format
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("chunk_bytes", [1, 12 * 4 * 5, 2**20])
def test_files_hold_the_rows(tmp_path: Path, kind: str, dtype: torch.dtype, chunk_bytes: int) -> None:
    """Rows a chunk: 1, a number that fits no chunk of the snapshot, all."""
    ids, weights = rows_of(100, 5, dtype)
    none = torch.empty(0, dtype=torch.int64), torch.empty((0, 3), dtype=dtype)
    snapshot_of(
        tmp_path / "s",
        [table_in(tmp_path / "s", "user", ids, weights, num_ranks=3), table_in(tmp_path / "s", "none", *none)],
    )
    told: list[int] = []
    with mock.patch.object(saved_tables, "EXPORT_CHUNK_BYTES", chunk_bytes):
        files = EXPORTS[kind](tmp_path / "s", tmp_path / "out", progress=told.append)
    assert files == [tmp_path / "out" / f"user.{kind}", tmp_path / "out" / f"none.{kind}"]
    assert sorted((tmp_path / "out").iterdir()) == sorted(files) and sum(told) == 100
    assert max(told) == max(1, min(100, chunk_bytes // (5 * dtype.itemsize)))
    found_ids, found = READERS[kind](files[0])
    assert found.dtype == (torch.float32 if kind == "parquet" else dtype)
    found_ids, found = by_id(found_ids, found)
    assert torch.equal(found_ids, ids) and torch.equal(found, weights.to(found.dtype))
    assert READERS[kind](files[1])[1].shape == (0, 3)


@every_format
def test_columns_come_as_one_table(tmp_path: Path, kind: str) -> None:
    ids, weights = rows_of(40, 9)
    parts = [(4, 9), (0, 3), (3, 4)]  # in any order; no rank has a chunk as another has it
    tables = [
        table_in(tmp_path / "s", f"town[{a}:{b}]", ids, weights[:, a:b], chunk_rows=3 + a, is_whole=True)
        for a, b in parts
    ]
    tables.append(table_in(tmp_path / "s", "odd[1:2]", ids, weights))  # a name like any other
    with mock.patch.object(saved_tables, "EXPORT_CHUNK_BYTES", 9 * 4 * 11):
        EXPORTS[kind](snapshot_of(tmp_path / "s", tables), tmp_path / "out")
    for name in ("town", "odd[1:2]"):
        found_ids, found = READERS[kind](tmp_path / "out" / f"{name}.{kind}")
        assert torch.equal(found_ids, ids) and torch.equal(found, weights)


@every_format
@pytest.mark.parametrize("kept", [39, 40])
def test_columns_of_other_ids_are_refused(tmp_path: Path, kind: str, kept: int) -> None:
    ids, weights = rows_of(40, 4)
    others = ids[:kept].clone()
    others[9] += kept == 40
    tables = [
        table_in(tmp_path / "s", "town[0:2]", ids, weights[:, :2], is_whole=True),
        table_in(tmp_path / "s", "town[2:4]", others, weights[:kept, 2:], is_whole=True),
    ]
    with pytest.raises(StateError, match="table 'town' of .*/s has columns whose ids differ"):
        EXPORTS[kind](snapshot_of(tmp_path / "s", tables), tmp_path / "out")
    assert list((tmp_path / "out").iterdir()) == []


@every_format
def test_what_cannot_be_exported_is_refused(tmp_path: Path, kind: str) -> None:
    rows = rows_of(20, 4)
    here = tmp_path / "s"
    tables = [table_in(here, "user", *rows), table_in(here, "item", *rows), table_in(here, "a/b", *rows)]
    snapshot_of(here, tables, [tables[1]], [table_in(here, "a_b", *rows)])
    export, out = EXPORTS[kind], tmp_path / "out"
    with pytest.raises(ConfigError, match="two collections of the snapshot have a table 'item'"):
        export(here, out)
    with pytest.raises(ConfigError, match=r"no table 'word' in the snapshot. Tables: \['a/b', 'a_b', 'item', 'item', "):
        export(here, out, tables=["user", "word"])
    with pytest.raises(ConfigError, match=f"a_b.{kind} would be the file of two tables"):
        export(here, out, tables=["a/b", "a_b"])
    assert not out.exists()
    out.mkdir()
    (out / f"user.{kind}").write_text("mine")
    with pytest.raises(ConfigError, match=f"user.{kind} exists. Remove or rename it"):
        export(here, out, tables=["user"])
    assert (out / f"user.{kind}").read_text() == "mine"


@every_format
def test_a_damaged_snapshot_is_refused(tmp_path: Path, kind: str) -> None:
    snapshot_of(tmp_path / "s", [table_in(tmp_path / "s", "user", *rows_of(20, 4))])
    (file,) = (tmp_path / "s").rglob("*.rows")
    content = bytearray(file.read_bytes())
    content[-20] ^= 1
    file.write_bytes(content)
    with pytest.raises(StateError, match="00000.rows is damaged: its contents are not what was written"):
        EXPORTS[kind](tmp_path / "s", tmp_path / "out")
    assert not (tmp_path / "out").exists()


@every_format
def test_a_failure_leaves_nothing(tmp_path: Path, kind: str) -> None:
    snapshot_of(tmp_path / "s", [table_in(tmp_path / "s", "user", *rows_of(20, 4))])

    def fail(rows: int) -> None:
        raise OSError("No space left on device")

    with pytest.raises(OSError, match="No space left"):
        EXPORTS[kind](tmp_path / "s", tmp_path / "out", progress=fail)
    assert list((tmp_path / "out").iterdir()) == []


def test_row_groups_can_be_told_apart_by_id(tmp_path: Path) -> None:
    snapshot_of(tmp_path / "s", [table_in(tmp_path / "s", "user", *rows_of(40, 4))])
    with mock.patch.object(saved_tables, "EXPORT_CHUNK_BYTES", 4 * 4 * 10):
        (file,) = checkpoint.export_parquet(tmp_path / "s", tmp_path / "out")
    metadata = pq.ParquetFile(file).metadata
    spans = [metadata.row_group(g).column(0).statistics for g in range(metadata.num_row_groups)]
    assert len(spans) == 4 and all(a.max < b.min for a, b in zip(spans, spans[1:], strict=False))


def test_the_tool(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = rows_of(20, 4)
    snapshot_of(tmp_path / "s", [table_in(tmp_path / "s", name, *rows) for name in ("user", "item")])
    arguments = ["export", str(tmp_path / "s"), str(tmp_path / "out"), "--format", "parquet", "--table"]
    assert main([*arguments, "user"]) == 0
    captured = capsys.readouterr()
    assert captured.out == f"{tmp_path}/out/user.parquet\n" and captured.err == ""  # no bar where nobody looks
    assert torch.equal(read_parquet(tmp_path / "out" / "user.parquet")[1], rows[1])
    with mock.patch("sys.stderr.isatty", return_value=True):
        assert main([*arguments, "item"]) == 0
    assert "100%" in (error := capsys.readouterr().err) and "20.0/20.0" in error
    (tmp_path / "file").touch()
    assert main(["export", str(tmp_path / "s"), str(tmp_path / "file" / "out")]) == 2
    assert "NotADirectoryError: " in capsys.readouterr().err
    assert main([*arguments, "word"]) == 2
    assert "ConfigError: there is no table 'word' in the snapshot" in capsys.readouterr().err
    with pytest.raises(ConfigError, match=r"tables='user' is one string. Pass a list of names: tables=\['user'\]"):
        checkpoint.export_safetensors(tmp_path / "s", tmp_path / "out", tables="user")


def test_parquet_without_pyarrow(tmp_path: Path) -> None:
    with mock.patch.object(parquet.importlib, "import_module", side_effect=ImportError("no pyarrow")):
        with pytest.raises(ConfigError, match=r"cannot be imported \(no pyarrow\). Install it: pip install pyarrow."):
            checkpoint.export_parquet(tmp_path, tmp_path / "out")


def test_exports_need_no_torchrec(tmp_path: Path) -> None:
    ids, weights = rows_of(20, 4)
    snapshot_of(tmp_path / "s", [table_in(tmp_path / "s", "user", ids, weights)])
    code = "from hybridrec.checkpoint.__main__ import main; [main([*sys.argv[1:], kind]) for kind in {}]"
    done = run(code.format(list(EXPORTS)), "export", str(tmp_path / "s"), str(tmp_path / "out"), "--format")
    assert done.returncode == 0, done.stderr
    for kind, read_file in READERS.items():
        assert torch.equal(read_file(tmp_path / "out" / f"user.{kind}")[1], weights)


PEAK = """
import json, re
from hybridrec import checkpoint
export = getattr(checkpoint, "export_" + sys.argv[3])
peaks = []
for name in ("small", "large"):
    export(sys.argv[1], sys.argv[2], tables=[name])
    (peak,) = re.findall(r"VmHWM:\\s*(\\d+) kB", open("/proc/self/status").read())
    peaks.append(int(peak) * 1024)
print(json.dumps(peaks))
"""


@every_format
def test_memory_does_not_grow_with_the_table(tmp_path: Path, kind: str) -> None:
    """16 MiB and 160 MiB: both are more than a chunk, and the second takes hardly more than the first."""
    ids, weights = torch.arange(640_000), torch.from_numpy(np.zeros((640_000, 64), np.float32))
    sizes = {"small": 64_000, "large": 640_000}
    tables = [table_in(tmp_path / "s", n, ids[:r], weights[:r], chunk_rows=500) for n, r in sizes.items()]
    snapshot_of(tmp_path / "s", tables)
    done: subprocess.CompletedProcess[str] = run(PEAK, str(tmp_path / "s"), str(tmp_path / "out"), kind)
    assert done.returncode == 0, done.stderr
    small, large = json.loads(done.stdout)
    assert (tmp_path / "out" / f"large.{kind}").stat().st_size > 160 * 2**20
    assert large - small < 64 * 2**20
