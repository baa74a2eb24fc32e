"""Tables that RecSDK saved come into a sharded model, and training goes on with them."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torchrec.distributed import DistributedModelParallel

from hybridrec import checkpoint
from hybridrec.checkpoint import recsdk_scan
from tests.checkpoint.recsdk_writer import USER, Content, float_contents, write_dynamic, write_merged, write_ranks
from tests.checkpoint.runs import build, records_of
from tests.distributed.oracle import Batch, Oracle, Table, mix64, owner, parts_of, scenario_loss
from tests.distributed.pipelines import all_batches, build_oracle, mine
from tests.distributed.scenario import Scenario, compare_state, make_dense, raise_together, state_of, universe
from tests.distributed.test_sharding_types import MIXED
from tests.ranks import RankPools

MOMENTS = {"sgd": 0, "adagrad": 1, "adam": 2}


def contents_of(scenario: Scenario, oracle: Oracle) -> dict[str, Content]:
    """Every row of an oracle, whatever rank has which of its columns."""
    found: dict[str, dict[int, list[np.ndarray]]] = {t.name: {} for t in scenario.tables}
    mine = [(p.table, p.first, p.dim, oracle.state_of(t)) for t, p in enumerate(oracle.mine)]
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    num_moments = MOMENTS[scenario.optimizer]
    for table, first, dim, records in (entry for one in everyone for entry in one):
        for id_, record in records.items():
            row = found[table.name].setdefault(id_, [np.empty(table.dim, "<f4") for _ in range(1 + num_moments)])
            for i, part in enumerate(row):
                part[first : first + dim] = record[i * dim : (i + 1) * dim]
    return {t.name: Content(dim=t.dim, rows=found[t.name], num_moments=num_moments) for t in scenario.tables}


def copy_dense(
    scenario: Scenario, dmp: DistributedModelParallel, pipeline: Any, oracle: Oracle, optimizer: torch.optim.Optimizer
) -> torch.optim.Optimizer:
    """The dense part is the user's to save; here it goes from hand to hand.

    The oracle gets a new one too: how gradients are cut for the all-reduce, and so their last bits, depends on whether
    it was the first.
    """
    fresh, new_optimizer = build_oracle(scenario)
    (_, dense) = pipeline._optimizer.optimizers[1]
    for module in (dmp.module.dense, fresh.dense.module):
        module.load_state_dict(oracle.dense.module.state_dict())
    parameters = oracle.dense.parameters(), fresh.dense.parameters(), dense.params.values()
    for theirs, new, ours in zip(*parameters, strict=True):
        for state in (new_optimizer.state[new], dense.state[ours]):
            state["sum"].copy_(optimizer.state[theirs]["sum"])
    oracle.dense = fresh.dense
    return new_optimizer


def go_on_with_import(scenario: Scenario, path: Path, at: int, layout: str, saved_ranks: int) -> dict[str, Any]:
    """A plain table trains, RecSDK's files are written of it, they are imported, and both train on: bit for bit."""
    batches = all_batches(scenario)
    oracle, optimizer = build_oracle(scenario)
    for everyone in batches[:at]:
        oracle.step(everyone, optimizer)
    contents = contents_of(scenario, oracle)
    if dist.get_rank() == 0:
        write_merged(path, contents) if layout == "merged" else write_ranks(path, contents, saved_ranks)
    dist.barrier()
    dmp, pipeline = build(scenario)
    optimizer = copy_dense(scenario, dmp, pipeline, oracle, optimizer)
    step = at if scenario.optimizer == "adam" else None
    with mock.patch.object(recsdk_scan, "CHUNK_BYTES", 300):  # some rows
        report = checkpoint.import_recsdk(path, dmp, adam_step=step)
    raise_together(compare_state(scenario, oracle, state_of(dmp)), at)
    iterator = iter(mine(scenario, batches[at:]))
    for step, everyone in enumerate(batches[at:], at):
        loss, expected = pipeline.progress(iterator).item(), oracle.step(everyone, optimizer).item()
        pipeline._thread.settle()
        difference = "" if loss == expected else f"loss {loss!r}, not {expected!r}"
        raise_together(difference or compare_state(scenario, oracle, state_of(dmp)), step)
    return {t.table: (t.rows, t.states, dict(t.unused)) for t in report.tables}


@pytest.mark.parametrize(
    ("world_size", "optimizer", "layout", "saved_ranks", "cache"),
    [
        (1, "adam", "merged", 0, "minimum"),
        (2, "adam", "ranks", 3, "below"),
        (3, "adagrad", "ranks", 2, "minimum"),
        (2, "adagrad", "merged", 0, "minimum"),
        (2, "sgd", "ranks", 1, "minimum"),
    ],
)
def test_training_goes_on_bit_for_bit(
    pools: RankPools, tmp_path: Path, world_size: int, optimizer: str, layout: str, saved_ranks: int, cache: str
) -> None:
    scenario = Scenario(optimizer=optimizer, cache=cache, steps=16, ids_per_table=60)
    found = pools[world_size].run(go_on_with_import, scenario, tmp_path, 8, layout, saved_ranks)
    states = {"adam": ("exp_avg", "exp_avg_sq"), "adagrad": ("sum",), "sgd": ()}[optimizer]
    assert found == [{t.name: (60, states, {}) for t in scenario.tables}] * world_size


@pytest.mark.parametrize(("world_size", "optimizer"), [(2, "adam"), (3, "adagrad")])
def test_tables_and_columns_of_single_ranks(pools: RankPools, tmp_path: Path, world_size: int, optimizer: str) -> None:
    scenario = Scenario(optimizer=optimizer, steps=10, batch_size=5, ids_per_table=40, tables=MIXED)
    pools[world_size].run(go_on_with_import, scenario, tmp_path, 5, "ranks", 4)


ROW_TYPES = (
    Table(name="user", dim=8, features=("user",), row_type="bfloat16"),
    Table(name="item", dim=5, features=("clicked", "bought"), row_type="float16", owners=((3, 0), (2, 1))),
)


def import_rounded(scenario: Scenario, path: Path) -> int:
    dmp, _ = build(scenario)
    checkpoint.import_recsdk(path, dmp)
    contents, num_rows = float_contents(scenario), 0
    for part, records in zip(
        [p for t in scenario.tables for p in parts_of(t, 2) if p.owner in (None, dist.get_rank())],
        state_of(dmp),
        strict=True,
    ):
        columns = slice(part.first, part.first + part.dim)
        for id_, record in records.items():
            weights, total = contents[part.table.name].rows[id_]
            dtype = getattr(torch, part.table.row_type)
            words = torch.from_numpy(record).view(dtype)[: part.dim]
            assert torch.equal(words, torch.from_numpy(weights[columns]).to(dtype))
            assert np.array_equal(record[-part.dim :], total[columns])
            num_rows += 1
    return num_rows


def test_rows_of_16_bits_are_rounded_and_cut_into_columns(pools: RankPools, tmp_path: Path) -> None:
    scenario = Scenario(optimizer="adagrad", steps=1, ids_per_table=30, tables=ROW_TYPES)
    write_merged(tmp_path, float_contents(scenario))
    assert sum(pools[2].run(import_rounded, scenario, tmp_path)) == 30 + 2 * 30


# ---- torch's own optimizers on a plain table -------------------------------------------------------------


def go_on_beside_torch(scenario: Scenario, path: Path) -> float:
    """A plain `nn.EmbeddingBag` trains with torch's optimizer; the largest relative difference at the end."""
    ids = universe(scenario, USER[0])
    place = {id_: i for i, id_ in enumerate(ids)}
    torch.manual_seed(5)
    bag = torch.nn.EmbeddingBag(len(ids), 8, mode="sum", include_last_offset=True, sparse=scenario.optimizer == "adam")
    dense = make_dense(8)
    if scenario.optimizer == "adam":
        rows_optimizer: torch.optim.Optimizer = torch.optim.SparseAdam(bag.parameters(), lr=0.01)
    else:
        rows_optimizer = torch.optim.Adagrad(bag.parameters(), lr=0.05, eps=1e-8)
    dense_optimizer = torch.optim.Adagrad(dense.parameters(), lr=0.1)

    num_steps = 0

    def step(batch: Batch) -> None:
        nonlocal num_steps
        num_steps += 1
        if scenario.optimizer == "adam":  # SparseAdam corrects no bias of what eps is added to; Adam does
            rows_optimizer.param_groups[0]["eps"] = 1e-8 * (1 - 0.999**num_steps) ** 0.5
        bags = [[place[id_] for id_, _ in one] for one in batch.bags["user"]]
        offsets = np.cumsum([0, *map(len, bags)])
        flat = torch.tensor([i for one in bags for i in one], dtype=torch.int64)
        loss = scenario_loss(dense(bag(flat, torch.from_numpy(offsets))), batch.labels)
        for optimizer in (rows_optimizer, dense_optimizer):
            optimizer.zero_grad()
        loss.backward()
        for optimizer in (rows_optimizer, dense_optimizer):
            optimizer.step()

    batches = all_batches(scenario)
    half = len(batches) // 2
    for (batch,) in batches[:half]:
        step(batch)
    state = rows_optimizer.state[bag.weight]
    moments = [state[name] for name in ("sum", "exp_avg", "exp_avg_sq") if name in state]
    arrays = [tensor.detach().numpy().copy() for tensor in (bag.weight, *moments)]
    rows = {id_: [array[i] for array in arrays] for id_, i in place.items()}
    write_ranks(path, {"user": Content(dim=8, rows=rows, num_moments=len(moments))}, 4)
    dmp, pipeline = build(scenario)
    dmp.module.dense.load_state_dict(dense.state_dict())
    (_, wrapped) = pipeline._optimizer.optimizers[1]
    for ours, theirs in zip(wrapped.params.values(), dense.parameters(), strict=True):
        wrapped.state[ours]["sum"].copy_(dense_optimizer.state[theirs]["sum"])
    checkpoint.import_recsdk(path, dmp, adam_step=half if scenario.optimizer == "adam" else None)
    iterator = iter(mine(scenario, batches[half:]))
    for (batch,) in batches[half:]:
        pipeline.progress(iterator)
        step(batch)
    pipeline._thread.settle()
    (records,) = state_of(dmp)
    ours = torch.tensor(np.array([records[id_][:8] for id_ in ids]))
    return float(((ours - bag.weight.detach()).abs() / bag.weight.detach().abs().clamp(min=0.01)).max())


@pytest.mark.parametrize("optimizer", ["adagrad", "adam"])
def test_training_goes_on_as_that_of_torch(pools: RankPools, tmp_path: Path, optimizer: str) -> None:
    scenario = Scenario(optimizer=optimizer, steps=60, ids_per_table=40, tables=USER)
    (difference,) = pools[1].run(go_on_beside_torch, scenario, tmp_path)
    assert difference < 1e-5


# ---- increments, times, what has no place ----------------------------------------------------------------


def import_records(scenario: Scenario, paths: Any, max_rows: int | None, kwargs: dict[str, Any]) -> Any:
    """Records and scores after the import, and after the first batch."""
    dmp, pipeline = build(scenario, 1, max_rows)
    report = checkpoint.import_recsdk(paths, dmp, **kwargs)
    before = records_of(dmp)["user"]
    batches = all_batches(scenario)[:1]
    pipeline.progress(iter(mine(scenario, batches)))
    pipeline._thread.settle()
    ids = {id_ for batch in batches[0] for bag in batch.bags["user"] for id_, _ in bag}
    return report, before, records_of(dmp)["user"], ids


@pytest.mark.parametrize("world_size", [1, 2])
def test_what_was_used_longest_ago_is_evicted_first(pools: RankPools, tmp_path: Path, world_size: int) -> None:
    scenario = Scenario(optimizer="adagrad", steps=1, ids_per_table=300, tables=USER, batch_size=6)
    content = float_contents(scenario)["user"]
    ids = list(content.rows)
    times = dict(zip(ids[:-2], np.random.default_rng(3).permutation(range(2 * len(ids)))[: len(ids) - 2], strict=True))
    times[ids[3]] = times[ids[5]]
    content.times = [(i, int(t)) for i, t in times.items()] + [(ids[0], -5), (77, 3)]  # an older one; no row
    write_merged(tmp_path, {"user": content})
    place = {time: n for n, time in enumerate(sorted({*times.values(), 3}))}
    expected = {i: 1 + place[times[i]] if i in times else 1 + len(place) for i in ids}
    num_evicted = 0
    for rank, (report, before, after, new) in enumerate(
        pools[world_size].run(import_records, scenario, tmp_path, 20, {})
    ):
        assert {i: score for i, (_, score) in before.items()} == {i: expected[i] for i in before}
        mine = [i for i in sorted(before, key=lambda i: (before[i][1], mix64(i)))]
        own_new = [i for i in new if owner(i, world_size) == rank]
        excess = max(0, len(mine) + len(own_new) - -(-20 // world_size))
        assert set(after) == {*mine[excess:], *own_new}
        num_evicted += excess
        (table,) = report.tables
        assert table.times == len(times) + 1 and table.unused == {"times of ids without a row": 1}
    assert num_evicted > 10


def test_rows_without_times_can_be_evicted_at_once(pools: RankPools, tmp_path: Path) -> None:
    scenario = Scenario(optimizer="adagrad", steps=1, ids_per_table=300, tables=USER, batch_size=6)
    content = float_contents(scenario)["user"]
    write_merged(tmp_path, {"user": content})
    ((_, before, after, new),) = pools[1].run(import_records, scenario, tmp_path, 20, {})
    assert {score for _, score in before.values()} == {1}
    assert set(after) == {*sorted(before, key=mix64)[len(before) + len(new) - 20 :], *new}


def test_increments_replace_rows_and_add_some(pools: RankPools, tmp_path: Path) -> None:
    scenario = Scenario(optimizer="adagrad", steps=1, ids_per_table=300, tables=USER)
    full = float_contents(scenario, 20)["user"]
    expected = dict(full.rows)
    write_merged(tmp_path / "full", {"user": full}, incremental=None)
    for n in (1, 2):
        rows = {i: [part + n for part in expected.get(i, next(iter(full.rows.values())))] for i in (1007, 1014, n, -n)}
        expected |= rows
        write_merged(tmp_path / f"{n}", {"user": replace(full, rows=rows)}, incremental=True)
    paths = [tmp_path / "full", tmp_path / "1", tmp_path / "2"]
    records: dict[int, Any] = {}
    for report, before, _, _ in pools[2].run(import_records, scenario, paths, None, {}):
        records |= before
        assert report.tables[0].rows == 28 and not report.tables[0].unused
    assert {i: record for i, (record, _) in records.items()} == {
        i: np.concatenate(row).astype("<f4").tobytes() for i, row in expected.items()
    }


def log_of_import(scenario: Scenario, path: Path, kwargs: dict[str, Any]) -> tuple[Any, list[str]]:
    messages: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("hybridrec").addHandler(handler)
    try:
        dmp, _ = build(scenario)
        report = checkpoint.import_recsdk(path, dmp, **kwargs)
    finally:
        logging.getLogger("hybridrec").removeHandler(handler)
    return report, [m for m in messages if "import_recsdk" in m]


def test_what_has_no_place_is_told(pools: RankPools, tmp_path: Path) -> None:
    scenario = Scenario(optimizer="rowwise_adagrad", steps=1, ids_per_table=300)
    content = float_contents(scenario, 20, num_moments=2)["item"]
    content.counts, content.times = {1007: 3}, [(1000, 5), (1007, 6)]
    write_ranks(tmp_path, {"item": content, "other": content}, 2)
    folder = tmp_path / "item/rank0/evict_timestamp"
    np.array([8, 1], "<i8").tofile(folder / "slice.attribute")
    for name in ("slice_evict_key.data", "slice_evict_ts.data"):
        (folder / name).write_bytes(b"")  # RecSDK's saver does not write a single one
    with open(tmp_path / "item/rank1/key/slice.data", "ab") as file:
        file.write(bytes(16))
    kwargs = {"with_states": False, "tables": ["item"], "cut_tails": True}
    unused = {
        "admission counts": 20,
        "times that RecSDK counted and did not write": 1,
        "moments of rows": 40,
        "bytes of an older save": 16,
    }
    for rank, (report, messages) in enumerate(pools[2].run(log_of_import, scenario, tmp_path, kwargs)):
        (table,) = report.tables
        assert report.not_saved == ("user", "word")
        assert (table.table, table.rows, table.states, table.times, dict(table.unused)) == ("item", 20, (), 2, unused)
        assert messages == [
            f"import_recsdk: table 'item': {what} have no place here and were left out: {n}"
            for what, n in unused.items()
        ] * (rank == 0)


def test_rows_of_torch_rec_v2_come_without_states(pools: RankPools, tmp_path: Path) -> None:
    scenario = Scenario(optimizer="adam", steps=1, ids_per_table=300, tables=USER)
    content = float_contents(scenario, 20, num_moments=2)["user"]
    content.times = [(i, 1000 - i) for i in content.rows]
    write_dynamic(tmp_path, {"user": content}, 3)
    found = pools[2].run(import_records, scenario, tmp_path, None, {"with_states": False, "world_size": 3})
    records = {i: entry for _, before, _, _ in found for i, entry in before.items()}
    for n, id_ in enumerate(sorted(content.rows, reverse=True)):
        expected = np.concatenate([content.rows[id_][0], np.zeros(16, np.float32)]).tobytes()
        assert records[id_] == (expected, 1 + n)
    assert dict(found[0][0].tables[0].unused) == {"optimizer values of rows": 20}
