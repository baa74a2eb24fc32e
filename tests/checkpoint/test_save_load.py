"""A run that was saved goes on, bit for bit, on the same and on other numbers of ranks."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

from hybridrec import ConfigError, StateError, accumulate_gradients, checkpoint
from hybridrec.checkpoint.loading import _share
from hybridrec.checkpoint.manifest import FileEntry, Manifest, read_manifest
from hybridrec.checkpoint.points import Layer, Point
from hybridrec.distributed.lookup import PooledLookup
from hybridrec.native import ShardGroup
from tests.checkpoint.runs import Records, build, go_on_against_oracle, load_and_go_on, records_of, save_and_go_on
from tests.distributed.oracle import Table
from tests.distributed.pipelines import all_batches, mine
from tests.distributed.scenario import TABLES, Scenario
from tests.distributed.test_sequence_oracle import COLUMNS, SEQUENCES
from tests.distributed.test_sharding_types import MIXED
from tests.ranks import RankFailure, RankPools

ADAM = Scenario(optimizer="adam", steps=14, ids_per_table=50)
EVICTING = Scenario(optimizer="rowwise_adagrad", steps=48, ids_per_table=300, batch_size=2)


def everything(saved: list[dict[str, Any]]) -> Records:
    names = dict.fromkeys(name for one in saved for name in one["records"])
    return {name: {i: r for one in saved for i, r in one["records"].get(name, {}).items()} for name in names}


@pytest.mark.parametrize(("world_size", "cache"), [(1, "minimum"), (2, "minimum"), (2, "all")])
def test_a_run_goes_on_as_if_it_had_not_been_interrupted(
    pools: RankPools, tmp_path: Path, world_size: int, cache: str
) -> None:
    saved = pools[world_size].run(save_and_go_on, ADAM, tmp_path, 6)
    again = pools[world_size].run(load_and_go_on, replace(ADAM, cache=cache), tmp_path)
    for rank, (before, after) in enumerate(zip(saved, again, strict=True)):
        assert before["records"] == after["records"] and all(before["records"].values())
        assert before["losses"][6:] == after["losses"]
        assert before["final"] == after["final"]
        assert after["loaded"].extra == {"rank": rank} and after["loaded"].batches_committed == 6


def test_future_evictions_are_those_of_the_uninterrupted_run(pools: RankPools, tmp_path: Path) -> None:
    saved = pools[2].run(save_and_go_on, EVICTING, tmp_path, 34, max_rows=160)
    again = pools[2].run(load_and_go_on, replace(EVICTING, cache="all"), tmp_path, max_rows=160, depth=5)
    for before, after in zip(saved, again, strict=True):
        assert before["evicted"] > 0
        assert set(before["records"]["item"]) - set(before["final"]["item"])
        assert before["final"] == after["final"]
        assert before["losses"][34:] == after["losses"]


@pytest.mark.parametrize(("before", "after"), [(1, 2), (2, 3), (2, 1)])
def test_it_goes_on_with_another_number_of_ranks(pools: RankPools, tmp_path: Path, before: int, after: int) -> None:
    reshard(pools, tmp_path, before, after, "adam")


@pytest.mark.parametrize(("before", "after"), [(2, 2), (2, 1), (1, 2)])
def test_tables_and_columns_on_single_ranks(pools: RankPools, tmp_path: Path, before: int, after: int) -> None:
    reshard(pools, tmp_path, before, after, "adam", MIXED)
    saved = pools[before].run(state_dicts, replace(ADAM, tables=MIXED), 3, None)
    found = pools[after].run(state_dicts, replace(ADAM, tables=MIXED), 3, [one["state"] for one in saved])
    assert everything(found) == everything(saved)


@pytest.mark.parametrize("tables", [SEQUENCES, COLUMNS], ids=["row_wise", "columns"])
def test_sequences(pools: RankPools, tmp_path: Path, tables: tuple[Table, ...]) -> None:
    scenario = replace(ADAM, tables=tables, is_sequence=True, batch_size=6)
    saved = pools[2].run(save_and_go_on, scenario, tmp_path, 6)
    again = pools[2].run(load_and_go_on, replace(scenario, cache="all"), tmp_path)
    for before, after in zip(saved, again, strict=True):
        assert before["records"] == after["records"] and all(before["records"].values())
        assert before["losses"][6:] == after["losses"] and before["final"] == after["final"]
    dicts = pools[2].run(state_dicts, scenario, 3, None)
    found = pools[1].run(state_dicts, scenario, 3, [one["state"] for one in dicts])
    assert everything(found) == everything(dicts)


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", ["adam", "rowwise_adagrad", "sgd"])
@pytest.mark.parametrize("after", [1, 2, 3, 4])
@pytest.mark.parametrize("before", [1, 2, 3, 4])
def test_it_goes_on_with_any_number_of_ranks(
    pools: RankPools, tmp_path: Path, before: int, after: int, optimizer: str
) -> None:
    reshard(pools, tmp_path, before, after, optimizer)


def reshard(
    pools: RankPools, path: Path, before: int, after: int, optimizer: str, tables: tuple[Table, ...] = TABLES
) -> None:
    scenario = replace(ADAM, optimizer=optimizer, tables=tables)
    saved = pools[before].run(save_and_go_on, scenario, path, 6)
    rows = everything(saved)
    num_rows = pools[after].run(go_on_against_oracle, scenario, path, rows, saved[0]["dense_sum"])
    assert sum(num_rows) == sum(map(len, rows.values())) > 100


def load_with(mutant: str, scenario: Scenario, path: Path, max_rows: int | None) -> dict[str, Any]:
    with pytest.MonkeyPatch.context() as patch:
        if mutant == "scores":
            original = ShardGroup.import_rows

            def import_rows(self: ShardGroup, table: int, ids: Any, scores: Any, records: Any) -> None:
                original(self, table, ids, scores * 0 + self.ordinal, records)

            patch.setattr(ShardGroup, "import_rows", import_rows)
        elif mutant == "states":
            original_rows = PooledLookup.import_rows

            def without_states(self: PooledLookup, table: str, rows: Any) -> None:
                rows.records(self.tables[self.table_names.index(table)].layout)[:, rows.weights_ND.shape[1] :] = 0
                original_rows(self, table, rows)

            patch.setattr(PooledLookup, "import_rows", without_states)
        else:
            original_forget = PooledLookup.forget_rows

            def forget_rows(self: PooledLookup, *, ordinal: int, committed: int, num_batches: int) -> None:
                original_forget(self, ordinal=ordinal, committed=0, num_batches=num_batches)

            patch.setattr(PooledLookup, "forget_rows", forget_rows)
        return load_and_go_on(scenario, path, max_rows=max_rows)


@pytest.mark.parametrize("mutant", ["scores", "states", "steps"])
def test_mutants_are_caught(pools: RankPools, tmp_path: Path, mutant: str) -> None:
    scenario, max_rows, at = (EVICTING, 160, 34) if mutant == "scores" else (ADAM, None, 6)
    saved = pools[1].run(save_and_go_on, scenario, tmp_path, at, max_rows=max_rows)
    try:
        again = pools[1].run(load_with, mutant, scenario, tmp_path, max_rows)
    except RankFailure:
        return
    assert saved[0]["final"] != again[0]["final"]


def state_dicts(scenario: Scenario, at: int, merged: list[Any] | None) -> dict[str, Any]:
    """Train and take the state_dict at a step; or, given those of all ranks, load them."""
    dmp, pipeline = build(scenario)
    batches = all_batches(scenario)
    if merged is None:
        iterator = iter(mine(scenario, batches))
        for _ in range(at):
            pipeline.progress(iterator)
        return {"state": dmp.state_dict(), "records": records_of(dmp)}  # batches in flight are taken back
    # TorchRec writes into the dict that it loads: it gets copies.
    for state, error in ((merged[0], len(merged) not in (1, dist.get_world_size())), ({}, True)):
        with pytest.raises(ConfigError, match="the state_dict has rows of the ranks") if error else nullcontext():
            dmp.load_state_dict(dict(state if error or len(merged) == 1 else merged[dist.get_rank()]))
    dmp.load_state_dict({key: value for state in merged for key, value in state.items()})
    pipeline.progress(iter(mine(scenario, batches[at:])))
    pipeline.reset()
    dmp.load_state_dict({key: value for state in merged for key, value in state.items()})
    return {"records": records_of(dmp), "ordinal": dmp.module.ebc.lookup.log.group.ordinal}


@pytest.mark.parametrize(("before", "after"), [(2, 2), (2, 1), (1, 2)])
def test_ordinary_state_dicts_have_the_rows(pools: RankPools, before: int, after: int) -> None:
    saved = pools[before].run(state_dicts, ADAM, 5, None)
    found = pools[after].run(state_dicts, ADAM, 5, [one["state"] for one in saved])
    rows = everything(saved)
    loaded = everything(found)
    assert loaded == rows and sum(map(len, rows.values())) > 100
    assert [one["ordinal"] for one in found] == [5] * after


def other_sharding(saved_with: Scenario, loaded_with: Scenario) -> tuple[str, bool]:
    """A state_dict of another sharding: (what is said of this rank's alone, whether all ranks' give the same rows)."""
    dmp, pipeline = build(saved_with)
    iterator = iter(mine(saved_with, all_batches(saved_with)))
    for _ in range(4):
        pipeline.progress(iterator)
    states: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(states, dict(dmp.module.ebc.state_dict()))
    saved: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(saved, {"records": records_of(dmp)})
    pipeline.reset()
    other = build(loaded_with)[0]
    text = ""
    try:
        other.module.ebc.load_state_dict(states[dist.get_rank()])
    except ConfigError as e:
        text = str(e)
    other.module.ebc.load_state_dict({key: value for state in states for key, value in state.items()})
    loaded: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(loaded, {"records": records_of(other)})
    return text, everything(loaded) == everything(saved)


@pytest.mark.parametrize("is_row_wise_then", [True, False])
def test_a_state_dict_of_another_sharding_loads_whole_or_not_at_all(pools: RankPools, is_row_wise_then: bool) -> None:
    pair = (replace(ADAM, tables=(replace(MIXED[1], owners=()),)), replace(ADAM, tables=MIXED[1:2]))
    results = pools[2].run(other_sharding, *(pair if is_row_wise_then else reversed(pair)))
    assert all(is_same for _, is_same in results)
    refused = results[1 if is_row_wise_then else 0][0]  # the owner of the table, or the rank that has none of its rows
    assert "page" in refused and "state_dict" in refused


def interrupted_group(path: Path) -> list[tuple[int, int, int]]:
    """(ordinal, steps, batches) in snapshots before a group of batches whose gradients wait, in it, and after it."""
    dmp, _ = build(ADAM)
    accumulate_gradients(dmp)
    found = []
    for batch in mine(ADAM, all_batches(ADAM)[:3]):
        folder = checkpoint.save(path, dmp)
        state = dmp.module.ebc.state_dict()[f"progress.rank_{dist.get_rank()}_of_{dist.get_world_size()}"]
        manifest = read_manifest(folder)
        (saved,) = manifest.collections
        found.append((saved.ordinal, saved.batches_committed, manifest.step))
        assert found[-1] == tuple(state.tolist())
        dmp(batch)[0].backward()
        if len(found) == 2:
            dmp.fused_optimizer.step()
    return found


def test_batches_that_wait_for_their_step_are_not_in_a_snapshot(pools: RankPools, tmp_path: Path) -> None:
    """Nor are their ordinals: the run that goes on trains them again, and evicts what this one evicts."""
    assert pools[2].run(interrupted_group, tmp_path) == [[(0, 0, 0), (0, 0, 0), (2, 1, 2)]] * 2


def unexpected_keys(scenario: Scenario) -> tuple[list[str], str, str]:
    dmp, _ = build(scenario)
    state = dmp.state_dict()
    state["ebc.embedding_bags.user.weight"] = state["ebc.rows.user.rank_0_of_1.records"]
    unexpected = dmp.load_state_dict(state, strict=False).unexpected_keys
    texts = []
    for call in (dmp.module.ebc.embedding_bags.state_dict, lambda: dmp.module.ebc.embedding_bags.load_state_dict({})):
        try:
            call()
        except StateError as e:
            texts.append(str(e))
    return unexpected, texts[0], texts[1]


def test_what_is_no_checkpoint_of_hashed_tables_is_named(pool_1: Any) -> None:
    ((unexpected, saved, loaded),) = pool_1.run(unexpected_keys, ADAM)
    assert unexpected == ["embedding_bags.user.weight"] or unexpected == ["ebc.embedding_bags.user.weight"]
    assert "by itself it is no checkpoint" in saved and "by itself it is no checkpoint" in loaded


@pytest.mark.parametrize(("before", "now"), [(3, 3), (1, 3), (4, 2)])
def test_every_file_is_verified_once_and_at_the_same_number_of_ranks_by_its_own(before: int, now: int) -> None:
    files = tuple(FileEntry(name=f"{n}", rank=n % before, bytes=100 - n, sha256="") for n in range(12))
    manifest = Manifest(step=1, world_size=before, collections=(), dense=files[0], ranks=files[1:])
    point = Point(layers=(Layer(folder=Path("snapshot"), manifest=manifest),))
    shares: list[list[FileEntry]] = []
    for rank in range(now):
        ranks: Any = SimpleNamespace(rank=rank, world_size=now)
        shares.append([file for _, file in _share(point, ranks)])
    assert sorted(int(file.name) for share in shares for file in share) == list(range(12))
    if before == now:
        assert [{file.rank for file in share} for share in shares] == [{rank} for rank in range(now)]
    sizes = [sum(file.bytes for file in share) for share in shares]
    assert max(sizes) - min(sizes) <= 100
