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
    from hybridrec.checkpoint.loading import Loaded, load
    from hybridrec.checkpoint.pretrained import import_rows
    from hybridrec.checkpoint.recsdk import ImportedTable, RecsdkImport, import_recsdk
    from hybridrec.checkpoint.recsdk_files import RecsdkSave, read_recsdk
    from hybridrec.checkpoint.safetensors import export_safetensors
    from hybridrec.checkpoint.saving import Saving, save
    from hybridrec.checkpoint.snapshot import latest

__all__ = [
    "Checkpointer",
    "DeltaWriter",
    "Follower",
    "ImportedTable",
    "Loaded",
    "RecsdkImport",
    "RecsdkSave",
    "Saving",
    "export_safetensors",
    "follow",
    "import_recsdk",
    "import_rows",
    "latest",
    "load",
    "read_recsdk",
    "save",
]

_MODULE_OF_NAME = {
    "Checkpointer": "checkpointer",
    "DeltaWriter": "delta_writer",
    "Follower": "follower",
    "ImportedTable": "recsdk",
    "Loaded": "loading",
    "RecsdkImport": "recsdk",
    "RecsdkSave": "recsdk_files",
    "Saving": "saving",
    "export_safetensors": "safetensors",
    "follow": "follower",
    "import_recsdk": "recsdk",
    "import_rows": "pretrained",
    "latest": "snapshot",
    "load": "loading",
    "read_recsdk": "recsdk_files",
    "save": "saving",
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
