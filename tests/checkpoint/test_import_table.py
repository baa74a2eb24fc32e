"""Parquet and safetensors files come into a sharded model by id, whoever wrote them; what is wrong changes nothing."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from hybridrec import ConfigError, StateError, checkpoint
from hybridrec.checkpoint import table_import
from hybridrec.row_type import RowType
from tests.checkpoint.runs import Records, build, records_of
from tests.checkpoint.test_export import EXPORTS, every_format
from tests.checkpoint.test_safetensors import save_small_chunks
from tests.checkpoint.test_without_torchrec import run
from tests.distributed.oracle import Table, owner
from tests.distributed.pipelines import all_batches, mine
from tests.distributed.scenario import TABLES, Scenario
from tests.distributed.test_sharding_types import MIXED
from tests.ranks import RankPools

TYPED = tuple(replace(t, row_type=row_type) for t, row_type in zip(MIXED, ["bfloat16", "float16"] * 3, strict=True))
ROW_WISE = tuple(replace(t, row_type=r) for t, r in zip(TABLES, ["float16", "float32", "bfloat16"], strict=True))
SMALL = Scenario(optimizer="adam", steps=3, ids_per_table=40)
DIM = 8
IDS = [5, -1, 2**63 - 1, -(2**63), 0, *range(100, 125)]


def import_all(scenario: Scenario, folder: Path, kind: str) -> tuple[Records, list[int]]:
    """Of a new model; a batch is trained afterwards."""
    dmp, pipeline = build(scenario)
    with mock.patch.object(table_import, "CHUNK_BYTES", 1000):
        rows = [checkpoint.import_table(dmp, t.name, folder / f"{t.name}.{kind}") for t in scenario.tables]
    records = records_of(dmp)
    pipeline.progress(iter(mine(scenario, all_batches(scenario))))
    return records, rows


def weights_of(records: Sequence[Records], tables: Sequence[Table]) -> dict[str, dict[int, bytes]]:
    """Table, or columns -> id -> the bytes of its weights; of all ranks."""
    found: dict[str, dict[int, bytes]] = {}
    for one in records:
        for name, rows in one.items():
            table = next(t for t in tables if t.name == name.partition("[")[0])
            first, last = map(int, name[:-1].partition("[")[2].split(":")) if "[" in name else (0, table.dim)
            num_bytes = 4 * RowType[table.row_type.upper()].num_words(last - first)
            assert not found.get(name, {}).keys() & rows.keys(), "an id on two ranks"
            found.setdefault(name, {}).update({i: record[:num_bytes] for i, (record, _) in rows.items()})
    return found


@every_format
@pytest.mark.parametrize(
    ("tables", "before", "after"),
    [(MIXED, 2, 3), (TYPED, 3, 2), (ROW_WISE, 2, 1), (ROW_WISE, 1, 3)],
    ids=["mixed", "mixed of 16 bits", "to one rank", "from one rank"],
)
def test_round_trip(
    pools: RankPools, tmp_path: Path, kind: str, tables: tuple[Table, ...], before: int, after: int
) -> None:
    scenario = replace(SMALL, tables=tables)
    saved = pools[before].run(save_small_chunks, scenario, tmp_path / "s")
    EXPORTS[kind](tmp_path / "s", tmp_path / "out")
    found = pools[after].run(import_all, scenario, tmp_path / "out", kind)
    expected = weights_of(saved, tables)
    assert weights_of([records for records, _ in found], tables) == expected and all(map(len, expected.values()))
    for rank, (records, rows) in enumerate(found):
        assert rows == [len(next(r for n, r in expected.items() if n.partition("[")[0] == t.name)) for t in tables]
        for table in tables:
            if not table.owners:
                assert {owner(id_, after) for id_ in records[table.name]} == {rank}
                states = [r[-8 * table.dim :] for r, _ in records[table.name].values()]
                assert set(states) == {bytes(8 * table.dim)}


# ---- files of others -------------------------------------------------------------------------------------------------


def write_safetensors(path: Path, tensors: dict[str, Tensor], **changed: Any) -> Path:
    names = {torch.int64: "I64", torch.float32: "F32", torch.float16: "F16", torch.float64: "F64", torch.int32: "I32"}
    header: dict[str, Any] = {"__metadata__": {"made": "by hand"}}
    data = b""
    for name, tensor in tensors.items():
        more = tensor.contiguous().view(torch.uint8).numpy().tobytes()
        offsets = [len(data), len(data) + len(more)]
        entry = {"dtype": names[tensor.dtype], "shape": list(tensor.shape), "data_offsets": offsets}
        header[name] = entry | changed.get(name, {})
        data += more
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)
    return path


def write_parquet(path: Path, ids: Any, embeddings: Any, *, group: int = 4, **more: Any) -> Path:
    pq.write_table(
        pa.table({"embedding": embeddings, "id": ids, **more}), path, row_group_size=group, write_page_checksum=True
    )
    return path


def rows() -> list[list[float]]:
    return torch.linspace(-2, 2, len(IDS) * DIM).to(torch.float16).view(-1, DIM).tolist()


def nested(kind: Any, values: Any = None) -> pa.Array:
    return pa.array(rows() if values is None else values, kind)


def good_files(folder: Path) -> list[Path]:
    ids = pa.array(IDS)
    tensors = {"note": torch.ones(3, dtype=torch.int32), "embedding": torch.tensor(rows()), "id": torch.tensor(IDS)}
    return [
        write_parquet(folder / "list.parquet", ids, nested(pa.list_(pa.float32())), name=["x"] * len(IDS)),
        write_parquet(folder / "large.parquet", ids, nested(pa.large_list(pa.float32())), group=7),
        write_parquet(folder / "half.parquet", ids, nested(pa.list_(pa.float16())), group=100),
        write_parquet(folder / "fixed.parquet", ids, nested(pa.list_(pa.float32(), DIM)), group=1),
        write_safetensors(folder / "tensors", tensors),
        write_safetensors(folder / "half", tensors | {"embedding": torch.tensor(rows()).to(torch.float16)}),
    ]


def import_each(scenario: Scenario, paths: list[Path], chunk_bytes: int) -> list[dict[int, bytes]]:
    dmp, _ = build(scenario)
    found = []
    with mock.patch.object(table_import, "CHUNK_BYTES", chunk_bytes):
        for path in paths:
            checkpoint.import_rows(dmp, "user", torch.tensor(IDS), torch.zeros((len(IDS), DIM)))
            assert checkpoint.import_table(dmp, "user", path) == len(IDS)
            found.append({i: record[: 4 * DIM] for i, (record, _) in records_of(dmp)["user"].items()})
    return found


@pytest.mark.parametrize("chunk_bytes", [1, 4 * DIM * 5, 2**20])
def test_files_of_others(pools: RankPools, tmp_path: Path, chunk_bytes: int) -> None:
    paths = good_files(tmp_path)
    everyone = pools[2].run(import_each, SMALL, paths, chunk_bytes)
    expected = {i: torch.tensor(row).numpy().tobytes() for i, row in zip(IDS, rows(), strict=True)}
    for path, one, two in zip(paths, *everyone, strict=True):
        assert one | two == expected, path


def bad_files(folder: Path) -> list[tuple[Path, str]]:
    """(file, what its error says)"""
    kind, ids, values = pa.list_(pa.float32()), pa.array(IDS), rows()
    tensors = {"id": torch.tensor(IDS), "embedding": torch.tensor(values)}
    (folder / "text").write_text("id,embedding\n1,2\n")
    (folder / "short").write_bytes(b"PA")
    whole = write_parquet(folder / "whole", ids, nested(kind)).read_bytes()
    (folder / "cut").write_bytes(whole[: len(whole) // 2])
    (folder / "torn").write_bytes(whole[:50] + bytes(60) + whole[110:])
    again = [*IDS[:-1], IDS[2]]
    nan = [*values[:7], [float("nan")] * DIM, *values[8:]]
    infinite = [*values[:-1], [float("inf"), *values[0][1:]]]
    parquet = {
        "missing": ({}, "missing cannot be read: No such file"),
        "int32": ({"ids": ids.cast(pa.int32(), safe=False)}, "has the column 'id' as int32. Accepted: int64"),
        "double": ({"embeddings": nested(pa.list_(pa.float64()))}, "'embedding' as list<element: double>. Accepted"),
        "flat": ({"embeddings": pa.array([1.0] * len(IDS))}, "'embedding' as double. Accepted: lists of float32"),
        "dim": ({"embeddings": nested(pa.list_(pa.float32(), 4), [r[:4] for r in values])}, "of 4 columns, the table"),
        "ragged": ({"embeddings": nested(kind, [*values[:9], [1.0], *values[10:]])}, r"of 1 \(id 104\) columns, the"),
        "no_id": ({"ids": pa.array([*IDS[:6], None, *IDS[7:]])}, "has 1 rows without an id"),
        "no_row": ({"embeddings": nested(kind, [*values[:6], None, *values[7:]])}, "no embedding of id 101"),
        "hole": ({"embeddings": nested(kind, [*values[:8], [None, *values[8][1:]], *values[9:]])}, "of id 103. Fill"),
        "twice": ({"ids": pa.array(again)}, f"has 1 ids more than once, such as {IDS[2]}"),
        "nan": ({"embeddings": nested(kind, nan)}, "has 1 embeddings with NaN or infinity, such as that of id 102"),
    }
    found = [(folder / "text", "is neither Parquet nor safetensors"), (folder / "short", "is neither Parquet nor")]
    found += [(folder / "cut", "cannot be read as Parquet"), (folder / "torn", "cannot be read as Parquet")]
    for name, (changed, message) in parquet.items():
        if changed:
            write_parquet(folder / name, **{"ids": ids, "embeddings": nested(kind)} | changed)
        found.append((folder / name, message))
    pq.write_table(pa.table({"key": ids, "embedding": nested(kind)}), folder / "names")
    found.append((folder / "names", r"has the columns \['key', 'embedding'\]. Needed: one 'id'"))
    many = len(values) * DIM * 4
    for name, changed, edits, message in (
        ("s_names", {"ids": tensors["id"]}, {}, r"has no tensor 'id', but \['embedding', 'ids'\]. Needed"),
        (
            "s_double",
            {"embedding": tensors["embedding"].double()},
            {},
            r"has 'embedding' as F64 \[30, 8\]. Accepted",
        ),
        ("s_int32", {"id": tensors["id"].int()}, {}, r"has 'id' as I32 \[30\]. Accepted: I64 \[R\]"),
        ("s_dim", {"embedding": tensors["embedding"][:, :4]}, {}, "of 4 columns, the table has 8"),
        ("s_rows", {"id": tensors["id"][1:]}, {}, "has 29 ids and 30 embeddings"),
        ("s_flat", {"embedding": tensors["embedding"].flatten()}, {}, r"has 'embedding' as F32 \[240\]"),
        ("s_end", {}, {"embedding": {"data_offsets": [many, 2 * many]}}, "is damaged: tensor 'embedding'"),
        ("s_size", {}, {"id": {"shape": [31]}}, "is damaged: tensor 'id'"),
        ("s_minus", {}, {"id": {"shape": [-30], "data_offsets": [240, 0]}}, "is damaged: tensor 'id'"),
        ("s_none", {}, {"id": {"data_offsets": None}}, "is damaged: tensor 'id'"),
        ("s_twice", {"id": torch.tensor(again)}, {}, "has 1 ids more than once"),
        ("s_inf", {"embedding": torch.tensor(infinite)}, {}, "such as that of id 124. Remove them, or pass allow"),
    ):
        kept = {n: t for n, t in tensors.items() if (n, "ids") not in [("id", c) for c in changed]}
        found.append((write_safetensors(folder / name, kept | changed, **edits), message))
    return found


def import_bad(scenario: Scenario, paths: list[Path], others: list[Path]) -> list[str]:
    dmp, _ = build(scenario)
    checkpoint.import_rows(dmp, "user", torch.tensor([1, 2, 3]), torch.ones((3, DIM)))
    before = records_of(dmp)
    messages = []
    last = dist.get_rank() == dist.get_world_size() - 1
    with mock.patch.object(table_import, "CHUNK_BYTES", 4 * DIM * 7):
        for path in [*paths, others[last]]:
            try:
                checkpoint.import_table(dmp, "user", path)
                messages.append("taken")
            except ConfigError as e:
                messages.append(str(e))
            assert records_of(dmp) == before, path
        with pytest.raises(ConfigError, match="no collection has the table 'users'"):
            checkpoint.import_table(dmp, "users", paths[0])
        assert checkpoint.import_table(dmp, "user", others[0]) == len(IDS)  # as well as ever
    loss = dmp(mine(scenario, all_batches(scenario)[:1])[0])[0]
    with pytest.raises(StateError, match="batches are in flight"):
        checkpoint.import_table(dmp, "user", others[0])
    loss.backward()
    return messages


def test_bad_files_change_nothing_on_any_rank(pools: RankPools, tmp_path: Path) -> None:
    bad, good = bad_files(tmp_path), good_files(tmp_path)
    other = write_parquet(tmp_path / "other", pa.array([*IDS[:-1], 77]), nested(pa.list_(pa.float32())))
    everyone = pools[2].run(import_bad, SMALL, [path for path, _ in bad], [good[0], other])
    assert everyone[0][:-1] == everyone[1][:-1]  # the last names the path that each rank was given
    for (path, wanted), message in zip([*bad, (other, "the ranks see different files as")], everyone[0], strict=True):
        assert re.search(wanted, message) and (path == other or str(path) in message)


def import_extreme(scenario: Scenario, large: Path, nan: Path) -> bytes:
    dmp, _ = build(scenario)
    with mock.patch.object(table_import, "CHUNK_BYTES", 1):  # the first chunk could be had
        with pytest.raises(ConfigError, match="weights reach 70000, table 'user' holds torch.float16, up to 65504"):
            checkpoint.import_table(dmp, "user", large)
    assert records_of(dmp)["user"] == {}
    checkpoint.import_table(dmp, "user", nan, allow_nonfinite=True)
    return records_of(dmp)["user"][7][0][: 2 * DIM]


def test_values_beyond_the_type_are_refused_and_nan_is_taken_when_asked(pools: RankPools, tmp_path: Path) -> None:
    scenario = replace(SMALL, tables=ROW_WISE)
    ids, row = torch.tensor([6, 7]), torch.ones((2, DIM))
    large = write_safetensors(tmp_path / "large", {"id": ids, "embedding": torch.cat([row[:1], row[1:] * 7e4])})
    row[1, :3] = torch.tensor([float("nan"), float("inf"), -float("inf")])
    nan = write_safetensors(tmp_path / "nan", {"id": ids, "embedding": row})
    (found,) = pools[1].run(import_extreme, scenario, large, nan)
    assert found == row[1].to(torch.float16).numpy().tobytes()


PEAK = """
import json, re
from pathlib import Path
from hybridrec.checkpoint.parquet import ParquetFile
peaks = []
for path in sys.argv[1:]:
    file = ParquetFile(Path(path), 64)
    count = sum(len(ids) for ids, _ in file.chunks(32768))
    (peak,) = re.findall(r"VmHWM:\\s*(\\d+) kB", open("/proc/self/status").read())
    peaks.append((file._file.num_row_groups, count, int(peak) * 1024))
print(json.dumps(peaks))
"""


def test_memory_does_not_grow_with_row_groups_of_others(tmp_path: Path) -> None:
    """16 MiB and 160 MiB in one row group."""
    counts, paths = [64_000, 640_000], [tmp_path / "small", tmp_path / "large"]
    for count, path in zip(counts, paths, strict=True):
        values = pa.array(torch.rand(count * 64).numpy())
        write_parquet(path, pa.array(range(count)), pa.FixedSizeListArray.from_arrays(values, 64), group=count)
    done = run(PEAK, *map(str, paths))
    assert done.returncode == 0, done.stderr
    (one, small_count, small), (also_one, large_count, large) = json.loads(done.stdout)
    assert one == also_one == 1 and [small_count, large_count] == counts
    assert large - small < 64 * 2**20
