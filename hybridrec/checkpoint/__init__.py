"""Snapshots of models with hashed tables: atomic, verified, for any number of ranks. See docs/checkpoint.md.

Names are resolved when first used: what reads snapshots without a model (`follow`, exports, the tool) needs no
TorchRec. So no module here has the name of a public function.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hybridrec.checkpoint.checkpointer import Checkpointer
    from hybridrec.checkpoint.delta_writer import DeltaWriter
    from hybridrec.checkpoint.follower import Follower, follow
    from hybridrec.checkpoint.load_planner import HashedLoadPlanner
    from hybridrec.checkpoint.loading import Loaded, load
    from hybridrec.checkpoint.parquet import export_parquet
    from hybridrec.checkpoint.plain_collections import to_embedding_bag_collection, to_embedding_collection
    from hybridrec.checkpoint.pretrained import import_rows
    from hybridrec.checkpoint.recsdk import ImportedTable, RecsdkImport, import_recsdk
    from hybridrec.checkpoint.recsdk_files import RecsdkSave, read_recsdk
    from hybridrec.checkpoint.safetensors import export_safetensors
    from hybridrec.checkpoint.saved_initializers import saved_init_fn
    from hybridrec.checkpoint.saving import Saving, save
    from hybridrec.checkpoint.snapshot import latest
    from hybridrec.checkpoint.table_import import import_table

__all__ = [
    "Checkpointer",
    "DeltaWriter",
    "Follower",
    "HashedLoadPlanner",
    "ImportedTable",
    "Loaded",
    "RecsdkImport",
    "RecsdkSave",
    "Saving",
    "export_parquet",
    "export_safetensors",
    "follow",
    "import_recsdk",
    "import_rows",
    "import_table",
    "latest",
    "load",
    "read_recsdk",
    "save",
    "saved_init_fn",
    "to_embedding_bag_collection",
    "to_embedding_collection",
]

_MODULE_OF_NAME = {
    "Checkpointer": "checkpointer",
    "DeltaWriter": "delta_writer",
    "Follower": "follower",
    "HashedLoadPlanner": "load_planner",
    "ImportedTable": "recsdk",
    "Loaded": "loading",
    "RecsdkImport": "recsdk",
    "RecsdkSave": "recsdk_files",
    "Saving": "saving",
    "export_parquet": "parquet",
    "export_safetensors": "safetensors",
    "follow": "follower",
    "import_recsdk": "recsdk",
    "import_rows": "pretrained",
    "import_table": "table_import",
    "latest": "snapshot",
    "load": "loading",
    "read_recsdk": "recsdk_files",
    "save": "saving",
    "saved_init_fn": "saved_initializers",
    "to_embedding_bag_collection": "plain_collections",
    "to_embedding_collection": "plain_collections",
}


def __getattr__(name: str) -> Any:
    """Resolve a public name and keep it."""
    if name not in _MODULE_OF_NAME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_MODULE_OF_NAME[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
