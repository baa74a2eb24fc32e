"""bfloat16 autocast of the dense part: pools, gradients and rows stay float32 and exact. A GradScaler is refused."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

from hybridrec.errors import ConfigError
from tests.distributed import pipelines, scenario
from tests.distributed.pipelines import all_batches, build_oracle, build_pipelined, mine, run_pipeline_against_oracle
from tests.distributed.scenario import Scenario, build, compare_state, state_of
from tests.ranks import RankPool, RankPools

SCENARIO = Scenario(cache="minimum", steps=20)


class HalfDense(nn.Module):
    """The oracle's dense part, in bfloat16. Notes what its layers computed in."""

    seen: set[tuple[torch.dtype, torch.dtype]] = set()

    def __init__(self, dense: nn.Module) -> None:
        super().__init__()
        self.dense = dense

    def forward(self, pools: Tensor) -> Tensor:
        with torch.autocast(pools.device.type, dtype=torch.bfloat16):
            output = self.dense(pools)
        HalfDense.seen.add((pools.dtype, output.dtype))
        return output.float()


def run_half(run: Scenario, is_all_inside: bool) -> None:
    """With ``is_all_inside`` lookup, exchange and backward of the pipeline run under autocast, too."""
    real, progress = scenario.make_dense, pipelines.HybridTrainPipelineSparseDist.progress
    HalfDense.seen.clear()

    def half(width: int) -> nn.Module:
        return HalfDense(real(width))

    def inside(self: Any, iterator: Any) -> Any:
        with torch.autocast(run.device, dtype=torch.bfloat16, enabled=is_all_inside):
            return progress(self, iterator)

    with (
        mock.patch.object(scenario, "make_dense", half),
        mock.patch.object(pipelines.HybridTrainPipelineSparseDist, "progress", inside),
    ):
        run_pipeline_against_oracle(run, 3, check_every=5)
    assert HalfDense.seen == {(torch.float32, torch.bfloat16)}


@pytest.mark.parametrize(
    ("optimizer", "is_weighted", "is_all_inside"),
    [("adam", False, True), ("adagrad", True, True), ("sgd", True, False)],
)
def test_a_dense_part_in_bfloat16_leaves_rows_exact(
    pool_2: RankPool, optimizer: str, is_weighted: bool, is_all_inside: bool
) -> None:
    run = Scenario(cache="minimum", steps=20, optimizer=optimizer, is_weighted=is_weighted)
    pool_2.run(run_half, run, is_all_inside)


def test_a_dense_part_in_bfloat16_leaves_rows_exact_on_a_device(npu_pools: RankPools) -> None:
    npu_pools[2].run(run_half, Scenario(cache="minimum", steps=20, device="npu"), True)


# ---- GradScaler ------------------------------------------------------------------------------------------------------

REFUSAL = r"{}\.scale\(loss\): the loss depends on hashed tables.*bfloat16.*enabled=False"


def train_scaled(scaler_class: type) -> None:
    """Refused before a row changed; afterwards training goes on."""
    batches = all_batches(SCENARIO)
    slots = {t.name: SCENARIO.ids_per_table for t in SCENARIO.tables}
    dmp, optimizer = build(SCENARIO, slots)
    oracle, dense_optimizer = build_oracle(SCENARIO)
    scaler = scaler_class("cpu", init_scale=4.0)
    off = scaler_class("cpu", enabled=False)
    for step in range(4):
        optimizer.zero_grad()
        loss = dmp(scenario.to_kjt(SCENARIO, batches[step][dist.get_rank()]), batches[step][dist.get_rank()].labels)
        for outputs in (loss, [loss.detach(), loss], iter([loss * 2])):
            with pytest.raises(ConfigError, match=REFUSAL.format(scaler_class.__name__)):
                scaler.scale(outputs)
        off.scale(loss).backward()
        optimizer.step()
        assert loss.item() == oracle.step(batches[step], dense_optimizer).item()
        scenario.raise_together(compare_state(SCENARIO, oracle, state_of(dmp)), step)


@pytest.mark.parametrize("scaler_class", [torch.amp.GradScaler, ShardedGradScaler])
def test_a_grad_scaler_is_refused_by_name(pool_2: RankPool, scaler_class: type) -> None:
    pool_2.run(train_scaled, scaler_class)


def scale_within_the_model() -> str:
    """A model that scales its own loss, within the pipeline."""
    scaler = torch.amp.GradScaler("cpu")

    class Scaled(pipelines.PipelinedModel):
        def forward(self, batch: Any) -> tuple[Tensor, Tensor]:
            loss, output = super().forward(batch)
            return scaler.scale(loss), output

    batches = all_batches(SCENARIO)
    _, pipeline = build_pipelined(SCENARIO, batches, 2, Scaled)
    with pytest.raises(ConfigError) as caught:
        pipeline.progress(iter(mine(SCENARIO, batches)))
    assert pipeline.batches_committed == 0
    return str(caught.value)


def test_a_loss_that_the_model_scales_is_refused(pool_1: RankPool) -> None:
    (text,) = pool_1.run(scale_within_the_model)
    assert "GradScaler.scale(loss): the loss depends on hashed tables" in text


def scale_others() -> None:
    """A model without hashed tables in the same process is scaled as ever."""
    build(SCENARIO, {t.name: 100 for t in SCENARIO.tables})
    linear = nn.Linear(2, 1)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    scaled, *_ = scaler.scale([linear(torch.ones(1, 2)).sum()])
    scaled.backward()
    assert linear.weight.grad is not None and linear.weight.grad.tolist() == [[8.0, 8.0]]


def test_other_models_may_be_scaled(pool_1: RankPool) -> None:
    pool_1.run(scale_others)
