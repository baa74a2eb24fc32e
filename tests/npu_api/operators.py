"""Which operators training runs on device tensors: noted by the simulated NPU, which runs all of them."""

from __future__ import annotations

from typing import Any
from unittest import mock

from tests.distributed.pipelines import run_pipeline_against_oracle
from tests.distributed.scenario import OPTIMIZERS, Scenario
from tests.ranks import RankKind, RankPools
from tests.simnpu import kernels


def used_operators() -> list[str]:
    """``aten::index_select``, ``aten::add.Tensor``, ...: of all optimizers, weighted bags, two ranks, the pipeline."""
    kind = RankKind(
        backend="cpu:gloo,npu:hccl",
        prepare="tests.simnpu.install:install",
        check="tests.simnpu.memory:check_no_hazards",
    )
    scenarios = [Scenario(optimizer=name, steps=4, device="npu") for name in OPTIMIZERS]
    scenarios.append(Scenario(is_weighted=True, steps=4, device="npu"))
    scenarios.append(Scenario(cache="below", steps=4, device="npu"))  # batches in passes
    pools = RankPools(2, kind)
    try:
        noted = [names for scenario in scenarios for names in pools[2].run(note_operators, scenario)]
    finally:
        pools.close()
    return sorted(set().union(*noted))


def note_operators(scenario: Scenario) -> set[str]:
    """One rank's part."""
    noted = set[str]()
    run = kernels._Call.run

    def note(self: Any, *args: Any) -> Any:
        schema = self._op._schema
        noted.add(f"{schema.name}.{schema.overload_name}".rstrip("."))
        return run(self, *args)

    with mock.patch.object(kernels._Call, "run", note):
        run_pipeline_against_oracle(scenario, 3)
    return noted
