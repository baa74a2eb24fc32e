"""How long a plan of many tables takes."""

from __future__ import annotations

import time

import pytest

from tests.distributed.plan_cases import MIB, Case, run_plan
from tests.ranks import RankPool


def seconds_to_plan(case: Case) -> tuple[float, set[str]]:
    """CPU seconds of this process, which plans alone, and the kernels that were chosen."""
    before = time.process_time()
    plan = run_plan(case)
    return time.process_time() - before, set(plan["kernel"].values())


@pytest.mark.slow
@pytest.mark.parametrize("rows", [1000, 100_000])
def test_a_thousand_tables_on_eight_ranks(pool_1: RankPool, rows: int) -> None:
    """TorchRec alone, with our three kernels to combine, would try thousands of proposals of a second each."""
    caps = {"hbm_cap": 512 * MIB, "ddr_cap": 1 << 40}
    tables = {f"t{i}": {"num_embeddings": rows * (1 + i % 7)} for i in range(1000)}
    ((seconds, kernels),) = pool_1.run(seconds_to_plan, Case(tables=tables, world_size=8, caps=caps))
    assert kernels == ({"fused"} if rows == 1000 else {"fused", "fused_uvm_caching"})
    assert seconds < 10
