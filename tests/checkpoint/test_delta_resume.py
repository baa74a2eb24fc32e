"""A job goes on from a snapshot and its deltas, bit for bit, and so does its chain; `Checkpointer` writes both."""

from __future__ import annotations

import logging
import os
import signal
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from hybridrec import ConfigError, StateError, checkpoint
from hybridrec.checkpoint import delta_writer
from hybridrec.checkpoint.delta_chain import newest_delta, read_delta
from hybridrec.checkpoint.manifest import read_manifest
from tests.checkpoint.runs import build, dense_sum_of, go_on_against_oracle, load_and_go_on, records_of
from tests.checkpoint.test_background import Slow
from tests.checkpoint.test_deltas import ADAM, EVICTING, MAX_ROWS, compare, everyone, followed, full_disk, train
from tests.distributed.oracle import Table
from tests.distributed.pipelines import all_batches, mine
from tests.distributed.scenario import TABLES, Scenario
from tests.distributed.test_sharding_types import MIXED
from tests.ranks import RankFailure, RankPools


def write_until(
    scenario: Scenario, path: Path, *, at: int, every: int, first: int, max_rows: int | None = None
) -> dict[str, Any]:
    """A job that is killed after a step: a snapshot, deltas since, with batches in flight; what it was at each."""
    dmp, pipeline = build(scenario, max_rows=max_rows)
    writer = checkpoint.DeltaWriter(path, dmp, pipeline._optimizer, pipeline=pipeline)
    batches, points = iter(mine(scenario, all_batches(scenario))), {}
    for step in range(1, at + 1):
        pipeline.progress(batches)
        if step >= first and (step - first) % every == 0:
            extra = {"step": step, "rank": dist.get_rank()}
            point = writer.save_full(extra) if step == first else writer.save_delta(extra)
            points[str(point)] = (step, records_of(dmp))
    return {"points": points, "dense_sum": dense_sum_of(pipeline), "random": torch.get_rng_state()}


def resume_and_go_on(
    scenario: Scenario,
    path: Path,
    *,
    every: int,
    max_rows: int | None = None,
    depth: int = 3,
    mutant: str = "",
) -> dict[str, Any]:
    """What the job does that comes after it: trains to the end, and adds to the chain, as a follower sees it."""
    dmp, pipeline = build(scenario, depth, max_rows)
    follower = checkpoint.follow(path)
    number = follower.number
    writer = checkpoint.DeltaWriter(path, dmp, pipeline._optimizer, pipeline=pipeline)
    with pytest.MonkeyPatch.context() as patch:
        if mutant == "mark":
            original = delta_writer.DeltaWriter._final_ordinals
            patch.setattr(
                delta_writer.DeltaWriter, "_final_ordinals", lambda w: {c: o + 2 for c, o in original(w).items()}
            )
        loaded = writer.resume()
    if loaded is None:
        raise AssertionError("there is nothing to resume from")
    found = {"records": records_of(dmp), "extra": loaded.extra, "step": loaded.batches_committed}
    found["random"] = torch.get_rng_state()
    dist.barrier()
    batches = iter(mine(scenario, all_batches(scenario)[loaded.batches_committed :]))
    losses = []
    for step in range(loaded.batches_committed + 1, scenario.steps + 1):
        losses.append(pipeline.progress(batches).item())
        if step % every == 0:
            writer.save_delta()
            dist.barrier()
            follower.update()
            compare(follower, dmp, step)
            number += 1
    if follower.number != number:
        raise AssertionError(f"the chain began anew: {follower.number}, not {number}")
    return found | {"losses": losses, "final": records_of(dmp)}


@pytest.mark.parametrize(("world_size", "cache"), [(1, "minimum"), (2, "all"), (3, "minimum")])
def test_a_job_goes_on_from_a_delta_as_if_it_had_not_been_interrupted(
    pools: RankPools, tmp_path: Path, world_size: int, cache: str
) -> None:
    max_rows = MAX_ROWS[world_size]
    alone = pools[world_size].run(train, EVICTING, max_rows)
    killed = pools[world_size].run(write_until, EVICTING, tmp_path, first=30, every=3, at=40, max_rows=max_rows)
    (folder,) = tmp_path.glob("step_*")
    (folder / "deltas" / ".unfinished_00000004").mkdir()  # it was killed while it wrote the next one
    again = pools[world_size].run(
        resume_and_go_on,
        replace(EVICTING, cache=cache),
        tmp_path,
        every=3,
        max_rows=max_rows,
        depth=5,
    )
    for rank in range(world_size):
        assert again[rank]["step"] == 39 and again[rank]["extra"] == {"step": 39, "rank": rank}
        assert again[rank]["records"] == list(killed[rank]["points"].values())[-1][1]
        assert torch.equal(again[rank]["random"], killed[rank]["random"])
        assert again[rank]["losses"] == alone[rank]["losses"][39:]
        assert again[rank]["final"] == alone[rank]["final"]  # what is evicted too
        assert any(set(again[rank]["records"][t]) - set(again[rank]["final"][t]) for t in again[rank]["final"])
    assert newest_delta(folder)[0] == 6
    assert not list((folder / "deltas").glob(".unfinished_*"))


def load_each(scenario: Scenario, points: dict[str, Any], max_rows: int) -> None:
    """Every point by its folder: snapshot, deltas."""
    dmp, pipeline = build(scenario, max_rows=max_rows)
    for point, (step, records) in points.items():
        loaded = checkpoint.load(point, dmp, pipeline._optimizer, pipeline=pipeline)
        if (loaded.path, loaded.batches_committed, pipeline.batches_committed) != (Path(point), step, step):
            raise AssertionError(f"{point}: {loaded}")
        if records_of(dmp) != records:
            raise AssertionError(f"the rows of {point} are not those of step {step}")


def test_every_point_of_a_chain_is_loaded_by_its_folder(pools: RankPools, tmp_path: Path) -> None:
    (killed,) = pools[1].run(write_until, EVICTING, tmp_path, first=30, every=3, at=40, max_rows=160)
    assert [step for step, _ in killed["points"].values()] == [30, 33, 36, 39]
    pools[1].run(load_each, EVICTING, killed["points"], 160)


@pytest.mark.parametrize(("before", "after"), [(1, 2), (2, 1), (2, 3)])
def test_with_another_number_of_ranks(pools: RankPools, tmp_path: Path, before: int, after: int) -> None:
    tables = {"tables": MIXED} if (before, after) == (2, 1) else {}
    scenario = replace(ADAM, **tables)
    killed = pools[before].run(write_until, scenario, tmp_path, first=2, every=2, at=6)
    everything: dict[str, Any] = {}
    for one in killed:
        for name, rows in list(one["points"].values())[-1][1].items():
            everything.setdefault(name, {}).update(rows)
    # At another W the batches are others: the chain goes on, and training is that of an oracle put at the same rows.
    assert sum(pools[after].run(go_on_against_oracle, scenario, tmp_path, everything, killed[0]["dense_sum"])) == sum(
        map(len, everything.values())
    )
    pools[after].run(resume_and_go_on, scenario, tmp_path, every=2)
    pools[before].run(load_and_go_on, scenario, tmp_path)


def test_a_mutant_is_caught(pools: RankPools, tmp_path: Path) -> None:
    """A resumed chain that begins two batches too late."""
    pools[1].run(write_until, EVICTING, tmp_path, first=30, every=3, at=40, max_rows=160)
    with pytest.raises(RankFailure, match="the rows by deltas are not those of step 42"):
        pools[1].run(resume_and_go_on, EVICTING, tmp_path, every=3, max_rows=160, mutant="mark")


def damage(scenario: Scenario, path: Path, number: int) -> tuple[str, int, bool]:
    """A delta lacks its last byte; (what load says, where the point before is, whether the model was changed)."""
    dmp, pipeline = build(scenario, max_rows=160)
    before = records_of(dmp)
    try:
        checkpoint.load(path, dmp, pipeline._optimizer, pipeline=pipeline)
    except StateError as e:
        said = str(e)
    else:
        said = ""
    is_same = before == records_of(dmp)
    (folder,) = path.glob("step_*")
    loaded = checkpoint.load(folder / "deltas" / f"{number - 1:08d}", dmp, pipeline._optimizer, pipeline=pipeline)
    return said, loaded.batches_committed, is_same


@pytest.mark.parametrize("kind", ["*.rows", "*.ids", "dense.pt", "00001.pt", "manifest.json"])
def test_a_damaged_delta_is_refused_by_its_number(pools: RankPools, tmp_path: Path, kind: str) -> None:
    pools[2].run(write_until, EVICTING, tmp_path, first=30, every=3, at=40, max_rows=160)
    (folder,) = tmp_path.glob("step_*/deltas/00000003")
    file = next(f for f in sorted(folder.rglob(kind)) if f.stat().st_size)
    file.write_bytes(file.read_bytes()[:-1])
    found = pools[2].run(damage, EVICTING, tmp_path, 3)
    assert found[0] == found[1]
    said, step, is_same = found[0]
    assert "00000003" in said and f"{file.name} is damaged" in said and is_same and step == 36
    if kind != "manifest.json":
        assert "delta 3 of" in said


# ---- Checkpointer ----------------------------------------------------------------------------------------------------


def checkpointed(
    scenario: Scenario,
    path: Path,
    *,
    last: int,
    in_background: bool,
    import_at: int = 0,
    full_disk_at: int = 0,
    stop_at: int = 0,
) -> dict[str, Any]:
    """A snapshot every 20 steps, a delta every 4; every point as it was, by its step."""
    dmp, pipeline = build(scenario, max_rows=160)
    points, losses, errors, logged = {}, [], [], _Logged()
    with (
        pytest.MonkeyPatch.context() as patch,
        checkpoint.Checkpointer(
            path,
            dmp,
            pipeline._optimizer,
            pipeline,
            every=20,
            delta_every=4,
            in_background=in_background,
        ) as checkpointer,
        logged,
    ):
        first = checkpointer.resume()
        resumed = everyone(dmp) if first else {}
        slow = Slow(patch) if in_background else None
        batches = iter(mine(scenario, all_batches(scenario)[first:]))
        for step in range(first + 1, last + 1):
            losses.append(pipeline.progress(batches).item())
            if slow is not None:
                slow.batches += 1
            if step == import_at:
                checkpoint.import_rows(dmp, "user", torch.tensor([5]), torch.ones(1, 8))
            if step == stop_at and dist.get_rank() == dist.get_world_size() - 1:
                os.kill(os.getpid(), signal.SIGTERM)
            if step % 4 == 0 or step == stop_at:
                pipeline.withdraw()
                points[step] = everyone(dmp)
            if slow is not None and step in (import_at, full_disk_at):
                wait(checkpointer, slow)  # so that nothing puts off the delta that is due
            with full_disk(step == full_disk_at):
                try:
                    checkpointer.after_batch({"step": step})
                    if slow is not None and step == full_disk_at:
                        wait(checkpointer, slow)
                except StateError as e:
                    errors.append((step, str(e)))
            if checkpointer.is_stopping:
                break
    pipeline.withdraw()
    return {
        "first": first,
        "resumed": resumed,
        "points": points,
        "losses": losses,
        "errors": errors,
        "logged": logged.messages,
        "final": records_of(dmp),
    }


def wait(checkpointer: checkpoint.Checkpointer, slow: Slow) -> None:
    """Until this rank has written."""
    written = checkpointer._deltas._written
    if written is not None:
        with slow.awaited():
            written.saving._thread.join()


class _Logged(logging.Handler):
    """Why snapshots were written in place of deltas inside."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        if record.name == "hybridrec" and "in place of a delta" in record.getMessage():
            self.messages.append(record.getMessage())

    def __enter__(self) -> _Logged:
        logging.getLogger("hybridrec").addHandler(self)
        return self

    def __exit__(self, *_: Any) -> None:
        logging.getLogger("hybridrec").removeHandler(self)


def points_of(path: Path) -> list[tuple[int, int, int]]:
    """(step of the snapshot, number of the delta, its step) of all."""
    found = []
    for folder in sorted(path.glob("step_*")):
        manifest = read_manifest(folder)
        digest = manifest.digest
        found.append((manifest.step, 0, manifest.step))
        for number in range(1, newest_delta(folder)[0] + 1):
            delta = read_delta(folder, number, digest)
            digest = delta.digest
            found.append((manifest.step, number, delta.step))
    return found


def by_followers(path: Path, expected: dict[int, Any]) -> None:
    """The rows at the end of every chain that is there are those of its step."""
    for folder in sorted(path.glob("step_*")):
        follower = checkpoint.follow(folder)
        assert followed(follower) == expected[follower.step]


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("in_background", [False, True])
def test_the_checkpointer_writes_deltas_between_snapshots_and_resumes(
    pools: RankPools, tmp_path: Path, world_size: int, in_background: bool
) -> None:
    alone = pools[world_size].run(train, EVICTING, 160)
    begun = pools[world_size].run(checkpointed, EVICTING, tmp_path, last=35, in_background=in_background)
    points = points_of(tmp_path)
    assert points[0] == (4, 0, 4) and (20, 0, 20) in points  # the first that is due has nothing to follow
    if in_background:  # what is still being written may put off what is due
        assert len(points) <= 8
    else:
        assert points == [(4, n, 4 + 4 * n) for n in range(4)] + [(20, n, 20 + 4 * n) for n in range(4)]
    by_followers(tmp_path, begun[0]["points"])
    again = pools[world_size].run(checkpointed, EVICTING, tmp_path, last=48, in_background=in_background)
    for rank in range(world_size):
        first = again[rank]["first"]
        assert first == points[-1][2] and again[rank]["resumed"] == begun[rank]["points"][first]
        assert begun[rank]["losses"] == alone[rank]["losses"][:35]
        assert again[rank]["losses"] == alone[rank]["losses"][first:]
        assert again[rank]["final"] == alone[rank]["final"]
        assert again[rank]["logged"] == begun[rank]["logged"] == []  # nothing is wrong
    by_followers(tmp_path, begun[0]["points"] | again[0]["points"])
    assert points_of(tmp_path)[len(points)][:2] == (20, points[-1][1] + 1)  # the chain went on


@pytest.mark.parametrize("in_background", [False, True])
def test_a_chain_that_ended_is_followed_by_a_snapshot_and_the_reason_is_logged(
    pools: RankPools, tmp_path: Path, in_background: bool
) -> None:
    found = pools[2].run(checkpointed, EVICTING, tmp_path, last=19, in_background=in_background, import_at=9)
    assert [step for _, number, step in points_of(tmp_path) if number == 0] == [4, 12]
    assert "in place of a delta: save_delta: what changed in table 'user' is not known" in found[0]["logged"][0]
    assert len(found[0]["logged"]) == 1 and found[1]["logged"] == []
    by_followers(tmp_path, found[0]["points"])


@pytest.mark.parametrize("in_background", [False, True])
def test_what_a_delta_lost_to_a_full_disk_is_in_the_next_one(
    pools: RankPools, tmp_path: Path, in_background: bool
) -> None:
    found = pools[2].run(checkpointed, EVICTING, tmp_path, last=48, in_background=in_background, full_disk_at=44)
    (step, message), (_, other) = found[0]["errors"][0], found[1]["errors"][0]
    assert message == other and "No space left on device" in message and "on rank 1 of 2" in message
    assert step == (45 if in_background else 44)  # at the next call
    assert [p[2] for p in points_of(tmp_path)][-1] == 48 and 44 not in [p[2] for p in points_of(tmp_path)]
    by_followers(tmp_path, found[0]["points"])


def test_a_job_that_is_asked_to_end_writes_a_delta(pools: RankPools, tmp_path: Path) -> None:
    found = pools[2].run(checkpointed, EVICTING, tmp_path, last=48, in_background=True, stop_at=42)
    assert points_of(tmp_path)[-1][2] == 42 and points_of(tmp_path)[-1][1] > 0
    by_followers(tmp_path, found[0]["points"])


def other_jobs(scenario: Scenario, path: Path) -> list[str]:
    """What a writer says when its snapshot is not the newest any more, when it ends otherwise, when it is gone."""
    dmp, pipeline = build(scenario)
    batches, said = iter(mine(scenario, all_batches(scenario))), []
    pipeline.progress(batches)
    writers = [checkpoint.DeltaWriter(path, dmp, pipeline._optimizer, pipeline=pipeline, keep=1) for _ in range(2)]
    writers[0].save_full()
    for change in (
        lambda: checkpoint.save(path, dmp, pipeline._optimizer, pipeline=pipeline),
        lambda: (writers[1].resume(), writers[1].save_delta()),
        lambda: checkpoint.save(path, dmp, pipeline._optimizer, pipeline=pipeline, keep=1),
    ):
        change()
        with pytest.raises(StateError, match=r"save_delta: .* Call save_full\(\) first") as error:
            writers[0].save_delta()
        said.append(str(error.value))
        writers[0].save_full()
        dist.barrier()
    return said


def test_a_chain_that_somebody_else_writes_is_not_added_to(pools: RankPools, tmp_path: Path) -> None:
    said, same = pools[2].run(other_jobs, ADAM, tmp_path)
    assert said == same
    assert "has a newer snapshot than step_000000000001" in said[0]
    assert "ends with delta 1, which this job did not write; delta 0 was its last one" in said[1]
    assert "is not there any more" in said[2]


def cut_otherwise(scenario: Scenario, path: Path) -> str:
    """After a restart the columns of a table are on other ranks."""
    dmp, pipeline = build(scenario)
    writer = checkpoint.DeltaWriter(path, dmp, pipeline._optimizer, pipeline=pipeline)
    loaded = writer.resume()
    if loaded is None or loaded.batches_committed != 6:
        raise AssertionError(f"{loaded}")
    with pytest.raises(StateError, match=r"save_delta: .* Call save_full\(\) first") as error:
        writer.save_delta()
    follower = checkpoint.follow(path)
    writer.save_full()
    pipeline.progress(iter(mine(scenario, all_batches(scenario)[6:])))
    writer.save_delta()
    dist.barrier()
    follower.update()
    compare(follower, dmp, 7)
    return str(error.value)


def test_a_chain_begins_anew_where_tables_are_cut_otherwise(pools: RankPools, tmp_path: Path) -> None:
    whole = Table(name="page", dim=8, features=("page",), owners=((8, 1),))
    pools[2].run(write_until, replace(ADAM, tables=(TABLES[0], whole)), tmp_path, first=2, every=2, at=6)
    cut = replace(whole, owners=((5, 0), (3, 1)))
    for said in pools[2].run(cut_otherwise, replace(ADAM, tables=(TABLES[0], cut)), tmp_path):
        assert "tables, or columns of them, are on other ranks than those of the snapshot" in said


def no_room(scenario: Scenario, path: Path) -> tuple[str, list[int], list[int]]:
    """One table's log has room, the next one's does not: the first gives its memory back, and nothing is written."""
    dmp, pipeline = build(scenario, max_rows=160)
    pipeline.progress(iter(mine(scenario, all_batches(scenario))))
    pipeline.withdraw()
    group = dmp.module.ebc.lookup.log.group
    before = [group.counters(t).host_bytes for t in range(3)]
    original = type(group).track_removals

    def track_removals(self: Any, table: int, max_ids: int | None) -> None:
        if table == 2 and max_ids is not None and dist.get_rank() == dist.get_world_size() - 1:
            raise StateError("track_removals: there is no room.")
        original(self, table, max_ids)

    with pytest.MonkeyPatch.context() as patch, pytest.raises(StateError, match="there is no room") as error:
        patch.setattr(type(group), "track_removals", track_removals)
        checkpoint.DeltaWriter(path, dmp, pipeline._optimizer, pipeline=pipeline).save_full()
    return str(error.value), before, [group.counters(t).host_bytes for t in range(3)]


def test_without_room_for_the_logs_nothing_is_taken_and_nothing_written(pools: RankPools, tmp_path: Path) -> None:
    for message, before, after in pools[2].run(no_room, EVICTING, tmp_path):
        assert "(on rank 1 of 2)" in message and before == after
    assert list(tmp_path.iterdir()) == []


def wrong_arguments() -> list[str]:
    dmp, pipeline = build(ADAM)
    said = []
    for arguments in ({"delta_every": 0}, {"every": 4, "delta_every": 4}, {"delta_every": 4, "max_removed": -1}):
        with pytest.raises(ConfigError) as error:
            checkpoint.Checkpointer("nowhere", dmp, pipeline._optimizer, pipeline, **arguments)
        said.append(str(error.value))
    with ThreadPoolExecutor(1, "other") as thread, pytest.raises(ConfigError) as error:
        thread.submit(checkpoint.Checkpointer, "nowhere", dmp, pipeline._optimizer, pipeline).result()
    return [*said, str(error.value), str(Path("nowhere").exists())]


def test_wrong_arguments_are_refused(pool_1: Any) -> None:
    ((zero, same, negative, thread, is_locked),) = pool_1.run(wrong_arguments)
    assert "delta_every=0" in zero and "delta_every=4, every=4" in same and "max_removed=-1" in negative
    assert "thread 'other_0'" in thread and "stops_on_sigterm=False" in thread and is_locked == "False"
