"""Checkpoint, resume, reshard: defects of other systems, each with a test of the right behaviour here."""

from __future__ import annotations

from pathlib import Path

import pytest

from hybridrec import checkpoint
from tests.checkpoint import mixed
from tests.ranks import RankPools


def train_save_load(path: Path) -> tuple[list[float], list[float], dict[str, tuple[int, ...]], bool]:
    """(losses behind the snapshot, those of a model that loaded it, its sizes of states, whether all tables are equal)
    of hashed and plain row-wise tables together."""
    plan, hashed = dict.fromkeys(mixed.PLAN, "row_wise"), dict.fromkeys(mixed.HASHED, "row_wise")
    dmp, optimizer = mixed.build(plan, hashed=hashed)
    mixed.train(dmp, optimizer, range(3))
    checkpoint.save(path, dmp, optimizer)
    other, other_optimizer = mixed.build(plan, hashed=hashed)
    checkpoint.load(path, other, other_optimizer)
    losses = mixed.train(dmp, optimizer, range(3, 7)), mixed.train(other, other_optimizer, range(3, 7))
    tensors = mixed.tensors_of(other, other_optimizer)
    states = {name: tuple(tensor.shape) for name, tensor in tensors.items() if ":" in name}
    return *losses, states, mixed.same(mixed.tensors_of(dmp, optimizer), tensors)


@pytest.mark.parametrize("world_size", [1, 2])
def test_tr3037_tr3239_tr3444_hashed_and_plain_tables_together(
    pools: RankPools, tmp_path: Path, world_size: int
) -> None:
    """Trained, saved and loaded: plain tables keep their shape and the size of their states beside hashed ones."""
    for losses, again, states, is_same in pools[world_size].run(train_save_load, tmp_path):
        assert again == losses and len(set(losses)) == 4 and is_same
        assert len(states) == 5 and set(states.values()) == {(mixed.ROWS, mixed.DIM)}
