"""Where TorchRec's planner puts hashed tables, and how large their caches are."""

from __future__ import annotations

import dataclasses

import pytest

from tests.distributed.plan_cases import MIB, ROW_BYTES, Case, run_plan
from tests.ranks import RankPool

HBM_ROWS = 64 * MIB // ROW_BYTES  # rows that one rank's device could hold, if it held nothing else


def table(share_of_hbm: float, world_size: int = 2, **fields: object) -> dict[str, object]:
    """A table whose planned rows take this share of all ranks' device memory."""
    return {"num_embeddings": 10**12, "planned_rows": int(share_of_hbm * HBM_ROWS * world_size), **fields}


@pytest.mark.parametrize("device_type", ["cuda", "cpu"])
def test_half_of_the_device_is_kept_there(pool_1: RankPool, device_type: str) -> None:
    (plan,) = pool_1.run(run_plan, Case(tables={"t": table(0.5)}, device_type=device_type))
    assert plan["kernel"] == {"t": "fused"}


def test_twenty_devices_are_cached_and_fill_one(pool_1: RankPool) -> None:
    (plan,) = pool_1.run(run_plan, Case(tables={"t": table(20)}))
    assert plan["kernel"] == {"t": "fused_uvm_caching"}
    for used, available in plan["hbm"]:
        assert available - ROW_BYTES <= used <= available  # to the last row
    assert 0.03 < plan["factor"]["t"] < 1 / 20


def test_caches_share_in_proportion_to_planned_rows(pool_1: RankPool) -> None:
    (plan,) = pool_1.run(run_plan, Case(tables={"a": table(5), "b": table(15)}))
    assert set(plan["kernel"].values()) == {"fused_uvm_caching"}
    assert plan["factor"]["a"] == pytest.approx(plan["factor"]["b"], rel=1e-3)
    for used, available in plan["hbm"]:
        assert available - 2 * ROW_BYTES <= used <= available


def test_small_tables_stay_on_the_device_beside_a_huge_one(pool_1: RankPool) -> None:
    tables = {"huge": table(20), "small": table(0.1), "tiny": {"num_embeddings": 3}}
    (plan,) = pool_1.run(run_plan, Case(tables=tables))
    assert plan["kernel"] == {"huge": "fused_uvm_caching", "small": "fused", "tiny": "fused"}
    for used, available in plan["hbm"]:
        assert available - ROW_BYTES <= used <= available


def test_many_small_tables_leave_half_to_caches(pool_1: RankPool) -> None:
    tables = {f"t{i}": table(0.08) for i in range(20)}  # 1.6 devices in all
    (plan,) = pool_1.run(run_plan, Case(tables=tables))
    kept = [name for name, kernel in plan["kernel"].items() if kernel == "fused"]
    assert len(kept) == int(0.5 * 0.85 / 0.081)  # half of what is not reserved
    factors = [factor for factor in plan["factor"].values() if factor is not None]
    assert len(factors) == 20 - len(kept)
    assert min(factors) == pytest.approx(max(factors), rel=1e-2)
    assert min(factors) > 0.3


def test_a_cache_of_given_size_keeps_it(pool_1: RankPool) -> None:
    tables = {"rows": table(20, device_rows=1000), "factor": table(20), "rest": table(20)}
    case = Case(
        tables=tables,
        kernels=dict.fromkeys(("rows", "factor"), "fused_uvm_caching"),
        load_factors={"factor": 0.001},
        caps={"hbm_cap": 64 * MIB, "ddr_cap": 8192 * MIB},
    )
    (plan,) = pool_1.run(run_plan, case)
    assert plan["factor"]["rows"] is None
    assert plan["factor"]["factor"] == 0.001
    for used, available in plan["hbm"]:
        assert available - ROW_BYTES <= used <= available  # the third takes the rest


def test_load_factor_without_a_kernel_is_for_the_cache(pool_1: RankPool) -> None:
    (plan,) = pool_1.run(run_plan, Case(tables={"t": table(20)}, load_factors={"t": 0.01}))
    assert (plan["kernel"]["t"], plan["factor"]["t"]) == ("fused_uvm_caching", 0.01)


def test_host_alone(pool_1: RankPool) -> None:
    (plan,) = pool_1.run(run_plan, Case(tables={"t": table(20)}, kernels={"t": "fused_uvm"}))
    assert plan["kernel"] == {"t": "fused_uvm"}
    for used, _ in plan["hbm"]:
        assert used < 100_000
    for used, _ in plan["ddr"]:
        assert used > 20 * HBM_ROWS * ROW_BYTES


def test_host_memory_bounds_the_cache(pool_1: RankPool) -> None:
    """40 bytes of host memory for a slot: a host that is nearly full leaves the device emptier."""
    (roomy,) = pool_1.run(run_plan, Case(tables={"t": table(20)}))
    used = max(used for used, _ in roomy["ddr"])
    slots = min(used for used, _ in roomy["hbm"]) // ROW_BYTES
    caps = {"hbm_cap": 64 * MIB, "ddr_cap": used - 20 * slots}
    (tight,) = pool_1.run(run_plan, Case(tables={"t": table(20)}, caps=caps))
    assert 0.45 * roomy["factor"]["t"] < tight["factor"]["t"] < 0.55 * roomy["factor"]["t"]
    assert all(used <= available for used, available in tight["ddr"])


def test_plain_tables_go_first(pool_1: RankPool) -> None:
    """One of a whole device is spread over both; a hashed one of half a device would fit without it."""
    case = Case(tables={"t": table(0.5)}, plain={"p": HBM_ROWS}, kernels={"p": "fused"})
    (plan,) = pool_1.run(run_plan, case)
    assert plan["kernel"] == {"t": "fused_uvm_caching", "p": "fused"}
    fullest, available = max(plan["hbm"])
    assert available - ROW_BYTES <= fullest <= available
    (smaller,) = pool_1.run(run_plan, Case(tables={"t": table(0.2)}, plain={"p": HBM_ROWS}, kernels={"p": "fused"}))
    assert smaller["kernel"] == {"t": "fused", "p": "fused"}


def test_the_fullest_rank_bounds_caches(pool_1: RankPool) -> None:
    """A hashed table is on both ranks alike; a plain one on one of them leaves the other half empty."""
    case = Case(tables={"t": table(20)}, plain={"p": HBM_ROWS // 2}, sharding_types={"p": "table_wise"})
    case = dataclasses.replace(case, kernels={"p": "fused"})
    (plan,) = pool_1.run(run_plan, case)
    (emptier, available), (fullest, _) = sorted(plan["hbm"])
    assert available - ROW_BYTES <= fullest <= available
    assert fullest - emptier > 30 * MIB


def test_on_the_host_a_cache_has_the_default_size(pool_1: RankPool) -> None:
    case = Case(tables={"t": table(0.5)}, kernels={"t": "fused_uvm_caching"}, device_type="cpu")
    (plan,) = pool_1.run(run_plan, case)
    assert plan["factor"]["t"] is None
    (given,) = pool_1.run(run_plan, dataclasses.replace(case, load_factors={"t": 0.2}))
    assert plan["ddr"] == given["ddr"]
    assert plan["hbm"] == [(0, 0)] * 2


def run_twice(case: Case) -> list[str]:
    return [str(run_plan(case)) for _ in range(2)]


def test_every_host_makes_the_same_plan(pool_2: RankPool) -> None:
    tables = {f"t{i}": table(0.01 * 3**i) for i in range(6)}
    plans = pool_2.run(run_twice, Case(tables=tables, plain={"p": 5000, "q": 100}))
    assert len({text for both in plans for text in both}) == 1
