"""Snapshots that cannot be written or read: a clear error on all ranks, nothing changed, and training goes on."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torchrec.distributed import DistributedModelParallel

from hybridrec import ConfigError, HashEmbeddingBagConfig, HybridRecError, StateError, checkpoint
from hybridrec.checkpoint import files, snapshot
from hybridrec.checkpoint.manifest import MANIFEST, read_manifest
from hybridrec.distributed.lookup import PooledLookup
from hybridrec.store.initializer import bank_from_init_fn
from tests.cases.small import sharded
from tests.checkpoint.runs import build, records_of
from tests.distributed.pipelines import all_batches, build_oracle, mine
from tests.distributed.scenario import TABLES, Scenario, compare_state, raise_together, state_of
from tests.ranks import RankPools

SCENARIO = Scenario(optimizer="adagrad", steps=9, ids_per_table=30)


def _fail(patch: pytest.MonkeyPatch, fault: str) -> None:
    """On the last rank, or where only rank 0 works, there."""
    last = dist.get_rank() == dist.get_world_size() - 1
    if fault == "disk full" and last:
        original = files.HashedFile.write

        def write(self: files.HashedFile, data: memoryview, *, rows: int = 0) -> None:
            if self._bytes + data.nbytes > 300:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), self._name)
            original(self, data, rows=rows)

        patch.setattr(files.HashedFile, "write", write)
    elif fault == "no permission" and dist.get_rank() == 0:

        def replace_(source: Any, target: Any) -> None:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(target))

        patch.setattr(snapshot.os, "replace", replace_)


def save_under_a_fault(scenario: Scenario, path: Path, fault: str) -> str:
    batches = all_batches(scenario)
    dmp, pipeline = build(scenario)
    oracle, optimizer = build_oracle(scenario)
    iterator = iter(mine(scenario, batches))
    message = ""
    for step, everyone in enumerate(batches):
        loss, expected = pipeline.progress(iterator).item(), oracle.step(everyone, optimizer).item()
        if step == 2:
            checkpoint.save(path, dmp, pipeline._optimizer, pipeline=pipeline)
        if step == 5:
            where = path / "file" if fault == "no folder" else path
            with pytest.MonkeyPatch.context() as patch:
                _fail(patch, fault)
                try:
                    checkpoint.save(where, dmp, pipeline._optimizer, pipeline=pipeline, keep=1)
                except HybridRecError as e:
                    message = f"{type(e).__name__}: {e}"
        pipeline._thread.settle()
        difference = "" if loss == expected else f"loss {loss}, not {expected}"
        raise_together(difference or compare_state(scenario, oracle, state_of(dmp)), step)
    return message


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("disk full", "No space left on device (on rank 1 of 2)"),
        ("no permission", "Permission denied (on rank 0 of 2)"),
        ("no folder", "(on rank 0 of 2)"),
    ],
)
def test_a_snapshot_that_cannot_be_written(pools: RankPools, tmp_path: Path, fault: str, words: str) -> None:
    (tmp_path / "file").touch()
    messages = pools[2].run(save_under_a_fault, SCENARIO, tmp_path, fault)
    assert messages[0] == messages[1] and words in messages[0] and messages[0].startswith("StateError"), messages
    left = checkpoint.latest(tmp_path)
    assert left is not None and left.name == "step_000000000003"
    for file in read_manifest(left).files():
        files.verify(left, file)
    if fault == "disk full":
        assert sorted(p.name for p in tmp_path.iterdir()) == ["file", "latest", "step_000000000003"]


def save_three_times(scenario: Scenario, path: Path, keep: int | None) -> list[str]:
    dmp, pipeline = build(scenario)
    iterator = iter(mine(scenario, all_batches(scenario)))
    if dist.get_rank() == 0:
        (path / ".unfinished_step_9").mkdir(parents=True)  # of a run that was killed
        (path / ".unfinished_step_9" / "rows").touch()
    dist.barrier()
    saved = []
    for _ in range(3):
        pipeline.progress(iterator)
        saved.append(checkpoint.save(path, dmp, pipeline=pipeline, keep=keep).name)
    saved.append(checkpoint.save(path, dmp, pipeline=pipeline, keep=keep).name)
    return saved


def test_so_many_are_kept_and_the_newest_is_named(pools: RankPools, tmp_path: Path) -> None:
    names = pools[2].run(save_three_times, SCENARIO, tmp_path, 2)[0]
    assert names == ["step_000000000001", "step_000000000002", "step_000000000003", "step_000000000003_2"]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["latest", *names[2:]]
    assert checkpoint.latest(tmp_path) == tmp_path / names[-1]
    (tmp_path / "latest").unlink()
    assert checkpoint.latest(tmp_path) == tmp_path / names[-1]
    shutil.rmtree(tmp_path / names[-1])
    assert checkpoint.latest(tmp_path) == tmp_path / names[2]
    assert checkpoint.latest(tmp_path / "nothing") is None


def _cut(path: Path) -> None:
    with open(path, "r+b") as file:
        file.truncate(path.stat().st_size - 1)


def _alter(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 0x10
    path.write_bytes(content)


DAMAGES: dict[str, Callable[[Path], None]] = {"cut": _cut, "alter": _alter, "remove": Path.unlink}


def load_damaged(scenario: Scenario, path: Path) -> list[str]:
    dmp, pipeline = build(scenario)
    iterator = iter(mine(scenario, all_batches(scenario)))
    for _ in range(2):
        pipeline.progress(iterator)
    intact = checkpoint.save(path, dmp, pipeline._optimizer, pipeline=pipeline)
    for _ in range(2):
        pipeline.progress(iterator)
    pipeline.withdraw()
    before, tried = records_of(dmp), []
    for name in [MANIFEST, *(f.name for f in read_manifest(intact).files())]:
        for kind, damage in DAMAGES.items():
            damaged = path.parent / "damaged"
            shutil.copytree(intact, damaged)
            damage(damaged / name)
            try:
                checkpoint.load(damaged, dmp, pipeline._optimizer)
            except HybridRecError as e:
                is_named = str(damaged / name) in str(e) or (kind, name) == ("remove", MANIFEST)
                tried.append("refused" if is_named else f"{name} {kind}: {e}")
            else:
                tried.append(f"{name} {kind}: not refused")
            if records_of(dmp) != before:
                raise AssertionError(f"{name} {kind}: rows changed")
            shutil.rmtree(damaged)
    checkpoint.load(path, dmp, pipeline._optimizer)
    if records_of(dmp) == before:
        raise AssertionError("the snapshot that is whole was not loaded")
    return tried


def test_damaged_snapshots_are_refused_by_the_name_of_the_file(pool_1: Any, tmp_path: Path) -> None:
    (tried,) = pool_1.run(load_damaged, SCENARIO, tmp_path / "snapshots")
    assert len(tried) == 3 * 6 and set(tried) == {"refused"}, tried


def load_into_another(scenario: Scenario, path: Path, others: dict[str, Scenario]) -> dict[str, str]:
    dmp, pipeline = build(scenario)
    pipeline.progress(iter(mine(scenario, all_batches(scenario))))
    checkpoint.save(path, dmp, pipeline._optimizer, pipeline=pipeline)
    found = {}
    for name, other in others.items():
        changed, other_pipeline = build(other)
        try:
            checkpoint.load(path, changed, other_pipeline._optimizer)
        except ConfigError as e:
            found[name] = str(e)
    try:
        checkpoint.load(path, dmp, torch.optim.Adagrad(dmp.module.dense.parameters(), lr=0.1))
    except ConfigError as e:
        found["parts"] = str(e)
    return found


def test_a_changed_model_is_refused_with_both_values(pools: RankPools, tmp_path: Path) -> None:
    first, *rest = TABLES
    others = {
        "dim": replace(SCENARIO, tables=(replace(first, dim=16), *rest)),
        "seed": replace(SCENARIO, tables=(replace(first, seed=9), *rest)),
        "optimizer": replace(SCENARIO, optimizer="adam"),
        "missing": replace(SCENARIO, tables=(first, *rest[:1])),
    }
    messages, same = pools[2].run(load_into_another, SCENARIO, tmp_path, others)
    assert messages == same
    assert "table 'user': embedding_dim is 8 in the snapshot and 16 in the model" in messages["dim"]
    assert "table 'user': seed is 0 in the snapshot and 9 in the model" in messages["seed"]
    assert "optimizer is 'adagrad' in the snapshot and 'adam' in the model" in messages["optimizer"]
    assert (
        "tables of collection 'ebc' differ. Not in the snapshot: none; only in the snapshot: ['word']"
        in (messages["missing"])
    )
    assert "optimizer: the snapshot has the parts" in messages["parts"]


def load_beside_another_dense_optimizer(scenario: Scenario, path: Path) -> str:
    dmp, pipeline = build(scenario)
    batches = iter(mine(scenario, all_batches(scenario)))
    pipeline.progress(batches)
    dense = list(dmp.module.dense.parameters())
    checkpoint.save(path, dmp, torch.optim.Adagrad(dense, lr=0.1), pipeline=pipeline)
    pipeline.progress(batches)
    pipeline.withdraw()
    before = records_of(dmp)
    with pytest.raises(ConfigError) as caught:
        checkpoint.load(path, dmp, torch.optim.Adam(dense), pipeline=pipeline)
    if records_of(dmp) != before:
        raise AssertionError("rows changed although the optimizer was refused")
    checkpoint.load(path, dmp, torch.optim.Adagrad(dense, lr=0.1), pipeline=pipeline)
    return str(caught.value)


def test_another_dense_optimizer_is_refused_before_anything_changes(pool_1: Any, tmp_path: Path) -> None:
    message = pool_1.run(load_beside_another_dense_optimizer, SCENARIO, tmp_path)[0]
    assert "another class than that of the snapshot" in message and "lr_decay" in message and "betas" in message


def all_ones(rows: Tensor) -> Tensor:
    return rows.fill_(1)


def ones_but_for_one(rows: Tensor) -> Tensor:
    rows.fill_(1)[-1, -1] = 2
    return rows


def with_init_fn(init_fn: Callable[[Tensor], Tensor]) -> DistributedModelParallel:
    return sharded([HashEmbeddingBagConfig(300, 4, "t", feature_names=["f"], init_fn=init_fn)])


def load_beside_another_init_fn(path: Path) -> str:
    checkpoint.save(path, with_init_fn(all_ones))
    dist.barrier()
    checkpoint.load(path, with_init_fn(lambda rows: rows * 0 + 1))  # another function, the same rows
    with pytest.raises(ConfigError) as caught:
        checkpoint.load(path, with_init_fn(ones_but_for_one))
    fill = checkpoint.saved_init_fn(path, "t", ones_but_for_one)
    assert checkpoint.saved_init_fn(path / "none", "t", fill) is fill
    checkpoint.load(path, with_init_fn(fill))
    return str(caught.value)


def test_another_init_fn_is_refused_by_a_digest_of_its_rows(pools: RankPools, tmp_path: Path) -> None:
    before, after = (repr(bank_from_init_fn(fill, 4, 0)) for fill in (all_ones, ones_but_for_one))
    assert len(before) == len("Bank(sha256='')") + 64 and before != after
    for text in pools[2].run(load_beside_another_init_fn, tmp_path):
        assert f"table 't': initializer is {before!r} in the snapshot and {after!r} in the model" in text
        assert "init_fn=checkpoint.saved_init_fn(path, table)" in text
    fill = checkpoint.saved_init_fn(tmp_path, "t")
    assert torch.equal(fill(torch.zeros(4096, 4)), torch.ones(4096, 4))
    with pytest.raises(ConfigError, match=r"table 't' was saved with \[4096, 4\] initial rows, \[4096, 5\] are wanted"):
        bank_from_init_fn(fill, 5, 0)
    with pytest.raises(ConfigError, match=r"no table 'u' with an init_fn. \(collection, table\) .*: \[\('.*', 't'\)\]"):
        checkpoint.saved_init_fn(tmp_path, "u", all_ones)
    with pytest.raises(StateError, match="none does not exist"):
        checkpoint.saved_init_fn(tmp_path / "none", "t")


def refuse_what_cannot_be_saved(scenario: Scenario, path: Path) -> list[str]:
    dmp, pipeline = build(scenario)
    messages = []
    for arguments in ({"extra": {"loader": object()}}, {"keep": 0}, {"extra": {1.5: 2}}):
        try:
            checkpoint.save(path, dmp, **arguments)
        except ConfigError as e:
            messages.append(str(e))
    loss = dmp(mine(scenario, all_batches(scenario)[:1])[0])[0]
    checkpoint.save(path, dmp)  # a forward without its backward is no batch yet
    try:
        checkpoint.load(path, dmp)
    except HybridRecError as e:
        messages.append(str(e))
    loss.backward()
    return messages


def test_what_a_snapshot_cannot_hold_is_refused_by_name(pool_1: Any, tmp_path: Path) -> None:
    (messages,) = pool_1.run(refuse_what_cannot_be_saved, SCENARIO, tmp_path)
    assert "extra['loader'] has type object, which a snapshot cannot hold" in messages[0]
    assert "keep=0" in messages[1]
    assert "extra has the key 1.5" in messages[2]
    assert "rows cannot be replaced while batches are in flight (1)" in messages[3]


def load_with_pointer(scenario: Scenario, path: Path, pointers: list[bytes]) -> list[int]:
    """Batches behind the snapshot that is found, for every content of the file that names the newest one."""
    dmp, pipeline = build(scenario)
    iterator = iter(mine(scenario, all_batches(scenario)))
    for _ in range(2):
        pipeline.progress(iterator)
        checkpoint.save(path, dmp, pipeline._optimizer, pipeline=pipeline)
    found = []
    for pointer in pointers:
        (path / "latest").write_bytes(pointer)
        found.append(checkpoint.load(path, dmp, pipeline._optimizer, pipeline=pipeline).batches_committed)
    return found


def test_a_damaged_pointer_to_the_newest_snapshot_does_no_harm(pool_1: Any, tmp_path: Path) -> None:
    pointers = [b"\xff\xfe", b"", b".", b"..", b"\0", b"a" * 5000, b"step_000000000001\n"]
    assert pool_1.run(load_with_pointer, SCENARIO, tmp_path, pointers) == [[2] * 6 + [1]]


def without_shared_folder(path: Path) -> list[str]:
    """What save says where every rank has a disk of its own, and resume where one rank alone sees a snapshot."""
    dmp, pipeline = build(SCENARIO)
    iterator = iter(mine(SCENARIO, all_batches(SCENARIO)))
    pipeline.progress(iterator)
    own, said = path / str(dist.get_rank()), []
    try:
        checkpoint.save(own, dmp, pipeline._optimizer, pipeline=pipeline)
    except HybridRecError as e:
        said.append(str(e))
    (path / "both").mkdir(exist_ok=True)
    checkpoint.save(path / "both", dmp, pipeline._optimizer, pipeline=pipeline)
    seen = path / "both" if dist.get_rank() == 0 else own
    try:
        with checkpoint.Checkpointer(seen, dmp, pipeline._optimizer, pipeline) as checkpointer:
            checkpointer.resume()
    except HybridRecError as e:
        said.append(str(e))
    return [*said, str(pipeline.batches_committed)]


def test_ranks_that_share_no_folder_are_told(pools: RankPools, tmp_path: Path) -> None:
    first, second = pools[2].run(without_shared_folder, tmp_path)
    assert first == second and len(first) == 3
    assert "rank 1 wrote ranks/00001.pt, and rank 0 does not find it" in first[0] and "share" in first[0]
    assert "has no complete snapshot" in first[1] and "(on rank 1 of 2)" in first[1]
    assert not list((tmp_path / "0").iterdir())


def load_without_room(scenario: Scenario, path: Path) -> list[str]:
    """The last rank has no room for the second chunk of rows: what it says, and what a state_dict says afterwards."""
    dmp, pipeline = build(scenario)
    batches, said = iter(mine(scenario, all_batches(scenario))), []
    pipeline.progress(batches)
    checkpoint.save(path, dmp, pipeline._optimizer, pipeline=pipeline)
    original, calls = PooledLookup.import_rows, 0

    def import_rows(lookup: PooledLookup, table: str, rows: Any) -> None:
        nonlocal calls
        calls += 1
        if calls == 2 and dist.get_rank() == dist.get_world_size() - 1:
            raise StateError("no room")
        original(lookup, table, rows)

    with pytest.MonkeyPatch.context() as patch, pytest.raises(StateError) as error:
        patch.setattr(PooledLookup, "import_rows", import_rows)
        checkpoint.load(path, dmp, pipeline._optimizer, pipeline=pipeline)
    said.append(str(error.value))
    with pytest.raises(StateError) as error:
        dmp.state_dict()
    return [*said, str(error.value)]


def test_a_snapshot_that_is_loaded_in_part_is_so_on_all_ranks(pools: RankPools, tmp_path: Path) -> None:
    for rank, (said, afterwards) in enumerate(pools[2].run(load_without_room, SCENARIO, tmp_path)):
        assert said == "no room (on rank 1 of 2)"
        assert f"rank {rank} of 2: a snapshot could be loaded only in part: StateError: no room" in afterwards


def names_not_forced(scenario: Scenario, path: Path) -> list[str]:
    """Folders of a snapshot and its delta whose names were not forced to disk."""
    dmp, pipeline = build(scenario)
    batches, forced, original = iter(mine(scenario, all_batches(scenario))), set(), os.fsync

    def fsync(descriptor: int) -> None:
        forced.add(os.readlink(f"/proc/self/fd/{descriptor}"))
        original(descriptor)

    writer = checkpoint.DeltaWriter(path, dmp, pipeline._optimizer, pipeline=pipeline)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", fsync)
        pipeline.progress(batches)
        snapshot = writer.save_full()
        pipeline.progress(batches)
        delta = writer.save_delta()
    while_written = {
        snapshot: path / f".unfinished_{snapshot.name}",
        delta: delta.with_name(f".unfinished_{delta.name}"),
    }
    folders = [path, snapshot, delta.parent]  # what was renamed, or made, in a folder that is there
    for done, unfinished in while_written.items():
        found = [done, *(f for f in done.rglob("*") if f.is_dir())]
        folders += [unfinished / f.relative_to(done) for f in found if "deltas" not in f.relative_to(done).parts]
    return [str(folder) for folder in folders if str(folder) not in forced]


def test_the_names_of_all_files_are_forced_to_disk(pool_1: Any, tmp_path: Path) -> None:
    assert pool_1.run(names_not_forced, SCENARIO, tmp_path) == [[]]


def test_a_snapshot_that_is_removed_while_one_looks_is_no_error(tmp_path: Path) -> None:
    for name in ("step_1", "step_2"):
        (tmp_path / name).mkdir()
        (tmp_path / name / MANIFEST).touch()
    original = Path.stat

    def stat(path: Path, **kwargs: Any) -> os.stat_result:
        found = original(path, **kwargs)
        if path == tmp_path / "step_1" / MANIFEST:
            shutil.rmtree(path.parent)  # by the job that writes them
        return found

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Path, "stat", stat)
        assert checkpoint.latest(tmp_path) == tmp_path / "step_2"
