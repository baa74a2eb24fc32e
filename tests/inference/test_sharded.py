"""Freezing a sharded collection: rank 0 gets the rows of all ranks, and all ranks the same refusals."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from hybridrec import ConfigError
from hybridrec.inference import freeze, load
from tests.distributed.oracle import Table, initial_row
from tests.distributed.pipelines import all_batches, build_pipelined, mine
from tests.distributed.scenario import TABLES, Scenario, build, device_rows, make_batch, state_of, to_kjt, universe
from tests.distributed.test_sequences import KEYS, make, rows_of, shard
from tests.ranks import RankPool
from tests.unit.modules.batches import random_batch

UNSEEN = 987654321
TABLE_WISE = (TABLES[0], dataclasses.replace(TABLES[1], owners=((4, 1),)), TABLES[2])
COLUMN_WISE = (dataclasses.replace(TABLES[0], owners=((4, 0), (4, 1))), *TABLES[1:])


def trained(scenario: Scenario):
    """A model that was trained by the plain loop."""
    world_size = dist.get_world_size()
    batches = [[make_batch(scenario, s, r, world_size) for r in range(world_size)] for s in range(scenario.steps)]
    dmp, optimizer = build(scenario, {t.name: device_rows(scenario, t, batches, world_size) for t in scenario.tables})
    for everyone in batches:
        batch = everyone[dist.get_rank()]
        optimizer.zero_grad()
        dmp(to_kjt(scenario, batch), batch.labels).backward()
        optimizer.step()
    return dmp


def all_rows(dmp) -> list[dict[int, torch.Tensor]]:
    """For each table id -> weights, of all ranks."""
    ebc = dmp.module.ebc
    names = [config.name for config in ebc.embedding_bag_configs()]
    here = dict(zip(sorted((part.table.name for part in ebc.parts), key=names.index), state_of(dmp), strict=True))
    everyone = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, here)
    return [
        {
            id_: torch.from_numpy(record[: config.embedding_dim].copy())
            for rank in everyone
            for id_, record in rank.get(config.name, {}).items()
        }
        for config in ebc.embedding_bag_configs()
    ]


def check_frozen_rows(scenario: Scenario, frozen, rows: list[dict[int, torch.Tensor]]) -> None:
    """Every id of the universe, known or not, reads the right row, bit for bit."""
    for t, table in enumerate(scenario.tables):
        ids = [*universe(scenario, table), UNSEEN]
        want = torch.stack([rows[t].get(i, torch.from_numpy(initial_row(table, i))) for i in ids])
        assert 0 < len(rows[t]) < len(ids)
        assert frozen.report.tables[t].rows == len(rows[t])
        assert torch.equal(frozen.tables.tables[t].table(torch.tensor(ids)), want), table.name


def freeze_and_compare(scenario: Scenario, path: str | None) -> list[str]:
    dmp = trained(scenario)
    ebc = dmp.module.ebc
    rows = all_rows(dmp)
    before = [(s.accesses, s.inserted, s.rows, s.resident, s.pins) for s in ebc.stats()]
    frozen = freeze(ebc, path, dtype="fp32", chunk_rows=37)
    assert [(s.accesses, s.inserted, s.rows, s.resident, s.pins) for s in ebc.stats()] == before
    assert (frozen is not None) == (dist.get_rank() == 0)
    if frozen is None:
        return []
    check_frozen_rows(scenario, frozen, rows)
    if path is not None:
        check_frozen_rows(scenario, load(path), rows)
    return [type(frozen).__name__, str(frozen.report)]


@pytest.mark.parametrize(
    ("world_size", "optimizer", "cache", "kernel", "on_disk", "tables"),
    [
        (1, "adam", "minimum", "fused_uvm_caching", True, TABLES),
        (2, "rowwise_adagrad", "tenth", "fused_uvm_caching", False, TABLE_WISE),
        (3, "sgd", "all", "fused", True, TABLES),
    ],
    ids=["1", "2, table-wise", "3"],
)
def test_rank_0_gets_the_rows_of_all_ranks(
    pools: dict[int, RankPool],
    tmp_path: Path,
    world_size: int,
    optimizer: str,
    cache: str,
    kernel: str,
    on_disk: bool,
    tables: tuple[Table, ...],
) -> None:
    scenario = Scenario(optimizer=optimizer, cache=cache, kernel=kernel, steps=12, ids_per_table=300, tables=tables)
    path = tmp_path / "frozen" if on_disk else None
    results = pools[world_size].run(freeze_and_compare, scenario, None if path is None else str(path))
    assert results[0][0] == "QuantHashEmbeddingBagCollection" and results[1:] == [[]] * (world_size - 1)
    if path is not None:
        manifest = json.loads((path / "frozen.json").read_text())
        assert [entry["name"] for entry in manifest["tables"]] == [table.name for table in scenario.tables]


def serve_as_evaluated(world_size: int) -> bool:
    """Bags of one id, so that no sum depends on how many ranks there are."""
    scenario = Scenario(optimizer="adagrad", steps=10, ids_per_table=200)
    dmp = trained(scenario).eval()
    everyone = [make_batch(scenario, 99, r, world_size) for r in range(world_size)]
    mine = everyone[dist.get_rank()]
    for bags in mine.bags.values():
        bags[:] = [bag[:1] for bag in bags]
    features = to_kjt(scenario, mine)
    want = dmp.module.ebc(features)
    want = want.wait() if hasattr(want, "wait") else want
    frozen = freeze(dmp.module.ebc, dtype="fp32")
    if frozen is None:
        return True
    got = frozen(features)
    return got.keys() == want.keys() and torch.equal(got.values(), want.values())


@pytest.mark.parametrize("world_size", [1, 2])
def test_frozen_pools_are_those_of_evaluation(pools: dict[int, RankPool], world_size: int) -> None:
    assert pools[world_size].run(serve_as_evaluated, world_size) == [True] * world_size


def refusals(path: str) -> list[str]:
    """What is raised, on this rank, by calls that one rank alone has a reason to refuse."""
    scenario = Scenario(optimizer="sgd", steps=4, ids_per_table=200)
    dmp = trained(scenario)
    ebc, rank = dmp.module.ebc, dist.get_rank()
    messages = []
    if rank == 0:
        Path(path, "taken").mkdir()
    with pytest.raises(ConfigError, match="exists") as e:
        freeze(ebc, Path(path, "taken"))
    messages.append(str(e.value))
    lookup = ebc.lookup
    t = lookup.table_names.index("item")
    keys, _, _, slots, _ = lookup.log.group.entries(t)
    if rank == 1:
        lookup.table_kernels.slot_arrays(t).weights[int(slots[slots >= 0][0])] = float("nan")
    with pytest.raises(ConfigError, match="table 'item': the row of id .* cannot be stored as int8") as e:
        freeze(ebc, Path(path, "nan"), dtype="int8")
    messages.append(str(e.value))
    with pytest.raises(ConfigError, match="do not agree on dtype") as e:
        freeze(ebc, dtype="int8" if rank else "int4")
    messages.append(str(e.value))
    frozen = freeze(ebc, dtype="fp16")  # NaN is a float16
    assert (frozen is not None) == (rank == 0)
    return messages


def test_all_ranks_raise_what_one_refuses(pool_2: RankPool, tmp_path: Path) -> None:
    first, second = pool_2.run(refusals, str(tmp_path))
    assert first == second and all("nothing was frozen on all 2 ranks" in m for m in first[:2])
    assert [p.name for p in tmp_path.iterdir()] == ["taken"]


def freeze_inside_a_pipeline() -> list[list[int]]:
    """What a pipeline prepared does not count, nor does a forward without a backward; training goes on."""
    scenario = Scenario(optimizer="adam", steps=9, ids_per_table=300)
    batches = all_batches(scenario)
    dmp, pipeline = build_pipelined(scenario, batches, 3)
    iterator = iter(mine(scenario, batches))
    for _ in range(4):
        pipeline.progress(iterator)
    counts = []
    for _ in range(2):
        frozen = freeze(dmp.module.ebc, dtype="fp32", chunk_rows=64)
        rows = all_rows(dmp)
        if frozen is not None:
            check_frozen_rows(scenario, frozen, rows)
        counts.append([len(table) for table in rows])
        pipeline.progress(iterator)
    return counts


def test_a_pipeline_goes_on_afterwards(pool_2: RankPool) -> None:
    first, second = pool_2.run(freeze_inside_a_pipeline)
    assert first == second and all(a < b for a, b in zip(*first, strict=True))


def freeze_with_an_open_forward() -> bool:
    scenario = Scenario(optimizer="sgd", steps=4, ids_per_table=200)
    dmp = trained(scenario)
    rows = all_rows(dmp)
    batch = make_batch(scenario, 50, dist.get_rank(), dist.get_world_size())
    loss = dmp(to_kjt(scenario, batch), batch.labels)
    frozen = freeze(dmp.module.ebc, dtype="fp32")
    loss.backward()
    if frozen is None:
        return True
    check_frozen_rows(scenario, frozen, rows)
    return True


def test_a_forward_without_its_backward_does_not_count(pool_2: RankPool) -> None:
    assert pool_2.run(freeze_with_an_open_forward) == [True, True]


def freeze_columns() -> str:
    dmp = trained(Scenario(optimizer="sgd", steps=1, ids_per_table=200, tables=COLUMN_WISE))
    with pytest.raises(ConfigError, match="table 'user' is sharded 'column_wise'") as e:
        freeze(dmp.module.ebc)
    return str(e.value)


def test_tables_cut_into_columns_are_refused_by_name(pool_2: RankPool) -> None:
    first, second = pool_2.run(freeze_columns)
    assert first == second


def serve_sequences() -> int:
    """Rows are not added, so that they are those of evaluation at any number of ranks. How many rows there are."""
    dmp, rank = shard(make()), dist.get_rank()
    for step in range(4):
        rows_of(dmp(random_batch(KEYS, 4, 10 * step + rank))).square().sum().backward()
    features = random_batch(KEYS, 5, 99 + rank)
    want = rows_of(dmp.eval()(features))
    frozen = freeze(dmp.module, dtype="fp32", chunk_rows=7)
    if frozen is None:
        return 0
    assert type(frozen).__name__ == "QuantHashEmbeddingCollection" and frozen.need_indices()
    assert torch.equal(rows_of(frozen(features)), want)
    return min(table.rows for table in frozen.report.tables)


@pytest.mark.parametrize("world_size", [1, 2])
def test_frozen_sequences_are_those_of_evaluation(pools: dict[int, RankPool], world_size: int) -> None:
    assert pools[world_size].run(serve_sequences)[0] > 5
