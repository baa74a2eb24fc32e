"""`import_table`: a Parquet or safetensors file of embeddings by id into a sharded model."""

from __future__ import annotations

import hashlib
from pathlib import Path

import torch
from torch import nn

from hybridrec.checkpoint.exchange import Ranks
from hybridrec.checkpoint.parquet import ParquetFile
from hybridrec.checkpoint.pretrained import check_rows, collection_with, import_rows
from hybridrec.checkpoint.row_file import RowFile
from hybridrec.checkpoint.safetensors import SafetensorsFile
from hybridrec.distributed.rows_state_dict import owner_of
from hybridrec.distributed.sharded_collection import ShardedHashCollection
from hybridrec.distributed.watchdog import watched
from hybridrec.errors import ConfigError

CHUNK_BYTES = 8 * 2**20
"""Embeddings that a rank reads at a time."""
_PARQUET = b"PAR1"


def import_table(model: nn.Module, table: str, path: str | Path, *, allow_nonfinite: bool = False) -> int:
    """Insert the rows of a file by id, or replace those that live; their optimizer state begins anew.

    The file is read twice: its ids, and with them each rank some of its embeddings; and, when both are as they should
    be, chunk by chunk into the table. A rank holds a few chunks of 8 MiB, and for the first reading 16 bytes for each
    id that is its own. How long ago the rows were used: see `import_rows`. Collective: all ranks see the file, and keep
    what they own.

    Args:
        model: What `DistributedModelParallel` returned.
        table: Its name; one collection alone may have it.
        path: A Parquet file with the columns ``id``, int64, and ``embedding``, lists of D float32 or float16 (this
            needs pyarrow), or a safetensors file with the tensors ``id``, int64 [R], and ``embedding`` [R, D] of
            float32, bfloat16 or float16; its first bytes tell. Embeddings are rounded to the table's type.
        allow_nonfinite: Whether to take embeddings with infinite values or NaN; else they are an error.

    Returns:
        R, the rows of the file.

    Raises:
        ConfigError: There is no such table; or the file is none, is damaged, has other columns or types, an id twice,
            an empty place, or a value that the table cannot hold: names it. Nothing changed.
        StateError: A batch is in flight: nothing changed. Or the host budget has no room: rows before it stay.
    """
    module = collection_with(model, table, call="import_table")
    dim = next(c.embedding_dim for c in module.table_configs if c.name == table)
    n = max(1, CHUNK_BYTES // (4 * dim))
    with watched(module.host_group, "import_table"):
        module.take_back_prepared()
        ranks = Ranks(module.host_group)
        with ranks.together():
            file = _open(Path(path), dim)
            digest = _check(Path(path), file, n, module, table, ranks, allow_nonfinite)
        if len(set(ranks.gather(digest))) > 1:
            raise ConfigError(f"import_table: the ranks see different files as {path}. Use a folder that they share.")
        chunks = file.chunks(n)
        while True:
            with ranks.together():
                chunk = next(chunks, None)
            if chunk is None:
                return file.rows
            import_rows(model, table, *chunk)


def _open(path: Path, dim: int) -> RowFile:
    try:
        with open(path, "rb") as file:
            is_parquet = file.read(len(_PARQUET)) == _PARQUET
    except OSError as e:
        raise ConfigError(f"import_table: {path} cannot be read: {e.strerror}. Pass a file that all ranks see.") from e
    return ParquetFile(path, dim) if is_parquet else SafetensorsFile(path, dim)


def _check(
    path: Path, file: RowFile, n: int, module: ShardedHashCollection, table: str, ranks: Ranks, allow_nonfinite: bool
) -> str:
    """Refuse embeddings, each rank some of them, and ids that come twice, each on its rank; a digest of all ids."""
    digest, mine = hashlib.sha256(), [torch.empty(0, dtype=torch.int64)]
    for ids_N, weights_ND in file.part(n, ranks.rank, ranks.world_size):
        digest.update(ids_N.numpy().data)
        mine.append(ids_N[owner_of(ids_N, ranks.world_size) == ranks.rank] if ranks.world_size > 1 else ids_N)
        if weights_ND is None:
            continue
        is_bad = ~weights_ND.isfinite().all(1)
        if not allow_nonfinite and bool(is_bad.any()):
            raise ConfigError(
                f"{path} has {int(is_bad.sum()):,} embeddings with NaN or infinity, such as that of id "
                f"{ids_N[is_bad][0]}. Remove them, or pass allow_nonfinite=True."
            )
        check_rows(module, table, ids_N, weights_ND)
    ids = torch.cat(mine).sort().values
    twice = ids[1:][ids[1:] == ids[:-1]].unique()
    if len(twice):
        raise ConfigError(
            f"{path} has {len(twice):,} ids more than once, such as {twice[0]}. Keep one row of each of them."
        )
    return digest.hexdigest()
