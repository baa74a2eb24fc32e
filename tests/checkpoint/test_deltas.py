"""A snapshot and its deltas are the table, in another process and bit for bit; a chain that is not whole is refused."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torchrec.distributed import DistributedModelParallel

from hybridrec import ConfigError, StateError, checkpoint
from hybridrec.checkpoint import files
from hybridrec.checkpoint.delta_chain import read_delta
from hybridrec.checkpoint.exchange import Ranks
from hybridrec.checkpoint.manifest import read_manifest
from hybridrec.checkpoint.saved_tables import layout_of
from hybridrec.distributed.model_parts import dense_tensors
from hybridrec.distributed.sharded_collection import ShardedHashCollection
from hybridrec.native import ShardGroup
from tests.checkpoint.runs import Records, build, records_of
from tests.distributed.pipelines import all_batches, mine
from tests.distributed.scenario import Scenario
from tests.distributed.test_row_types import TABLES as TYPED
from tests.distributed.test_sharding_types import MIXED
from tests.ranks import RankFailure, RankPools

EVICTING = Scenario(optimizer="rowwise_adagrad", steps=48, ids_per_table=300, batch_size=2)
MAX_ROWS = {1: 160, 2: 160, 3: 240}
ADAM = Scenario(optimizer="adam", steps=10, ids_per_table=60)


def followed(follower: checkpoint.Follower) -> Records:
    """What a follower has, as `records_of` tells it."""
    found: Records = {}
    for (collection, name), table in follower.now.entries.items():
        rows = follower.rows(name, collection=collection)
        assert rows.ids_N.tolist() == sorted(set(rows.ids_N.tolist()))
        records = [record.numpy().tobytes() for record in rows.records(layout_of(table))]
        pairs = zip(records, rows.scores_N.tolist(), strict=True)
        found[name] = dict(zip(rows.ids_N.tolist(), pairs, strict=True))
    return found


def everyone(dmp: DistributedModelParallel) -> Records:
    """The rows of all ranks."""
    parts: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(parts, records_of(dmp))
    names = dict.fromkeys(name for part in parts for name in part)
    return {name: {i: r for part in parts for i, r in part.get(name, {}).items()} for name in names}


def compare(follower: checkpoint.Follower, dmp: DistributedModelParallel, step: int) -> None:
    """Raises on all ranks: what one reads is what another would."""
    if followed(follower) != everyone(dmp):
        raise AssertionError(f"the rows by deltas are not those of step {step}")
    dense = {name: tensor.detach() for name, tensor in dense_tensors(dmp)}
    if dense.keys() != follower.dense.keys() or not all(torch.equal(t, follower.dense[n]) for n, t in dense.items()):
        raise AssertionError(f"the dense part by deltas is not that of step {step}")
    if follower.step != step:
        raise AssertionError(f"the follower is at step {follower.step}, not {step}")


def write_chain(
    scenario: Scenario,
    path: Path,
    *,
    first: int,
    every: int,
    max_rows: int | None = None,
    policy: str = "evict",
    mutant: str = "",
) -> dict[str, Any]:
    """Train with batches in flight; a snapshot at a step, deltas from then on, each compared with the tables."""
    dmp, pipeline = build(scenario, max_rows=max_rows, policy=policy)
    writer = checkpoint.DeltaWriter(path, dmp, pipeline._optimizer, pipeline=pipeline)
    batches, follower, losses = iter(mine(scenario, all_batches(scenario))), None, []
    with pytest.MonkeyPatch.context() as patch:
        _mutate(patch, mutant)
        for step in range(1, scenario.steps + 1):
            losses.append(pipeline.progress(batches).item())
            if step == first:
                writer.save_full()
                follower = checkpoint.follow(path)
                compare(follower, dmp, step)
            elif follower is not None and (step - first) % every == 0:
                writer.save_delta()
                dist.barrier()
                if not follower.update() or follower.update():
                    raise AssertionError("update() does not say whether there was something")
                compare(follower, dmp, step)
    return {"losses": losses, "final": records_of(dmp), "number": follower.number}


def _mutate(patch: pytest.MonkeyPatch, mutant: str) -> None:
    if mutant == "removed":
        patch.setattr(ShardGroup, "removed_ids", lambda group, table: torch.empty(0, dtype=torch.int64))
    elif mutant == "mark":
        original = ShardGroup.export_begin

        def export_begin(self: ShardGroup, table: int, *, above_score: int = 0) -> tuple[int, int]:
            return original(self, table, above_score=above_score + 1 if above_score else 0)

        patch.setattr(ShardGroup, "export_begin", export_begin)


def train(scenario: Scenario, max_rows: int | None) -> dict[str, Any]:
    dmp, pipeline = build(scenario, max_rows=max_rows)
    batches = iter(mine(scenario, all_batches(scenario)))
    losses = [pipeline.progress(batches).item() for _ in range(scenario.steps)]
    return {"losses": losses, "final": records_of(dmp)}


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_a_snapshot_and_its_deltas_are_the_tables(pools: RankPools, tmp_path: Path, world_size: int) -> None:
    found = pools[world_size].run(write_chain, EVICTING, tmp_path, first=30, every=3, max_rows=MAX_ROWS[world_size])
    assert [one["number"] for one in found] == [6] * world_size
    folder = checkpoint.latest(tmp_path)
    assert folder is not None
    digest, removed = read_manifest(folder).digest, 0
    for number in range(1, 7):
        delta = read_delta(folder, number, digest)
        digest, removed = delta.digest, removed + sum(entry.file.rows for entry in delta.removed)
    assert removed > 0
    if world_size == 2:  # and what is written changes no bit of training
        for one, alone in zip(found, pools[2].run(train, EVICTING, 160), strict=True):
            assert one["losses"] == alone["losses"] and one["final"] == alone["final"]


def test_tables_and_columns_on_single_ranks(pools: RankPools, tmp_path: Path) -> None:
    pools[2].run(write_chain, replace(ADAM, tables=MIXED), tmp_path, first=4, every=2)


def test_rows_of_16_bits(pools: RankPools, tmp_path: Path) -> None:
    pools[2].run(write_chain, replace(ADAM, tables=TYPED), tmp_path, first=4, every=2)
    follower = checkpoint.follow(tmp_path)
    for name, dtype in (("user", torch.bfloat16), ("item", torch.float16)):
        rows = follower.rows(name)
        found, is_there = follower.embeddings(name, rows.ids_N)
        assert bool(is_there.all()) and found.dtype == dtype and torch.equal(found, rows.weights_ND)


@pytest.mark.parametrize("mutant", ["removed", "mark"])
def test_mutants_are_caught(pools: RankPools, tmp_path: Path, mutant: str) -> None:
    with pytest.raises(RankFailure, match="the rows by deltas are not those of step"):
        pools[1].run(write_chain, EVICTING, tmp_path, first=30, every=3, max_rows=160, mutant=mutant)


# ---- a chain that is not whole ---------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def chain(pools: RankPools, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A snapshot with four deltas, and another run of the same model that has such ones too."""
    path = tmp_path_factory.mktemp("chain")
    for name, seed in (("run", 1), ("other", 2)):
        pools[2].run(write_chain, replace(EVICTING, seed=seed), path / name, first=32, every=4, max_rows=160)
    return path


def _deltas(path: Path) -> list[Path]:
    (folder,) = path.glob("step_*/deltas")
    return [folder / f"{number:08d}" for number in range(1, 5)]


def _drop(path: Path, number: int) -> None:
    shutil.rmtree(_deltas(path)[number - 1])


def _repeat(path: Path) -> None:
    _drop(path, 3)
    shutil.copytree(_deltas(path)[1], _deltas(path)[2])


def _swap(path: Path) -> None:
    second, third = _deltas(path)[1:3]
    second.rename(path / "aside")
    third.rename(second)
    (path / "aside").rename(third)


def _renumber(path: Path) -> None:
    """Delta 3 left out without a gap: its place is taken by one that says it is the third."""
    manifest = _deltas(path)[3] / "manifest.json"
    _drop(path, 3)
    (folder,) = path.glob("step_*")
    digest = _digest_before(folder, 3)
    later = read_delta_of(folder, 4)
    manifest.write_bytes(replace(later, number=3).encode())
    assert later.previous != digest
    _deltas(path)[3].rename(_deltas(path)[2])


def read_delta_of(folder: Path, number: int) -> Any:
    """A delta's manifest, whatever is before it."""
    import json

    previous = json.loads((folder / "deltas" / f"{number:08d}" / "manifest.json").read_text())["previous"]
    return read_delta(folder, number, previous)


def _digest_before(folder: Path, number: int) -> str:
    digest = read_manifest(folder).digest
    for n in range(1, number):
        digest = read_delta(folder, n, digest).digest
    return digest


def _cut(path: Path, kind: str) -> None:
    file = next(f for f in sorted(_deltas(path)[2].rglob(kind)) if f.stat().st_size)
    file.write_bytes(file.read_bytes()[:-1])


def _alter(path: Path) -> None:
    file = next(f for f in sorted(_deltas(path)[2].rglob("*.rows")) if f.stat().st_size)
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)


def _of_another_chain(path: Path) -> None:
    """Delta 3 of a run of the same model, at the same steps."""
    _drop(path, 3)
    shutil.copytree(_deltas(path.parent / "other")[2], _deltas(path)[2])


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (_of_another_chain, "delta 3 of .* does not follow what is before it"),
        (lambda path: _drop(path, 2), "delta 2 of .* is missing"),
        (lambda path: _drop(path, 4), "delta 4 of .* is missing"),
        (_repeat, "delta 3 of .*: delta 2 is in its place"),
        (_swap, "delta 2 of .*: delta 3 is in its place"),
        (_renumber, "delta 3 of .* does not follow what is before it"),
        (lambda path: _cut(path, "*.rows"), "delta 3 of .* cannot be applied: .*00000.rows is damaged: it has"),
        (lambda path: _cut(path, "*.ids"), "delta 3 of .* cannot be applied: .*.ids is damaged: it has"),
        (lambda path: _cut(path, "manifest.json"), "00000003/manifest.json is damaged"),
        (_alter, "delta 3 of .* cannot be applied: .*rows is damaged: its contents"),
    ],
)
def test_a_chain_that_is_not_whole_is_refused(
    chain: Path, tmp_path: Path, damage: Callable[[Path], None], message: str
) -> None:
    path = tmp_path / "copy"
    shutil.copytree(chain / "run", path)
    shutil.copytree(chain / "other", tmp_path / "other")
    assert checkpoint.follow(path).number == 4
    follower = checkpoint.follow(path)
    follower._take(follower._snapshot_layer(follower.snapshot))  # as if it had begun before the first delta
    damage(path)
    with pytest.raises(StateError, match=message):
        checkpoint.follow(path)
    with pytest.raises(StateError, match=message):
        follower.update()
    before = followed(follower), follower.number
    with pytest.raises(StateError, match=message):
        follower.update()
    assert (followed(follower), follower.number) == before  # what was whole is applied, nothing of the rest


# ---- use -------------------------------------------------------------------------------------------------------------


def fail_once(scenario: Scenario, path: Path) -> str:
    """The disk is full at one delta; the next one has what it would have had. Then rows are imported."""
    dmp, pipeline = build(scenario, max_rows=160)
    writer = checkpoint.DeltaWriter(path, dmp, pipeline._optimizer, pipeline=pipeline, keep=1)
    with pytest.raises(StateError, match=r"Call save_full\(\) first"):
        writer.save_delta()
    batches = iter(mine(scenario, all_batches(scenario)))
    for _ in range(30):
        pipeline.progress(batches)
    writer.save_full()
    follower = checkpoint.follow(path)
    for _ in range(6):
        pipeline.progress(batches)
    with full_disk(), pytest.raises(StateError, match="No space left") as error:
        writer.save_delta()
    if follower.update():
        raise AssertionError("a delta that could not be written is seen")
    for _ in range(2):
        pipeline.progress(batches)
    writer.save_delta()
    dist.barrier()
    follower.update()
    compare(follower, dmp, 38)
    ids, weights = torch.tensor([5, 6]), torch.ones(2, 8)
    checkpoint.import_rows(dmp, "user", ids, weights)
    with pytest.raises(
        StateError, match=r"save_delta: what changed in table 'user' is not known: .*Call save_full\(\)"
    ):
        writer.save_delta()
    writer.save_full()
    dist.barrier()
    if not follower.update():
        raise AssertionError("a newer snapshot is not seen")
    compare(follower, dmp, 38)
    found, is_there = follower.embeddings("user", torch.tensor([5, 6, 7, 5]))
    if is_there.tolist() != [True, True, False, True] or not torch.equal(found[is_there], torch.ones(3, 8)):
        raise AssertionError(f"embeddings: {found}, {is_there}")
    with pytest.raises(ConfigError, match="no table 'users' is in"):
        follower.rows("users")
    writer.close()
    return str(error.value)


@contextlib.contextmanager
def full_disk(is_full: bool = True) -> Iterator[None]:
    """No room for the last rank."""
    with pytest.MonkeyPatch.context() as patch:
        if is_full and dist.get_rank() == dist.get_world_size() - 1:
            patch.setattr(files.HashedFile, "finish", _full)
        yield


def _full(file: files.HashedFile) -> Any:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), file._name)


def test_what_a_delta_that_failed_would_have_had_is_in_the_next_one(pools: RankPools, tmp_path: Path) -> None:
    messages = pools[2].run(fail_once, EVICTING, tmp_path)
    assert messages[0] == messages[1] and "on rank 1 of 2" in messages[0]


def too_many_leave(scenario: Scenario, path: Path) -> None:
    dmp, pipeline = build(scenario, max_rows=160)
    with pytest.raises(ConfigError, match="max_removed=-1"):
        checkpoint.DeltaWriter(path, dmp, max_removed=-1)
    writer = checkpoint.DeltaWriter(path, dmp, pipeline._optimizer, pipeline=pipeline, max_removed=1)
    batches = iter(mine(scenario, all_batches(scenario)))
    for step in range(scenario.steps):
        pipeline.progress(batches)
        if step == 20:
            writer.save_full()
    with pytest.raises(StateError, match="more ids left than it was given room for"):
        writer.save_delta()


def test_more_ids_than_there_was_room_for_end_the_chain(pools: RankPools, tmp_path: Path) -> None:
    pools[1].run(too_many_leave, EVICTING, tmp_path)


def big_table(scenario: Scenario, path: Path, num_rows: int) -> tuple[float, float]:
    """(changed rows, bytes) of a delta, as parts of those of the snapshot."""
    dmp, pipeline = build(scenario)
    for table in scenario.tables:
        checkpoint.import_rows(dmp, table.name, torch.arange(num_rows), torch.randn(num_rows, table.dim))
    writer = checkpoint.DeltaWriter(path, dmp, pipeline._optimizer, pipeline=pipeline)
    full = writer.save_full()
    num_bytes = sum(f.stat().st_size for f in full.rglob("*") if f.is_file())
    batches = iter(mine(scenario, all_batches(scenario)))
    for _ in range(scenario.steps):
        pipeline.progress(batches)
    delta = writer.save_delta()
    rows = sum(t.rows for c in read_manifest(full).collections for t in c.tables)
    changed = sum(t.rows for c in read_delta_of(full, 1).collections for t in c.tables)
    return changed / rows, sum(f.stat().st_size for f in delta.rglob("*") if f.is_file()) / num_bytes


def test_a_delta_costs_what_changed(pools: RankPools, tmp_path: Path) -> None:
    scenario = Scenario(optimizer="adam", steps=40, ids_per_table=1000)
    changed, num_bytes = pools[1].run(big_table, scenario, tmp_path, 40_000)[0]
    print(f"{changed:.3%} of the rows changed: {num_bytes:.3%} of the bytes")
    assert 0.009 < changed < 0.011
    assert num_bytes <= 1.2 * changed


def order_of_resume(scenario: Scenario, path: Path) -> list[str]:
    """What a writer does first that resumes while batches are in flight: the host group is the pipeline's then."""
    dmp, pipeline = build(scenario)
    writer = checkpoint.DeltaWriter(path, dmp, pipeline._optimizer, pipeline=pipeline)
    pipeline.progress(iter(mine(scenario, all_batches(scenario))))
    order: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        for owner, name in ((ShardedHashCollection, "take_back_prepared"), (Ranks, "gather")):
            original = getattr(owner, name)
            patch.setattr(owner, name, lambda *args, o=original, n=name: (order.append(n), o(*args))[1])
        writer.resume()
    return order


def test_batches_in_flight_are_taken_back_before_ranks_talk(pool_1: Any, tmp_path: Path) -> None:
    assert pool_1.run(order_of_resume, ADAM, tmp_path) == [["take_back_prepared", "gather"]]
