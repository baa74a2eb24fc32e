"""What does not fit is refused on all ranks, with a table of needs whose advice leads to a plan."""

from __future__ import annotations

import dataclasses
import logging
import re
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist
from torchrec.distributed.planner.types import PlannerError

from hybridrec import CapacityError, describe_plan
from hybridrec.distributed import host_memory
from hybridrec.errors import HybridRecError
from tests.distributed.plan_cases import MIB, ROW_BYTES, Case, Model, planner_of, run_plan, sharders_of
from tests.ranks import RankPool

HBM_ROWS = 64 * MIB // ROW_BYTES


def table(share_of_hbm: float, **fields: object) -> dict[str, object]:
    """A table whose planned rows take this share of the device memory of two ranks."""
    return {"num_embeddings": 10**12, "planned_rows": int(share_of_hbm * HBM_ROWS * 2), **fields}


def refusal(case: Case) -> str:
    """The message of a planning run that must fail, by the class that both libraries' users catch."""
    try:
        run_plan(case)
    except CapacityError as e:
        if not isinstance(e, PlannerError) or e.error_type.value != "insufficient_storage":
            raise AssertionError(f"{type(e)} is no PlannerError of TorchRec") from e
        return str(e)
    raise AssertionError("there is a plan")


def row_of(message: str, name: str) -> list[str]:
    """Cells of one table's line."""
    (line,) = [line for line in message.splitlines() if line.startswith(repr(name))]
    return re.split(r"  +", line)


def test_fused_that_does_not_fit(pool_1: RankPool) -> None:
    """The advice is the largest cache that fits: a thousandth more does not."""
    case = Case(tables={"big": table(3), "fits": table(0.1)}, kernels={"big": "fused", "fits": "fused"})
    (message,) = pool_1.run(refusal, case)
    assert message.startswith("the hashed tables do not fit 2 ranks of a 'cuda' topology. Of one rank:")
    name, kernel, tier, needed, available, advice = row_of(message, "big")
    assert (name, kernel, tier) == ("'big'", "fused", "device")
    assert needed == "192.62 MiB"  # 3 x 64 MiB, what hashing adds to a rank's share, and staging
    assert available == "47.88 MiB"  # 64 MiB less 15 %, less a tenth for the other table
    assert "'fits'" not in message
    factor = float(re.fullmatch(r"'fused_uvm_caching' with load_factor <= (\S+)", advice)[1])
    followed = dataclasses.replace(case, kernels={"big": "fused_uvm_caching", "fits": "fused"})
    (plan,) = pool_1.run(run_plan, dataclasses.replace(followed, load_factors={"big": factor}))
    assert plan["factor"]["big"] == factor
    pool_1.run(refusal, dataclasses.replace(followed, load_factors={"big": factor * 1.001}))


@pytest.mark.parametrize(
    ("field", "pattern"), [("device_rows", r"device_rows <= ([\d,]+)"), ("load_factor", r"load_factor <= (\S+)")]
)
def test_cache_that_does_not_fit(pool_1: RankPool, field: str, pattern: str) -> None:
    case = Case(tables={"t": table(20)}, kernels={"t": "fused_uvm_caching"}, load_factors={"t": 0.5})
    if field == "device_rows":
        case = dataclasses.replace(case, tables={"t": table(20, device_rows=10**7)}, load_factors={})
    (message,) = pool_1.run(refusal, case)
    cells = row_of(message, "t")
    assert cells[1:3] == ["fused_uvm_caching", "device"]
    value = float(re.fullmatch(pattern, cells[5])[1].replace(",", ""))

    def with_value(value: float) -> Case:
        if field == "device_rows":
            return dataclasses.replace(case, tables={"t": table(20, device_rows=int(value))})
        return dataclasses.replace(case, load_factors={"t": value})

    pool_1.run(run_plan, with_value(value))
    pool_1.run(refusal, with_value(value * 1.001))


def test_host_that_is_too_small(pool_1: RankPool) -> None:
    """Fewer planned rows, or more ranks: either is enough, and one rank fewer is not."""
    case = Case(tables={"t": table(100), "small": table(0.1)})
    (message,) = pool_1.run(refusal, case)
    cells = row_of(message, "t")
    assert cells[1:3] == ["fused_uvm_caching", "host"]
    assert cells[4].endswith("GiB")
    rows = int(re.fullmatch(r"planned_rows <= ([\d,]+)", cells[5])[1].replace(",", ""))
    ranks = int(re.search(r"Or use W >= (\d+) ranks", message)[1])
    fewer = {"t": {**case.tables["t"], "planned_rows": rows}, "small": case.tables["small"]}
    pool_1.run(run_plan, dataclasses.replace(case, tables=fewer))
    pool_1.run(run_plan, dataclasses.replace(case, world_size=ranks))
    pool_1.run(refusal, dataclasses.replace(case, world_size=ranks - 1))


def test_on_the_host_there_is_one_tier(pool_1: RankPool) -> None:
    case = Case(tables={"t": table(100)}, device_type="cpu")
    (message,) = pool_1.run(refusal, case)
    assert "'cpu' topology" in message
    cells = row_of(message, "t")
    assert cells[1:3] == ["fused", "host"]
    rows = int(re.fullmatch(r"planned_rows <= ([\d,]+)", cells[5])[1].replace(",", ""))
    pool_1.run(run_plan, dataclasses.replace(case, tables={"t": {**case.tables["t"], "planned_rows": rows}}))


def test_fewest_tables_are_named(pool_1: RankPool) -> None:
    tables = {f"t{i}": table(0.06 + i / 1000) for i in range(30)}  # twice a device
    (message,) = pool_1.run(refusal, Case(tables=tables, kernels=dict.fromkeys(tables, "fused")))
    assert row_of(message, "t29")[5].startswith("'fused_uvm_caching' with load_factor <= ")
    assert "'t0'" not in message
    assert re.search(r"^and \d+ more", message, re.MULTILINE)
    assert re.search(r"^all 30 hashed tables +device +14\d\.\d\d MiB +54\.\d\d MiB", message, re.MULTILINE)


def plain_refusal(case: Case) -> tuple[str, bool]:
    try:
        run_plan(case)
    except PlannerError as e:
        return str(e), isinstance(e, HybridRecError)
    raise AssertionError("there is a plan")


def test_what_is_not_ours_is_not_renamed(pool_1: RankPool) -> None:
    case = Case(tables={"t": {"num_embeddings": 10}}, plain={"p": 100 * HBM_ROWS}, kernels={"p": "fused"})
    ((message, is_ours),) = pool_1.run(plain_refusal, case)
    assert not is_ours
    assert message.startswith("Unable to find a plan for this model because of insufficient storage.")


def collective_refusal(case: Case, breaks: bool = False) -> tuple[str, str]:
    """On every rank; rank 0 alone plans."""
    planner = planner_of(case)
    if breaks:
        planner._perf_model = None  # an error that is nobody's refusal
    try:
        planner.collective_plan(Model(case), sharders_of(case), dist.GroupMember.WORLD)
    except Exception as e:
        return type(e).__name__, str(e)
    raise AssertionError("there is a plan")


def test_refusal_is_collective(pool_3: RankPool) -> None:
    case = Case(tables={"big": table(3)}, kernels={"big": "fused"}, world_size=3)
    results = pool_3.run(collective_refusal, case)
    assert len(set(results)) == 1
    assert results[0][0] == "PlanCapacityError"
    assert "'fused_uvm_caching' with load_factor <= " in results[0][1]


def test_any_error_of_the_planning_rank_reaches_the_others(pool_2: RankPool) -> None:
    first, second = pool_2.run(collective_refusal, Case(tables={"t": table(0.1)}), breaks=True)
    assert first == ("AttributeError", "'NoneType' object has no attribute 'rate'")
    assert second == ("HybridRecError", "AttributeError: 'NoneType' object has no attribute 'rate'")


# ---- the machine -----------------------------------------------------------------------------------------------------


def plan_on_machine(case: Case, available: int) -> tuple[list[str], list[str]]:
    """Collective plan where rank 1 has so much host memory: (error, warnings)."""
    machine = mock.Mock(is_host_memory=True)
    machine.memory_bytes.return_value = (available if dist.get_rank() == 1 else 1 << 50, 1 << 50)
    warnings: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: warnings.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("hybridrec").addHandler(handler)
    try:
        with mock.patch.object(host_memory, "resolve_backend", lambda device_type: machine):
            sharders = sharders_of(case)
        planner_of(case).collective_plan(Model(case), sharders, dist.GroupMember.WORLD)
        return [], warnings
    except CapacityError as e:
        return [str(e)], warnings
    finally:
        logging.getLogger("hybridrec").removeHandler(handler)


def test_default_topology_is_checked_against_the_machine(pool_2: RankPool) -> None:
    case = Case(tables={"t": {"num_embeddings": 10**6}}, device_type="cpu", caps={})
    results = pool_2.run(plan_on_machine, case, 50 * MIB)
    assert results[0] == results[1]  # though rank 0 has enough
    ((message,), _) = results[0]
    assert message.startswith("rank 1: 1 hashed tables take 103.43 MiB of host memory")
    assert "a rank's budget is 40.00 MiB (1 ranks on this machine); the topology's 128.00 GiB are TorchRec's" in message
    assert "Topology(ddr_cap=...) or host_memory_bytes" in message
    assert pool_2.run(plan_on_machine, case, 500 * MIB) == [([], [])] * 2


@pytest.mark.parametrize("given", ["ddr_cap", "host_memory_bytes"])
def test_what_was_given_is_warned_of(pool_2: RankPool, given: str) -> None:
    """Memory is taken as rows come: who says what a rank may take may plan beyond what this machine has."""
    case = Case(tables={"t": {"num_embeddings": 10**6}}, device_type="cpu", caps={})
    if given == "ddr_cap":
        case = dataclasses.replace(case, caps={"ddr_cap": 1 << 40})
    else:
        case = dataclasses.replace(case, host_memory_bytes=40 * MIB)
    results: list[Any] = pool_2.run(plan_on_machine, case, 50 * MIB)
    assert [errors for errors, _ in results] == [[], []]
    (warning,) = results[1][1]
    assert warning.startswith("rank 1: 1 hashed tables take 103.43 MiB of host memory")
    assert warning.endswith(
        "a rank's budget is 40.00 MiB (1 ranks on this machine): batches that need more will be refused."
    )


# ---- the printed plan ------------------------------------------------------------------------------------------------


def described(case: Case) -> tuple[str, list[str]]:
    """`describe_plan`, and what is logged when the plan is made."""
    logged: list[str] = []
    handler = logging.Handler(logging.INFO)
    handler.emit = lambda record: logged.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("hybridrec")
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        planner, model, sharders = planner_of(case), Model(case), sharders_of(case)
        plan = planner.collective_plan(model, sharders, dist.GroupMember.WORLD)
        return describe_plan(plan, model, sharders, planner._topology), logged
    finally:
        logger.setLevel(level)
        logger.removeHandler(handler)


def test_printed_plan_says_which_slots_grow(pool_1: RankPool) -> None:
    case = Case(tables={"tag": {"num_embeddings": 10_000}}, kernels={"tag": "fused_uvm"})
    ((text, _),) = pool_1.run(described, case)
    assert re.search(r"'tag' +fused_uvm +256\+ ", text)
    assert text.splitlines()[-1].startswith("+ at the start; grows")


def test_printed_plan_has_both_tiers(pool_2: RankPool) -> None:
    tables = {
        "user": {"num_embeddings": 100_000},
        "item": table(20),
        "tag": {"num_embeddings": 1000, "max_rows": 500, "full_policy": "evict"},
    }
    case = Case(tables=tables, kernels={"tag": "fused_uvm"}, plain={"p": 10})
    (text, logged), (_, silent) = pool_2.run(described, case)
    assert text in logged
    assert silent == []
    lines = [re.split(r"  +", line) for line in text.splitlines()]
    assert lines[0] == ["hashed tables, of one rank:"]
    assert lines[1] == ["table", "kernel", "device rows", "device", "host rows", "host"]
    assert [line[:2] for line in lines[2:5]] == [
        ["'item'", "fused_uvm_caching"],  # the largest first
        ["'user'", "fused"],
        ["'tag'", "fused_uvm"],
    ]
    item, user, tag, total, capacity = lines[2:]
    assert item[4] == "10,498,713"  # planned rows: half of them, and what hashing adds to a rank's share
    assert user[2:5] == ["50,895", "6.21 MiB", "0"]
    assert tag[2:5] == ["250", "31.25 KiB", "0"]  # the quota of a rank, all in slots
    assert total[0] == "all 3 hashed tables"
    assert capacity == ["capacity by topology", "64.00 MiB", "4.00 GiB"]
