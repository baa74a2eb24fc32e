"""Models of very many small tables: what they take in memory, and that all of them come back."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from hybridrec import checkpoint
from hybridrec.native import ShardGroup, mix64
from hybridrec.native.protocol import ShardSpec
from tests.cases.checkpoints import peak_growth
from tests.cases.small import kjt, sharded, table
from tests.checkpoint.runs import records_of
from tests.property.driver import Slots
from tests.ranks import RankPool, RankPools

NUM_TABLES = 300
HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")


@pytest.mark.skipif(
    HUGE_PAGES.is_file() and "[always]" in HUGE_PAGES.read_text(), reason="here all memory is in huge pages"
)
def test_a_table_of_few_rows_takes_what_these_take() -> None:
    specs = [
        ShardSpec(
            name=f"t{t}",
            dim=8,
            num_row_states=0,
            num_row_wise_states=0,
            state_initial_values=(),
            num_slots=4,
            planned_rows=4,
        )
        for t in range(NUM_TABLES)
    ]
    group, slots = ShardGroup(specs), [Slots(spec, 4) for spec in specs]
    for t, memory in enumerate(slots):
        group.bind_slots(t, *memory.bind())
    out = torch.empty(NUM_TABLES, dtype=torch.int64)
    plan = group.plan(mix64(torch.arange(NUM_TABLES)), torch.arange(NUM_TABLES + 1), torch.arange(NUM_TABLES), out)
    group.swap(plan.ordinal)
    group.commit(plan.ordinal)
    assert peak_growth(group.flush) < NUM_TABLES * 64 * 2**10
    assert sum(group.counters(t).host_bytes for t in range(NUM_TABLES)) > NUM_TABLES * 2**20  # as accounted: at most


def save_and_load_many(path: Path, num_tables: int) -> bool:
    """Whether all is as it was."""
    models = [
        sharded([table(f"t{i}", 4, [f"f{i}"]) for i in range(num_tables)], optimizer=torch.optim.Adagrad, lr=0.1)
        for _ in range(2)
    ]
    generator = torch.Generator().manual_seed(dist.get_rank())
    bags = {f"f{i}": [torch.randint(0, 100, (20,), generator=generator).tolist()] for i in range(num_tables)}
    models[0](kjt(bags)).sum().backward()
    checkpoint.save(path, models[0])
    checkpoint.load(path, models[1])
    return records_of(models[0]) == records_of(models[1])


def calls_of_load(path: Path, num_tables: int) -> int:
    """Calls of functions, and steps of generators, in a load on this thread."""
    tables = [table(f"t{i}", 4, [f"f{i}"]) for i in range(num_tables)]
    model = sharded(tables, optimizer=torch.optim.Adagrad, lr=0.1)
    model(kjt({f"f{i}": [[1, 2]] for i in range(num_tables)})).sum().backward()
    folder, calls = checkpoint.save(path / str(num_tables), model), 0

    def count(frame: object, event: str, argument: object) -> None:
        nonlocal calls
        calls += event == "call"

    sys.setprofile(count)
    try:
        checkpoint.load(folder, model)
    finally:
        sys.setprofile(None)
    return calls


def test_the_work_of_a_load_grows_as_the_number_of_tables(pool_1: RankPool, tmp_path: Path) -> None:
    few, some, many = (pool_1.run(calls_of_load, tmp_path, n)[0] for n in (10, 60, 110))
    assert many - some < 1.1 * (some - few)


@pytest.mark.slow
def test_a_thousand_tables_are_saved_and_loaded(pools: RankPools, tmp_path: Path) -> None:
    """About 3 s each on a quiet machine of two cores; two files a table, each forced to disk."""
    assert pools[2].run(save_and_load_many, tmp_path, 1000, watchdog=500) == [True, True]
