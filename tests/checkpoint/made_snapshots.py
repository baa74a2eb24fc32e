"""Snapshots and deltas made of given rows, without a model and without training."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from hybridrec.checkpoint.delta_chain import DeltaManifest, RemovedEntry, delta_folder
from hybridrec.checkpoint.files import write_file, write_rows
from hybridrec.checkpoint.manifest import MANIFEST, CollectionEntry, Manifest, TableEntry
from hybridrec.checkpoint.points import read_point
from hybridrec.checkpoint.saved_initializers import Banks
from hybridrec.checkpoint.saved_tables import layout_of
from hybridrec.checkpoint.small_files import encoded
from hybridrec.row_type import RowType
from hybridrec.store.row_export import RowChunk
from hybridrec.store.row_state_layout import RowStateLayout

STATES = (("sum", False), ("steps", True))


def rows_of(num_rows: int, dim: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Ids of the whole int64 range, ascending, and any weights."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(-(2**63), 2**63 - 1, (num_rows,), generator=generator)
    ids[:4] = torch.tensor([0, -1, -(2**63), 2**63 - 1])[:num_rows]
    ids = ids.unique()
    return ids, torch.randn((len(ids), dim), generator=generator).to(dtype)


def table_in(
    folder: Path,
    name: str,
    ids: Tensor,
    weights: Tensor,
    *,
    chunk_rows: int = 7,
    num_ranks: int = 1,
    is_whole: bool = False,
    initializer: str = "Uniform(low=-0.5, high=0.25)",
) -> TableEntry:
    """Write a table's files: rows are dealt to ranks in turn, or one rank has all."""
    entry = TableEntry(
        name=name,
        is_row_wise=not is_whole,
        dim=weights.shape[1],
        states=STATES,
        optimizer={"kind": "adagrad"},
        seed=5,
        initializer=initializer,
        max_rows=None,
        chunk_rows=chunk_rows,
        row_type=RowType.of(weights.dtype).name,
    )
    files = []
    for rank in range(num_ranks):
        mine = slice(rank, None, num_ranks)
        rows = _GivenRows(ids[mine], weights[mine], layout_of(entry))
        files.append(write_rows(folder, f"rows/{name}/{rank:05d}.rows", rows, chunk_rows, rank))
    return TableEntry(**{**vars(entry), "files": tuple(files)})


def snapshot_of(folder: Path, *collections: list[TableEntry], banks: Banks | None = None) -> Path:
    """The manifest of tables that `table_in` wrote."""
    dense = encoded({"model": {}, "optimizer": None} | ({} if banks is None else {"banks": banks}))
    ranks = {file.rank for tables in collections for table in tables for file in table.files}
    manifest = Manifest(
        step=1,
        world_size=max(ranks, default=0) + 1,
        collections=tuple(
            CollectionEntry(name=f"c{i}", ordinal=1, batches_committed=1, tables=tuple(tables))
            for i, tables in enumerate(collections)
        ),
        dense=write_file(folder, "dense.pt", dense, 0),
        ranks=(),
    )
    write_file(folder, MANIFEST, manifest.encode(), 0)
    return folder


def delta_of(snapshot: Path, number: int, tables: list[TableEntry], removed: dict[str, list[Tensor]]) -> Path:
    """A delta behind those that are there. ``removed``: table -> ids of each rank."""
    folder = delta_folder(snapshot, number)
    previous = read_point(snapshot if number == 1 else delta_folder(snapshot, number - 1)).digest
    files = [
        RemovedEntry(
            collection="c0",
            table=name,
            file=replace(
                write_file(folder, f"removed/{name}/{rank:05d}.ids", ids.numpy().tobytes(), rank), rows=len(ids)
            ),
        )
        for name, by_rank in removed.items()
        for rank, ids in enumerate(by_rank)
    ]
    ranks = [file.rank for table in tables for file in table.files] + [entry.file.rank for entry in files]
    manifest = DeltaManifest(
        number=number,
        previous=previous,
        step=1 + number,
        world_size=max(ranks, default=0) + 1,
        collections=(CollectionEntry(name="c0", ordinal=1, batches_committed=1, tables=tuple(tables)),),
        removed=tuple(files),
        dense=write_file(folder, "dense.pt", encoded({"model": {}, "optimizer": None}), 0),
        ranks=(),
    )
    write_file(folder, MANIFEST, manifest.encode(), 0)
    (snapshot / "deltas" / "newest").write_text(f"{number} {manifest.digest}")
    return folder


class _GivenRows:
    """Rows as `write_rows` reads those of a shard."""

    def __init__(self, ids: Tensor, weights: Tensor, layout: RowStateLayout) -> None:
        states = {"sum": torch.ones(weights.shape), "steps": torch.ones(len(ids))}
        chunk = RowChunk(ids_N=ids, scores_N=torch.ones_like(ids), weights_ND=weights, states=states)
        self._columns = ids, chunk.scores_N, chunk.records(layout)
        self.layout, self.num_left = layout, len(ids)

    def read(self, *into: Tensor) -> None:
        for whole, part in zip(self._columns, into, strict=True):
            part.copy_(whole[len(whole) - self.num_left :][: len(part)])
        self.num_left -= len(into[0])

    def close(self) -> None:
        pass
