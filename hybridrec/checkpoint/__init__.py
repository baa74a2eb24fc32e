"""Snapshots of models with hashed tables: atomic, verified, for any number of ranks. See docs/checkpoint.md."""

from hybridrec.checkpoint.checkpointer import Checkpointer
from hybridrec.checkpoint.delta_writer import DeltaWriter
from hybridrec.checkpoint.follow import Follower, follow
from hybridrec.checkpoint.load import Loaded, load
from hybridrec.checkpoint.pretrained import import_rows
from hybridrec.checkpoint.safetensors import export_safetensors
from hybridrec.checkpoint.save import Saving, save
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
