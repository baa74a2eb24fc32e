"""Columns of tables that are cut otherwise than when they were saved: every value is found again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from hybridrec import (
    ConfigError,
    HashEmbeddingBagCollection,
    HashEmbeddingBagConfig,
    HybridRecError,
    StateError,
    checkpoint,
)
from hybridrec.checkpoint.files import write_file
from hybridrec.checkpoint.manifest import MANIFEST, Manifest, read_manifest
from hybridrec.distributed.column_parts import covering, recut
from hybridrec.distributed.lookup import PooledLookup
from hybridrec.distributed.routing import TablePart
from hybridrec.store.row_export import RowChunk, side_by_side
from hybridrec.store.row_state_layout import RowStateLayout
from tests.checkpoint.runs import Records, build, go_on_against_oracle, name_of, records_of, save_and_go_on
from tests.checkpoint.test_save_load import everything
from tests.distributed.oracle import Table, parts_of
from tests.distributed.pipelines import all_batches, mine
from tests.distributed.scenario import Scenario
from tests.ranks import RankPools

ADAM = Scenario(optimizer="adam", steps=12, ids_per_table=50)


def tables(**owners: tuple[tuple[int, int], ...]) -> tuple[Table, ...]:
    return (
        Table(name="user", dim=8, features=("user",), owners=owners["user"]),
        Table(name="item", dim=8, features=("clicked", "bought"), is_mean=True, seed=3, owners=owners["item"]),
        Table(name="page", dim=6, features=("page",), row_type="bfloat16", owners=owners["page"]),
        Table(name="word", dim=5, features=("word",), owners=owners["word"]),
    )


CUT = tables(user=((4, 1), (4, 0)), item=((8, 1),), page=((2, 0), (4, 1)), word=())
CUT_OTHERWISE = tables(
    user=((2, 0), (5, 1), (1, 1)), item=((3, 0), (5, 1)), page=((3, 1), (3, 1)), word=((1, 1), (4, 2))
)
NOT_CUT = tables(user=(), item=(), page=((6, 0),), word=((5, 1),))


def cut_again(records: Records, before: Sequence[Table], after: Sequence[Table], num_states: int) -> Records:
    """What was saved, with the columns of other tables: on bytes, apart from how the package does it."""
    found: Records = {}
    for old, new in zip(before, after, strict=True):
        width = 2 if old.row_type != "float32" else 4
        widths = [width] + [4] * num_states
        saved = [(records[name_of(part)], part.dim) for part in parts_of(old, 3)]
        for part in parts_of(new, 3):
            found[name_of(part)] = rows = {}
            for id_, (_, score) in saved[0][0].items():
                pieces = [split(rows_of[id_][0], dim, widths) for rows_of, dim in saved]
                assert {rows_of[id_][1] for rows_of, _ in saved} == {score}
                whole = [np.concatenate([piece[k] for piece in pieces]) for k in range(len(widths))]
                cut = [array[part.first : part.first + part.dim].tobytes() for array in whole]
                rows[id_] = (b"".join(data + bytes(-len(data) % 4) for data in cut), score)
    return found


def split(record: bytes, dim: int, widths: Sequence[int]) -> list[np.ndarray]:
    """[D, bytes of a value] of the weights and of each state; 16-bit weights fill whole floats."""
    arrays, begin = [], 0
    for width in widths:
        size = dim * width
        arrays.append(np.frombuffer(record, np.uint8, size, begin).reshape(dim, width))
        begin += size + -size % 4
    assert begin == len(record)
    return arrays


@pytest.mark.parametrize(
    ("world_size", "before", "after"),
    [((2, 3), CUT, CUT_OTHERWISE), ((3, 2), CUT_OTHERWISE, CUT), ((2, 1), CUT, NOT_CUT), ((1, 2), NOT_CUT, CUT)],
    ids=["cut otherwise", "and back", "put together", "cut"],
)
def test_training_goes_on(
    pools: RankPools, tmp_path: Path, world_size: tuple[int, int], before: tuple[Table, ...], after: tuple[Table, ...]
) -> None:
    then, now = replace(ADAM, tables=before), replace(ADAM, tables=after)
    saved = pools[world_size[0]].run(save_and_go_on, then, tmp_path, 5)
    rows = cut_again(everything(saved), before, after, 2)
    num_rows = pools[world_size[1]].run(go_on_against_oracle, now, tmp_path, rows, saved[0]["dense_sum"])
    assert sum(num_rows) == sum(map(len, rows.values())) > 100


def merged_state_dicts(before: Scenario, after: Scenario) -> tuple[Records, Records]:
    """(rows of a model, rows of another one that loaded the state_dicts of all its ranks)."""
    dmp, pipeline = build(before)
    batches = iter(mine(before, all_batches(before)))
    for _ in range(3):
        pipeline.progress(batches)
    states: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(states, dict(dmp.module.ebc.state_dict()))
    saved = records_of(dmp)
    pipeline.reset()
    other = build(after)[0]
    other.module.ebc.load_state_dict({key: value for state in states for key, value in state.items()})
    return saved, records_of(other)


@pytest.mark.parametrize(("before", "after"), [(CUT, CUT_OTHERWISE), (CUT_OTHERWISE, NOT_CUT), (NOT_CUT, CUT)])
def test_state_dicts_too(pools: RankPools, before: tuple[Table, ...], after: tuple[Table, ...]) -> None:
    pairs = pools[2].run(merged_state_dicts, replace(ADAM, tables=before), replace(ADAM, tables=after))
    saved, found = (everything([{"records": records} for records in one]) for one in zip(*pairs, strict=True))
    assert found == cut_again(saved, before, after, 2) and all(found.values())


def state_dict_without_room(scenario: Scenario) -> str:
    """What is said of a collection after the second table of a state_dict found no room."""
    dmp, _ = build(scenario)
    ebc, original, calls = dmp.module.ebc, PooledLookup.import_rows, 0
    state = ebc.state_dict()

    def import_rows(lookup: PooledLookup, table: str, rows: RowChunk) -> None:
        nonlocal calls
        calls += 1
        if calls == 2:
            raise StateError("no room")
        original(lookup, table, rows)

    with pytest.MonkeyPatch.context() as patch, pytest.raises(StateError, match="no room"):
        patch.setattr(PooledLookup, "import_rows", import_rows)
        ebc.load_state_dict(state)
    with pytest.raises(StateError) as error:
        ebc.state_dict()
    return str(error.value)


def test_a_state_dict_that_is_loaded_in_part_is_said_to_be(pools: RankPools) -> None:
    (said,) = pools[1].run(state_dict_without_room, ADAM)
    assert "a state_dict could be loaded only in part: StateError: no room" in said


def evicted_columns(path: Path, scenario: Scenario) -> bool:
    """Whether all columns of each table have the same ids after evictions."""
    saved = save_and_go_on(scenario, path, scenario.steps - 1, max_rows=150)
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, saved["final"])
    ids: dict[str, set[frozenset[int]]] = {}
    for one in everyone:
        for name, rows in one.items():
            ids.setdefault(name.partition("[")[0], set()).add(frozenset(rows))
    return saved["evicted"] > 0 and all(len(ids[name]) == 1 for name in ("user", "item"))


def test_columns_of_a_table_keep_the_same_ids(pools: RankPools, tmp_path: Path) -> None:
    """Their owners evict by the same scores: on this rests that columns are put together row by row."""
    cut = tuple(replace(table, owners=((2, 1), (table.dim - 2, 0))) for table in CUT[:2])
    scenario = Scenario(optimizer="adam", steps=40, ids_per_table=300, batch_size=2, tables=cut)
    assert pools[2].run(evicted_columns, tmp_path, scenario) == [True, True]


def refusal(scenario: Scenario, path: Path) -> str:
    dmp, pipeline = build(scenario)
    pipeline.progress(iter(mine(scenario, all_batches(scenario))))
    pipeline._thread.settle()
    before = records_of(dmp)
    with pytest.raises(HybridRecError) as caught:
        checkpoint.load(path, dmp, pipeline._optimizer, pipeline=pipeline)
    is_same = (
        "unchanged" if {n: set(r) for n, r in records_of(dmp).items()} == {n: set(r) for n, r in before.items()} else ""
    )
    return f"{type(caught.value).__name__} {is_same}: {caught.value}"


def forge(folder: Path, manifest: Manifest) -> None:
    (folder / MANIFEST).unlink()
    write_file(folder, MANIFEST, manifest.encode(), 0)


@pytest.mark.parametrize("fault", ["wider", "a part is missing", "other ids"])
def test_columns_that_do_not_make_a_table(pools: RankPools, tmp_path: Path, fault: str) -> None:
    wide = replace(CUT[0], dim=8, owners=((4, 1), (4, 0)))
    scenario = replace(ADAM, tables=(wide, CUT[1]), steps=3)
    (folder, _) = (one["folder"] for one in pools[2].run(save_and_go_on, scenario, tmp_path, 2))
    manifest = read_manifest(folder)
    (collection,) = manifest.collections
    user, tail, item = (next(t for t in collection.tables if t.name == n) for n in ("user[0:4]", "user[4:8]", "item"))
    if fault == "wider":
        now = replace(wide, dim=6, owners=((3, 0), (3, 1)))
        words = ["embedding_dim is 8 in the snapshot (['user[0:4]', 'user[4:8]']) and 6"]
    elif fault == "a part is missing":
        now = replace(wide, owners=())
        forge(folder, replace(manifest, collections=(replace(collection, tables=(user, item)),)))
        words = ["embedding_dim is 4 in the snapshot (['user[0:4]']) and 8"]
    else:
        now = replace(wide, owners=())
        files = (replace(f, rows=f.rows - 1, bytes=f.bytes - f.bytes // f.rows) for f in tail.files)
        cut = replace(tail, files=tuple(files))
        forge(folder, replace(manifest, collections=(replace(collection, tables=(user, cut, item)),)))
        words = ["'user[0:4]'", "'user[4:8]'", "rows"]
    for text in pools[2].run(refusal, replace(scenario, tables=(now, CUT[1])), tmp_path):
        assert all(word in text for word in words), text


def chunk(ids: list[int], columns: range) -> RowChunk:
    ids_N = torch.tensor(ids, dtype=torch.int64)
    weights_ND = ids_N.unsqueeze(1) * 10.0 + torch.tensor(columns)
    return RowChunk(ids_N=ids_N, scores_N=ids_N * 0 + 4, weights_ND=weights_ND)


def test_columns_with_other_ids_are_not_put_together() -> None:
    config = next(
        iter(HashEmbeddingBagCollection([HashEmbeddingBagConfig(9, 5, "t", feature_names=["f"])]).table_configs)
    )
    part = TablePart(table=config, first_column=1, dim=3, owner=0)
    columns = covering(part, ["t[2:5]", "other", "t[0:2]", "t[5:6]"], "the test")
    assert [(c.name, c.first_column, c.dim) for c in columns] == [("t[0:2]", 0, 2), ("t[2:5]", 2, 3)]
    layout = RowStateLayout(dim=3)
    head, tail = range(2), range(2, 5)
    streams = [iter([chunk([1, 2, 3], head), chunk([5], head)]), iter([chunk([1], tail), chunk([2, 3, 5], tail)])]
    rows = [recut(list(zip(columns, chunks, strict=True)), part, layout) for chunks in side_by_side(streams)]
    assert [r.ids_N.tolist() for r in rows] == [[1], [2, 3], [5]]
    assert rows[1].weights_ND.tolist() == [[21, 22, 23], [31, 32, 33]]
    for others in ([chunk([1, 2], tail)], [chunk([1, 2], tail), chunk([], tail), chunk([3, 5, 6], tail)], []):
        with pytest.raises(StateError, match="different numbers of rows: of 2 parts"):
            list(side_by_side([iter([chunk([1, 2, 3], head), chunk([5], head)]), iter(others)]))
    even = side_by_side([iter([chunk([1], head)]), iter([chunk([], tail), chunk([1], tail), chunk([], tail)])])
    assert [[len(one.ids_N) for one in chunks] for chunks in even] == [[1, 1]]
    with pytest.raises(StateError, match=r"'t\[0:2\]' and 't\[2:5\]' do not have the same ids"):
        recut(list(zip(columns, (chunk([1, 2], head), chunk([1, 3], tail)), strict=True)), part, layout)
    for saved in (["t[0:2]"], ["t[0:2]", "t[3:5]"], ["t", "t[0:2]"], []):
        with pytest.raises(ConfigError, match="its columns 1 to 4 are needed, the test has"):
            covering(part, saved, "the test")
