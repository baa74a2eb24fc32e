"""Entries of a manifest, made of a model's tables and of the files that its ranks wrote."""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
from pathlib import Path
from typing import Any

from hybridrec.checkpoint.manifest import CollectionEntry, FileEntry, TableEntry
from hybridrec.checkpoint.sharded import ShardedWriter
from hybridrec.distributed.routing import TablePart
from hybridrec.distributed.shard_table import ShardTable
from hybridrec.distributed.sharded_collection import ShardedHashCollection
from hybridrec.errors import ConfigError
from hybridrec.store.row_export import rows_of_chunk

_LONGEST_NAME = 255
"""Bytes of the name of a file or folder, on about every file system."""


def files_of(
    writer: ShardedWriter | None, folder: Path, parts: list[tuple[list[FileEntry], list[Any]]]
) -> tuple[FileEntry, ...]:
    """The files of sharded tensors, the last one written now. On one rank.

    Args:
        writer: None: there are no such tensors.
        folder: Of the snapshot or delta.
        parts: What `ShardedWriter.write` gave, of every rank.
    """
    if writer is None:
        return ()
    files = [file for found, _ in parts for file in found]
    for file in files:
        require_here(folder, file)
    return (*files, writer.finish([results for _, results in parts]))


def require_here(folder: Path, file: FileEntry) -> None:
    """Raise `ConfigError` unless this rank, too, sees what a rank wrote."""
    path = folder / file.name
    if not path.is_file() or path.stat().st_size != file.bytes:
        raise ConfigError(
            f"save: rank {file.rank} wrote {file.name}, and rank 0 does not find it in {folder}. Save to a folder that "
            "all ranks share."
        )


def collection_entry(name: str, module: ShardedHashCollection) -> CollectionEntry:
    """A collection as it is now, without files."""
    log = module.lookup.log
    tables = tuple(itertools.starmap(table_entry, zip(module.parts, module.lookup.tables, strict=True)))
    return CollectionEntry(name=name, ordinal=log.committed_ordinal, batches_committed=log.committed, tables=tables)


def with_files(entry: CollectionEntry, files: dict[tuple[str, str], FileEntry]) -> CollectionEntry:
    """A rank's entry, with what it has written."""
    tables = (dataclasses.replace(table, files=(files[entry.name, table.name],)) for table in entry.tables)
    return dataclasses.replace(entry, tables=tuple(tables))


def merged(entries: tuple[CollectionEntry, ...]) -> CollectionEntry:
    """One collection, of the entries that its ranks have: tables that one rank has alone are in its entry only."""
    tables: dict[str, TableEntry] = {}
    for entry in entries:
        for table in entry.tables:
            known = tables.get(table.name)
            files = table.files if known is None else (*known.files, *table.files)
            tables[table.name] = dataclasses.replace(table, files=files)
    return dataclasses.replace(entries[0], tables=tuple(tables.values()))


def table_entry(part: TablePart, table: ShardTable) -> TableEntry:
    """A table, or columns of one, as it is now, without files."""
    config = part.table
    states = (*table.layout.row_states, *table.layout.row_wise_states)
    return TableEntry(
        name=table.name,
        is_row_wise=part.owner is None,
        dim=table.layout.dim,
        states=tuple((s.name, s.is_row_wise) for s in states),
        optimizer=dataclasses.asdict(table.optimizer),
        seed=config.seed,
        initializer=repr(config.initializer),
        max_rows=config.max_rows,
        chunk_rows=rows_of_chunk(table.layout),
        row_type=table.layout.row_type.name,
    )


def folder_name(name: str) -> str:
    """A name as that of a folder; different names stay different."""
    safe = "".join(c if c.isalnum() or c in "-_" else f"%{ord(c):x}%" for c in name)
    if len(safe.encode()) > _LONGEST_NAME:
        beginning = safe.encode()[: _LONGEST_NAME - 66].decode(errors="ignore")
        return f"{beginning}%%{hashlib.sha256(name.encode()).hexdigest()}"
    return safe or "%"
