"""``python -m hybridrec.checkpoint inspect PATH``, ``diff A B``, ``export PATH OUT``, ``recsdk PATH``.

Needs no model, no device.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import torch

from hybridrec.checkpoint.delta_chain import DeltaManifest
from hybridrec.checkpoint.manifest import Manifest, TableEntry, read_manifest
from hybridrec.checkpoint.parquet import export_parquet
from hybridrec.checkpoint.points import Point, newest_point, read_point, rows_at
from hybridrec.checkpoint.recsdk_files import read_recsdk
from hybridrec.checkpoint.safetensors import export_safetensors
from hybridrec.checkpoint.saved_tables import layout_of, saved_tables
from hybridrec.checkpoint.sharded import ShardedReader
from hybridrec.checkpoint.sorted_rows import in_step, sorted_rows
from hybridrec.errors import ConfigError, HybridRecError
from hybridrec.store.row_export import RowChunk
from hybridrec.store.row_state_layout import RowStateLayout

_DIFFERENCES = ("only in the first", "only in the second", "with other values", "with other last use")
_EXPORTS = {"safetensors": export_safetensors, "parquet": export_parquet}


def main(arguments: Sequence[str] | None = None) -> int:
    """0: fine, and for ``diff``: equal; 1: they differ; 2: damaged, wrong arguments, or no file could be made."""
    parser = argparse.ArgumentParser(prog="python -m hybridrec.checkpoint", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    inspect = commands.add_parser("inspect", help="tables, rows, optimizer, step, sizes of a snapshot")
    inspect.add_argument(
        "path", type=Path, help="a folder of snapshots: the newest with its deltas; a snapshot; a delta"
    )
    inspect.add_argument("--verify", action="store_true", help="compare every file with its hash, those of deltas too")
    inspect.add_argument("--id", nargs=2, metavar=("TABLE", "ID"), help="print the row of an id")
    diff = commands.add_parser("diff", help="what two snapshots, or deltas with all before them, have different")
    diff.add_argument("a", type=Path, help="as PATH of inspect; the exit status is 0 if both are equal, 1 if not")
    diff.add_argument("b", type=Path)
    export = commands.add_parser("export", help="write each table to OUT/TABLE.safetensors or .parquet: id, embedding")
    export.add_argument("path", type=Path, help="as PATH of inspect")
    export.add_argument("out", type=Path, help="a folder; it is made if missing, its files are never replaced")
    export.add_argument("--format", choices=tuple(_EXPORTS), default="safetensors", help="default: safetensors")
    export.add_argument("--table", action="append", metavar="TABLE", help="only this one; may be repeated")
    recsdk = commands.add_parser("recsdk", help="tables, rows, moments of what a Saver of RecSDK wrote")
    recsdk.add_argument("path", type=Path, help="the folder that was given to Saver.save")
    options = parser.parse_args(arguments)
    try:
        if options.command == "inspect":
            return _inspect(options.path, is_verified=options.verify, wanted=options.id)
        if options.command == "export":
            return _export(options.path, options.out, options.format, options.table)
        if options.command == "recsdk":
            print(read_recsdk(options.path))
            return 0
        return _diff(options.a, options.b)
    except (HybridRecError, OSError) as e:
        print(f"{type(e).__name__}: {e}", file=sys.stderr)
        return 2


def _export(path: Path, out: Path, kind: str, tables: list[str] | None) -> int:
    point = read_point(path)
    num_rows = sum(table.most_rows for table in saved_tables(point, tables))
    with _progress_bar(None if point.number else num_rows) as progress:  # by deltas an id may be there more than once
        files = _EXPORTS[kind](path, out, tables=tables, progress=progress)
    print("\n".join(map(str, files)))
    return 0


@contextlib.contextmanager
def _progress_bar(num_rows: int | None) -> Iterator[Callable[[int], None] | None]:
    """What shows rows that were written: on a terminal, where tqdm is there (TorchRec brings it)."""
    if not sys.stderr.isatty() or importlib.util.find_spec("tqdm") is None:
        yield None
        return
    with importlib.import_module("tqdm").tqdm(total=num_rows, unit=" rows", unit_scale=True) as bar:
        yield bar.update


def _inspect(path: Path, *, is_verified: bool, wanted: tuple[str, str] | None) -> int:
    point = read_point(path)
    snapshot, manifest = point.snapshot, read_manifest(point.snapshot)
    chain = point if point.number else newest_point(snapshot)
    for layer, file in (
        chain.files() if is_verified else ()
    ):  # first: what is read below is named by what does not fit it
        layer.verify(file)
    total = sum(file.bytes for file in manifest.files())
    print(f"{snapshot}: step {manifest.step:,}, {manifest.world_size} ranks, {total:,} bytes, {_versions(manifest)}")
    for collection in manifest.collections:
        steps = f"{collection.batches_committed:,} steps, newest ordinal {collection.ordinal:,}"
        print(f"collection {collection.name!r}: {steps}")
        for table in collection.tables:
            states = ", ".join(f"{name}{' (row-wise)' if wise else ''}" for name, wise in table.states) or "none"
            print(
                f"  table {table.name!r}: {table.rows:,} rows x {table.dim}, {table.optimizer['kind']} (states: "
                f"{states}), {sum(f.bytes for f in table.files):,} bytes, rows by rank {[f.rows for f in table.files]}"
            )
    for name, (dtype, shape) in ShardedReader(snapshot, manifest.sharded).shapes.items():
        print(f"sharded by torch: {name.partition('.')[2]!r}, {dtype} {shape}")
    for layer in chain.layers:
        if isinstance(layer.manifest, DeltaManifest):
            print(_told(layer.manifest))
    if is_verified:
        print(f"{len(chain.files())} files are what was written")
    if wanted is not None:
        _print_row(point, *wanted)
    return 0


def _told(delta: DeltaManifest) -> str:
    rows = sum(table.rows for collection in delta.collections for table in collection.tables)
    removed, total = sum(entry.file.rows for entry in delta.removed), sum(file.bytes for file in delta.files())
    return (
        f"delta {delta.number}: step {delta.step:,}, {delta.world_size} ranks, {rows:,} rows changed, {removed:,} ids "
        f"removed, {total:,} bytes"
    )


def _versions(manifest: Manifest) -> str:
    return ", ".join(f"{package} {version}" for package, version in sorted(manifest.versions.items()))


def _tables(point: Point) -> dict[tuple[str, str], TableEntry]:
    return {(c.name, table.name): table for c in point.collections for table in c.tables}


def _print_row(point: Point, table_name: str, text: str) -> None:
    found = [(key, table) for key, table in _tables(point).items() if table.name == table_name]
    if not found:
        raise ConfigError(f"there is no table {table_name!r}. Tables: {[t.name for t in _tables(point).values()]}.")
    try:
        wanted = int(text)
    except ValueError:
        raise ConfigError(f"{text!r} is no id. Pass an int64.") from None
    when = f" after delta {point.number}" if point.number else ""
    for (collection, _), table in found:
        row = next(_rows_with(point, collection, table, wanted), None)
        where = f"collection {collection!r}, table {table.name!r}"
        if row is None:
            print(f"{where}: id {wanted} has no row{when}")
            continue
        print(f"{where}, id {wanted}{when}: last used by batch {row.scores_N.item()}")
        for name, values in {"weights": row.weights_ND, **row.states}.items():
            print(f"  {name}: {values.flatten().tolist()}")


def _rows_with(point: Point, collection: str, table: TableEntry, wanted: int) -> Iterator[RowChunk]:
    layout = layout_of(table)
    for chunk in rows_at(point, collection, table.name, layout):
        at = int(np.searchsorted(chunk.ids_N.numpy(), wanted))
        if at < len(chunk.ids_N) and chunk.ids_N[at].item() == wanted:
            part = slice(at, at + 1)
            records = chunk.records(layout)[part]
            yield RowChunk.of_records(chunk.ids_N[part], chunk.scores_N[part], records, layout)


def _diff(a: Path, b: Path) -> int:
    points = read_point(a), read_point(b)
    first, second = (point.last.manifest for point in points)
    differences = [
        f"{name}: {x} and {y}"
        for name, x, y in (("step", first.step, second.step), ("ranks", first.world_size, second.world_size))
        if x != y
    ]
    tables = _tables(points[0]), _tables(points[1])
    for key in sorted(tables[0].keys() | tables[1].keys()):
        name = f"collection {key[0]!r}, table {key[1]!r}"
        if key not in tables[0] or key not in tables[1]:
            differences.append(f"{name}: only in {points[key not in tables[0]].last.folder}")
            continue
        differences += _diff_table(name, points, key)
    differences += _diff_sharded(*(ShardedReader(p.last.folder, p.last.manifest.sharded) for p in points))
    if first.dense.sha256 != second.dense.sha256:
        differences.append("parameters outside of hashed tables, or the optimizer, differ")
    print("\n".join(differences) or "no difference")
    return int(bool(differences))


def _diff_sharded(a: ShardedReader, b: ShardedReader) -> list[str]:
    """Whole tensors in host memory."""
    if a.shapes != b.shapes:
        return ["tensors that torch shards have other names or shapes"]
    first, second = a.read_whole(), b.read_whole()
    return [f"{name.partition('.')[2]!r} differs" for name in first if not torch.equal(first[name], second[name])]


def _diff_table(name: str, points: tuple[Point, Point], key: tuple[str, str]) -> list[str]:
    tables = [_tables(point)[key] for point in points]
    shapes = [(table.dim, table.states) for table in tables]
    if shapes[0] != shapes[1]:
        return [f"{name}: rows are {shapes[0]} and {shapes[1]}"]
    layout = layout_of(tables[0])
    counts: Counter[str] = Counter()
    for parts in in_step([sorted_rows(point, *key, layout) for point in points]):
        counts += _count_differences(dict(parts), layout)
    found = [f"{counts[what]:,} rows {what}" for what in _DIFFERENCES if counts[what]]
    return [f"{name}: " + ", ".join(found)] if found else []


def _count_differences(rows: dict[int, RowChunk], layout: RowStateLayout) -> Counter[str]:
    """Of the rows of two points with ids in a range; a point without any is left out."""
    ids, scores, records = zip(*(_arrays(rows.get(point), layout) for point in (0, 1)), strict=True)
    common, in_a, in_b = np.intersect1d(ids[0], ids[1], assume_unique=True, return_indices=True)
    numbers = (
        len(ids[0]) - len(common),
        len(ids[1]) - len(common),
        int((records[0][in_a] != records[1][in_b]).any(axis=1).sum()),
        int((scores[0][in_a] != scores[1][in_b]).sum()),
    )
    return Counter(dict(zip(_DIFFERENCES, numbers, strict=True)))


def _arrays(rows: RowChunk | None, layout: RowStateLayout) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Ids int64 [R], scores int64 [R], records as uint32 [R, record] (so that NaN equals itself)."""
    if rows is None:
        return np.empty(0, np.int64), np.empty(0, np.int64), np.empty((0, layout.record_floats), np.uint32)
    return rows.ids_N.numpy(), rows.scores_N.numpy(), rows.records(layout).numpy().view(np.uint32)


if __name__ == "__main__":
    sys.exit(main())
