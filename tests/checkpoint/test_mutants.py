"""The tests of snapshots must be able to fail: each line that matters is broken once, and what it is for shows.

`differences` is what the tests of this folder assert, in one run: exact resume, another number of ranks, damaged files,
disks that are full. Others that are mutated beside their tests: rows that are copied aside (test_background.py), states
and Adam's step (test_save_load.py), deltas (test_deltas.py), the native export (tests/property/test_snapshots.py).
"""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from hybridrec import HybridRecError, checkpoint
from hybridrec.cache.transaction import TransactionLog
from hybridrec.checkpoint import contents, files, loading, saving, snapshot
from hybridrec.checkpoint.manifest import read_manifest
from hybridrec.checkpoint.points import Layer
from hybridrec.distributed.lookup import PooledLookup
from hybridrec.distributed.model_parts import dense_tensors
from hybridrec.native import ShardGroup
from tests.checkpoint.runs import build, records_of
from tests.checkpoint.test_save_load import everything
from tests.distributed.pipelines import all_batches, mine
from tests.distributed.scenario import Scenario
from tests.ranks import RankFailure, RankPools

SCENARIO = Scenario(optimizer="adam", steps=34, ids_per_table=120, batch_size=2)
MAX_ROWS, AT = 90, 26
Patch = pytest.MonkeyPatch
Mutate = Callable[[Patch], None]


# ---- one run of everything -------------------------------------------------------------------------------------------


def go_on(dmp: Any, pipeline: Any, first: int) -> dict[str, Any]:
    """Train the rest: what it ends with."""
    random = torch.rand(3).tolist()
    batches = iter(mine(SCENARIO, all_batches(SCENARIO)[first:]))
    losses = [pipeline.progress(batches).item() for _ in range(SCENARIO.steps - first)]
    dense = {name: tensor.tolist() for name, tensor in dense_tensors(dmp)}
    return {"losses": losses, "random": random, "dense": dense, "rows": records_of(dmp)}


def save_some(path: Path, mutant: str) -> dict[str, Any]:
    """Save at a step with batches in flight, and beside an open forward; then once more with a full disk."""
    dmp, pipeline = build(SCENARIO, max_rows=MAX_ROWS)
    batches = iter(mine(SCENARIO, all_batches(SCENARIO)))
    for _ in range(AT):
        pipeline.progress(batches)
    with pytest.MonkeyPatch.context() as patch:
        mutate(patch, mutant, "save")
        checkpoint.save(path, dmp, pipeline._optimizer, pipeline=pipeline)
        saved = records_of(dmp)
        pipeline.reset()
        loss = dmp(mine(SCENARIO, all_batches(SCENARIO)[AT : AT + 1])[0])[0]
        folder = checkpoint.save(path / "open", dmp)
        progress = [(c.ordinal, c.batches_committed) for c in read_manifest(folder).collections]
        del loss
        message = full_disk(patch, path, dmp)
    dist.barrier()  # rank 0 has removed it by now
    left = sorted(p.name for p in path.iterdir())
    dist.barrier()
    return {"records": saved, "progress": progress, "message": message, "left": left} | go_on(dmp, pipeline, AT)


def full_disk(patch: Patch, path: Path, dmp: Any) -> str:
    """What the last rank meets, and all say."""
    original = files.HashedFile.finish

    def finish(file: files.HashedFile) -> Any:
        if dist.get_rank() == dist.get_world_size() - 1 and file._name.endswith(".rows"):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), file._name)
        return original(file)

    with pytest.MonkeyPatch.context() as inner:
        inner.setattr(files.HashedFile, "finish", finish)
        try:
            checkpoint.save(path, dmp)
        except (HybridRecError, OSError) as e:
            return str(e)
    return ""


def load_some(path: Path, mutant: str, *, damaged: bool) -> dict[str, Any]:
    """Refuse a damaged copy, load the snapshot, and train the rest."""
    dmp, pipeline = build(SCENARIO, max_rows=MAX_ROWS)
    pipeline.progress(iter(mine(SCENARIO, all_batches(SCENARIO))))
    pipeline.withdraw()
    before, refused = records_of(dmp), not damaged
    with pytest.MonkeyPatch.context() as patch:
        mutate(patch, mutant, "load")
        if damaged:
            try:
                checkpoint.load(path.parent / "damaged", dmp, pipeline._optimizer, pipeline=pipeline)
            except HybridRecError:
                refused = records_of(dmp) == before
        torch.manual_seed(99)
        loaded = checkpoint.load(path, dmp, pipeline._optimizer, pipeline=pipeline)
    records = records_of(dmp)
    return {"refused": refused, "records": records} | go_on(dmp, pipeline, loaded.batches_committed)


def differences(pools: RankPools, path: Path, mutant: str) -> list[str]:
    """What is not as it should be."""
    saved = pools[2].run(save_some, path, mutant)
    folder = path / f"step_{AT:012d}"
    shutil.copytree(folder, path.parent / "damaged")
    damaged = sorted((path.parent / "damaged").glob("rows/*/*/*.rows"))[-1]
    content = bytearray(damaged.read_bytes())
    content[-1] ^= 1
    damaged.write_bytes(content)
    found = []
    for one in saved:
        if one["progress"] != [(AT, AT)]:
            found.append("an open batch")
        if "No space left on device (on rank 1 of 2)" not in one["message"]:
            found.append("the error of rank 1")
        if one["left"] != ["latest", "open", folder.name]:
            found.append("what is left of a snapshot that failed")
    again = pools[2].run(load_some, path, mutant, damaged=True)
    for before, after in zip(saved, again, strict=True):
        found += [] if after["refused"] else ["a damaged file"]
        found += [key for key in ("records", "losses", "random", "dense", "rows") if before[key] != after[key]]
    alone = pools[1].run(load_some, path, mutant, damaged=False)
    return found + ([] if everything(alone) == everything(saved) else ["rows on one rank"])


# ---- mutants ---------------------------------------------------------------------------------------------------------


def _open_batches_count(patch: Patch) -> None:
    patch.setattr(TransactionLog, "committed_ordinal", property(lambda log: log.group.ordinal))


def _written_in_place(patch: Patch) -> None:
    patch.setattr(snapshot, "unfinished", lambda root, name: root / name)
    patch.setattr(snapshot, "give_up", lambda root, name: None)


def _left_behind(patch: Patch) -> None:
    patch.setattr(snapshot, "remove_folder", lambda folder: None)


def _not_verified(patch: Patch) -> None:
    patch.setattr(Layer, "verify", lambda self, file: None)


def _changed_before_it_is_verified(patch: Patch) -> None:
    original = loading._Reader._check_tables

    def check_tables(self: Any, *args: Any) -> None:
        original(self, *args)
        for module in self._collections.values():
            module.lookup.forget_rows(ordinal=0, committed=0, num_batches=0)

    patch.setattr(loading._Reader, "_check_tables", check_tables)


def _everyone_owns_everything(patch: Patch) -> None:
    patch.setattr(loading._Reader, "_may_have_mine", lambda *args: True)
    patch.setattr(loading._Reader, "_mine", lambda self, rows, layout: rows)


def _own_file_only(patch: Patch) -> None:
    patch.setattr(loading._Reader, "_may_have_mine", lambda self, *args: args[-1].rank == self._ranks.rank)


def _later_ordinal(patch: Patch) -> None:
    original = PooledLookup.forget_rows

    def forget_rows(self: PooledLookup, *, ordinal: int, committed: int, num_batches: int) -> None:
        original(self, ordinal=ordinal + 20, committed=committed, num_batches=num_batches)

    patch.setattr(PooledLookup, "forget_rows", forget_rows)


def _scores_of_now(patch: Patch) -> None:
    original = ShardGroup.import_rows

    def import_rows(self: ShardGroup, table: int, ids: Any, scores: Any, records: Any) -> None:
        original(self, table, ids, torch.full_like(scores, self.ordinal), records)

    patch.setattr(ShardGroup, "import_rows", import_rows)


def _other_random_numbers(patch: Patch) -> None:
    patch.setattr(contents, "set_random_state", lambda state, device: None)


def _new_dense_optimizer(patch: Patch) -> None:
    patch.setattr(contents, "load_optimizer_state", lambda *args: None)


def _dense_part_of_before(patch: Patch) -> None:
    patch.setattr(loading, "dense_tensors", lambda model: iter(()))
    patch.setattr(loading._Reader, "_check_dense", lambda *args: None)


def _not_flushed(patch: Patch) -> None:
    """Rows as the host's store has them, older than those in slots."""
    patch.setattr(PooledLookup, "flush", lambda self: None)
    original = ShardGroup.export_begin

    def export_begin(self: ShardGroup, table: int, *, above_score: int = 0) -> tuple[int, int]:
        self.flush_counts(torch.empty(self.num_tables, dtype=torch.int64))
        return original(self, table, above_score=above_score)

    patch.setattr(ShardGroup, "export_begin", export_begin)


MUTANTS: dict[str, tuple[str, Mutate]] = {
    "scores and ordinals of batches that are open": ("save", _open_batches_count),
    "written in its place": ("save", _written_in_place),
    "what failed is left behind": ("save", _left_behind),
    "rows that were not flushed": ("save", _not_flushed),
    "files are not verified": ("load", _not_verified),
    "changed before it is verified": ("load", _changed_before_it_is_verified),
    "every rank takes all rows": ("load", _everyone_owns_everything),
    "a rank reads its own file only": ("load", _own_file_only),
    "ordinals go on elsewhere": ("load", _later_ordinal),
    "scores are not restored": ("load", _scores_of_now),
    "random numbers are not restored": ("load", _other_random_numbers),
    "the dense optimizer is not restored": ("load", _new_dense_optimizer),
    "the dense part is not restored": ("load", _dense_part_of_before),
}


def mutate(patch: Patch, mutant: str, side: str) -> None:
    if mutant and MUTANTS[mutant][0] == side:
        MUTANTS[mutant][1](patch)


def test_nothing_differs_in_what_is_right(pools: RankPools, tmp_path: Path) -> None:
    assert differences(pools, tmp_path / "snapshots", "") == []
    assert saving.save is checkpoint.save


SLOW = {"what failed is left behind", "the dense part is not restored", "every rank takes all rows"}


@pytest.mark.parametrize(
    "mutant", [pytest.param(name, marks=pytest.mark.slow) if name in SLOW else name for name in MUTANTS]
)
def test_a_mutant_is_caught(pools: RankPools, tmp_path: Path, mutant: str) -> None:
    try:
        found = differences(pools, tmp_path / "snapshots", mutant)
    except RankFailure as e:  # a run that cannot go on is one that is caught, unless the mutant itself is at fault
        found = [str(e)]
        assert "AttributeError" not in found[0] and "TypeError" not in found[0]
    print(mutant, [text[-300:] for text in found])
    assert found
