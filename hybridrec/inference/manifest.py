"""What the manifest of frozen files says of a table."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch
from torchrec.modules.embedding_configs import EmbeddingConfig, PoolingType

from hybridrec.config import HashEmbeddingBagConfig, HashEmbeddingConfig, TableConfig, resolve_table
from hybridrec.inference.files import FileStorage, MappedFiles
from hybridrec.inference.row_format import RowFormat
from hybridrec.row_type import RowType
from hybridrec.store.initializer import Bank, Constant, Normal, Uniform

_INITIALIZERS: dict[str, type[Uniform | Normal | Constant]] = {
    "uniform": Uniform,
    "normal": Normal,
    "constant": Constant,
}


def entry_of(config: TableConfig, t: int, row_format: RowFormat, rows: int, storage: FileStorage) -> dict[str, Any]:
    """The entry of table ``t``; a bank of initial rows becomes a file."""
    initializer = config.initializer
    if isinstance(initializer, Bank):
        bank = torch.from_numpy(initializer.rows)
        storage.empty(f"{t}.bank", torch.float32, (bank.shape[0], bank.shape[1])).copy_(bank)
        initial: dict[str, Any] = {"kind": "bank", "rows": len(bank)}
    else:
        kind = next(name for name, cls in _INITIALIZERS.items() if isinstance(initializer, cls))
        initial = {"kind": kind, **dataclasses.asdict(initializer)}
    return {
        "name": config.name,
        "dtype": row_format.value,
        "rows": rows,
        "num_embeddings": config.num_embeddings,
        "embedding_dim": config.embedding_dim,
        "feature_names": list(config.feature_names),
        "pooling": config.pooling.value,
        "seed": config.seed,
        "row_type": config.row_type.name,
        "initial": initial,
    }


def config_from_entry(entry: Mapping[str, Any], t: int, files: MappedFiles, *, is_pooled: bool) -> TableConfig:
    """The table of an entry; what only training reads has its default.

    Raises:
        ConfigError: See `MappedFiles.array`.
    """
    initial = dict(entry["initial"])
    kind = initial.pop("kind")
    fields: dict[str, Any] = {name: entry[name] for name in ("num_embeddings", "embedding_dim", "name", "seed")}
    fields["feature_names"] = list(entry["feature_names"])
    if kind != "bank":
        fields["initializer"] = _INITIALIZERS[kind](**initial)
    if is_pooled:
        config = resolve_table(HashEmbeddingBagConfig(**fields, pooling=PoolingType(entry["pooling"])))
    else:
        config = resolve_table(HashEmbeddingConfig(**fields), EmbeddingConfig)
    config = dataclasses.replace(config, row_type=RowType[entry.get("row_type", RowType.FLOAT32.name)])
    if kind != "bank":
        return config
    bank = files.array(f"{t}.bank", torch.float32, (initial["rows"], config.embedding_dim))
    return dataclasses.replace(config, initializer=Bank(bank.numpy()))
