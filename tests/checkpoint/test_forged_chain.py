"""Deltas whose tables are not those of what they follow, their hashes being right: refused by number by all readers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from hybridrec import StateError, checkpoint
from hybridrec.checkpoint.manifest import TableEntry
from hybridrec.checkpoint.points import read_point
from tests.checkpoint.made_snapshots import delta_of, rows_of, snapshot_of, table_in


def made(folder: Path, name: str = "user", dim: int = 3, dtype: torch.dtype = torch.float32) -> TableEntry:
    return table_in(folder, name, *rows_of(20, dim, dtype))


FORGERIES: dict[str, Callable[[Path], list[TableEntry]]] = {
    "another dim": lambda folder: [made(folder, dim=4)],
    "another type": lambda folder: [made(folder, dtype=torch.bfloat16)],
    "another table": lambda folder: [made(folder, "item")],
    "one table more": lambda folder: [made(folder), made(folder, "item")],
    "no table": lambda folder: [],
}


@pytest.mark.parametrize("name", FORGERIES)
def test_layers_have_the_same_tables(tmp_path: Path, name: str) -> None:
    snapshot = snapshot_of(tmp_path / "step_000000000001", [made(tmp_path / "step_000000000001")])
    follower = checkpoint.follow(snapshot)
    delta_of(snapshot, 1, FORGERIES[name](snapshot / "deltas/00000001"), {})
    for read in (
        lambda: read_point(tmp_path),
        lambda: checkpoint.export_safetensors(tmp_path, tmp_path / "out"),
        follower.update,
        lambda: checkpoint.follow(tmp_path),
    ):
        with pytest.raises(StateError, match=r"delta 1 of .* its rows of table '\w+' in collection 'c0' are not like"):
            read()
    assert follower.number == 0 and not (tmp_path / "out").exists()
