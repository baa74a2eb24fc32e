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
    from hybridrec.checkpoint.safetensors import export_safetensors
    from hybridrec.checkpoint.saving import Saving, save
    from hybridrec.checkpoint.snapshot import latest

__all__ = [
    "Checkpointer",
    "DeltaWriter",
    "Follower",
    "Loaded",
    "Saving",
    "export_safetensors",
    "follow",
    "import_rows",
    "latest",
    "load",
    "save",
]

_MODULE_OF_NAME = {
    "Checkpointer": "checkpointer",
    "DeltaWriter": "delta_writer",
    "Follower": "follower",
    "Loaded": "loading",
    "Saving": "saving",
    "export_safetensors": "safetensors",
    "follow": "follower",
    "import_rows": "pretrained",
    "latest": "snapshot",
    "load": "loading",
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
