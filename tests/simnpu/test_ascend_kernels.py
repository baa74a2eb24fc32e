"""FBGEMM's tables on the simulated NPU, through operators that a library registers for it: tried, then trusted."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from device_backends import fbgemm_owner, npu
from hybridrec.backend import HOST
from hybridrec.errors import ConfigError
from hybridrec.kernels import factory, probe
from hybridrec.kernels.base import KernelSpec, KernelTable
from hybridrec.kernels.factory import KernelChoice, kernel_choice
from hybridrec.kernels.optimizer import OptimizerKind, OptimizerSpec
from hybridrec.kernels.tbe_kernel import TbeKernel
from tests.distributed.oracle import Table
from tests.distributed.pipelines import run_pipeline_against_oracle
from tests.distributed.scenario import Scenario, build, run_against_oracle
from tests.ranks import RankFailure, RankKind, RankPools
from tests.simnpu import ascend_operators

TABLES = (
    Table(name="user", dim=8, features=("user",)),
    Table(name="item", dim=16, features=("clicked", "bought"), is_mean=True, seed=3),
    Table(name="word", dim=5, features=("word",)),  # no multiple of 8: plain operators
)


@pytest.fixture(scope="module")
def ascend_pools() -> Iterator[RankPools]:
    """Ranks with the simulated NPU, in which fbgemm_ascend can be imported."""
    kind = RankKind(
        backend="cpu:gloo,npu:hccl",
        prepare="tests.simnpu.ascend_operators:install",
        check="tests.simnpu.memory:check_no_hazards",
    )
    pools = RankPools(2, kind)
    yield pools
    pools.close()


def choice(kind: OptimizerKind = "adagrad", dim: int = 8, *, is_weighted: bool = False) -> KernelChoice:
    device = torch.device("npu")
    return kernel_choice(OptimizerSpec(kind=kind), dim=dim, is_weighted=is_weighted, device=device)


# ---- the operators are there -----------------------------------------------------------------------------------------


def train_plain(scenario: Scenario) -> tuple[list[str], int]:
    before = ascend_operators.calls
    result = run_against_oracle(scenario)
    return [s.kernel for s in result["stats"]], ascend_operators.calls - before  # type: ignore[attr-defined]


@pytest.mark.parametrize(("world_size", "optimizer"), [(1, "sgd"), (1, "rowwise_adagrad"), (2, "adagrad")])
def test_plain_loop_equals_the_oracle(ascend_pools: RankPools, world_size: int, optimizer: str) -> None:
    scenario = Scenario(cache="minimum", optimizer=optimizer, steps=12, device="npu", tables=TABLES)
    for kernels, calls in ascend_pools[world_size].run(train_plain, scenario):
        assert kernels == ["tbe", "tbe", "torch"]
        assert calls >= scenario.steps - 3


def test_pipeline_and_oversized_batches_equal_the_oracle(ascend_pools: RankPools) -> None:
    for cache in ("tenth", "below"):
        scenario = Scenario(cache=cache, optimizer="rowwise_adagrad", steps=12, device="npu", tables=TABLES)
        for result in ascend_pools[1].run(run_pipeline_against_oracle, scenario, 3, delay_seed=3):
            assert [s.kernel for s in result["stats"]] == ["tbe", "tbe", "torch"]
            assert any(s.oversized for s in result["stats"]) == (cache == "below")


def test_slots_that_grow_keep_their_rows(ascend_pools: RankPools) -> None:
    scenario = Scenario(
        kernel="fused_uvm", cache="default", optimizer="adagrad", steps=6, batch_size=200, device="npu", tables=TABLES
    )
    ascend_pools[1].run(run_against_oracle, scenario)


def limits() -> list[str]:
    return [choice(*case).reason for case in (("sgd", 8), ("sgd", 12), ("adam", 8))] + [choice(is_weighted=True).reason]


def test_what_the_library_lacks_is_left_to_plain_operators(ascend_pools: RankPools) -> None:
    (reasons,) = ascend_pools[1].run(limits)
    assert reasons == [
        "",
        "dim=12 is no multiple of 8, which FBGEMM needs on NPUs",
        "FBGEMM's 'adam' counts forwards, not trained batches",
        "FBGEMM takes no weights on NPUs",
    ]


# ---- the operators are wrong -----------------------------------------------------------------------------------------


def with_fault(fault: str, kind: OptimizerKind) -> tuple[str, str, list[str]]:
    """(kernel, reason, log lines) while a fault is planted."""
    choice()  # imports the library
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("hybridrec")
    probe.why_tbe_fails.cache_clear()
    factory._log_once.cache_clear()
    logger.addHandler(handler)
    try:
        with mock.patch.object(ascend_operators, "fault", fault):
            found = [choice(kind) for _ in range(3)]
    finally:
        logger.removeHandler(handler)
        probe.why_tbe_fails.cache_clear()
        torch.npu.synchronize()
    assert found[0] == found[1] == found[2]
    return found[0].name, found[0].reason, lines


@pytest.mark.parametrize(
    ("fault", "kind", "reason"),
    [
        ("raises", "sgd", "RuntimeError: aclnnSplitEmbedding: EZ1009"),
        ("wrong", "sgd", "a row of table 0 is off by"),
        ("no_state", "adagrad", "a state of table 0 is off by"),
        ("unrepeatable", "rowwise_adagrad", "has other bits the second time"),
        ("slot_dependent", "sgd", "has other bits when its rows are in other slots"),
        ("no_mixed_dims", "adagrad", "tables of different dims"),
    ],
)
def test_a_wrong_operator_is_found_and_not_used(
    ascend_pools: RankPools, fault: str, kind: OptimizerKind, reason: str
) -> None:
    ((name, why, lines),) = ascend_pools[1].run(with_fault, fault, kind)
    assert name == "torch"
    assert why.startswith(f"FBGEMM's {kind!r}, dim 8: ") and reason in why
    assert lines == [f"device 'npu': tables with optimizer {kind!r} use plain operators: {why}"]


def test_right_operators_are_used(ascend_pools: RankPools) -> None:
    assert ascend_pools[1].run(with_fault, "", "adagrad") == [("tbe", "", [])]


def one_rank_lacks_it() -> tuple[list[str], list[str]]:
    """What each table is served by if the second rank's operators raise."""
    choice()
    probe.why_tbe_fails.cache_clear()
    scenario = Scenario(cache="all", optimizer="adagrad", device="npu", tables=TABLES)
    is_broken = dist.get_rank() == 1
    try:
        with mock.patch.object(ascend_operators, "fault", "raises" if is_broken else ""):
            alone = choice().name
            dmp, _ = build(scenario, {t.name: 10 for t in TABLES})
    finally:
        probe.why_tbe_fails.cache_clear()
    lookup = dmp.module.ebc.lookup
    return [alone, *(s.kernel for s in dmp.module.ebc.stats())], [type(k).__name__ for k in lookup.kernels]


def test_all_ranks_use_plain_operators_if_one_lacks_fbgemm_s(ascend_pools: RankPools) -> None:
    first, second = ascend_pools[2].run(one_rank_lacks_it)
    assert first == (["tbe", "torch", "torch", "torch"], ["TorchKernel"] * 3)
    assert second == (["torch"] * 4, ["TorchKernel"] * 3)


# ---- the import ------------------------------------------------------------------------------------------------------


def import_and_look() -> tuple[Any, ...]:
    choice()
    spec = KernelSpec(
        tables=(KernelTable(name="t", dim=8, num_slots=4),),
        feature_table=(0,),
        optimizer=OptimizerSpec(kind="sgd"),
        is_weighted=False,
        device=HOST,
    )
    try:
        TbeKernel(spec)
    except ConfigError as e:
        refusal = str(e)
    on_host = kernel_choice(OptimizerSpec(kind="sgd"), dim=8, is_weighted=False, device=HOST)
    return ascend_operators.chip_at_import, os.environ.get("FBGEMM_ASCEND_FORCE_BUILD_VER"), refusal, on_host.name


def test_after_the_import_tables_on_the_host_do_not_use_fbgemm(ascend_pools: RankPools) -> None:
    ((chip, after, refusal, on_host),) = ascend_pools[1].run(import_and_look)
    assert (chip, after) == ("A2", None)
    assert "table 't': fbgemm_ascend is imported, which breaks FBGEMM's tables on the host" in refusal
    assert on_host == "torch"


def host_first() -> tuple[str, str]:
    """A process whose tables on the host came first keeps them."""
    with mock.patch.object(fbgemm_owner, "_is_taken_for_host", False):
        assert not fbgemm_owner.take_for_host()
        return choice().name, choice().reason


def test_where_the_host_s_tables_came_first_it_is_not_imported(npu_pools: RankPools) -> None:
    ((name, reason),) = npu_pools[1].run(host_first)
    assert name == "torch" and "tables on the host use FBGEMM in this process" in reason


def without_the_library() -> str:
    with mock.patch.object(fbgemm_owner, "_is_taken_for_host", False):
        npu._import_fbgemm_ascend.cache_clear()
        return choice().reason


def test_where_it_is_not_installed_plain_operators_serve(npu_pools: RankPools) -> None:
    assert npu_pools[1].run(without_the_library) == ["fbgemm_ascend is not installed"]


def test_a_library_that_lets_a_job_fail_is_seen(ascend_pools: RankPools) -> None:
    """The operators are really reached: planted after they were tried, a fault stops training by its name."""
    with pytest.raises(RankFailure, match="EZ1009"):
        ascend_pools[1].run(train_with_late_fault)


def train_with_late_fault() -> None:
    choice("sgd"), choice("sgd", 16)
    with mock.patch.object(ascend_operators, "fault", "raises"):
        run_against_oracle(Scenario(optimizer="sgd", steps=3, device="npu", tables=TABLES))
