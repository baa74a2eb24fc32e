"""A model around a collection, sharded with its optimizers: the same lines for TorchRec's and hashed tables."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torchrec import KeyedJaggedTensor
from torchrec.distributed import DistributedModelParallel
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizer, KeyedOptimizerWrapper
from torchrec.optim.optimizers import in_backward_optimizer_filter

from examples.torchrec_tutorial import twins
from examples.torchrec_tutorial.step_3_sharded import CPU, planner_of


class Model(nn.Module):
    """A collection under the name ``tables``, and one linear layer."""

    def __init__(self, tables: nn.Module) -> None:
        """Build the layer with the same weights every time."""
        super().__init__()
        self.tables = tables
        torch.manual_seed(1)
        self.head = nn.Linear(len(twins.FEATURES) * twins.DIM, 1)

    def forward(self, features: KeyedJaggedTensor) -> tuple[Tensor, Tensor]:
        """(loss, the same without a graph): what a pipeline wants of a model."""
        pools = self.tables(features)
        columns = torch.cat([pools[feature] for feature in twins.FEATURES], 1)
        loss = (self.head(columns) - 1).square().mean()
        return loss, loss.detach()


class SequenceModel(Model):
    """The same for sequences; their mean over the batch is what it looks at."""

    def forward(self, features: KeyedJaggedTensor) -> tuple[Tensor, Tensor]:
        """As of `Model`."""
        sequences = self.tables(features)
        means = torch.cat([sequences[feature].values().mean(0) for feature in twins.FEATURES])
        loss = (self.head(means) - 1).square().mean()
        return loss, loss.detach()


def shard(
    model: nn.Module, sharder: Any, sharding_type: str = "row_wise", compute_kernel: str = "fused"
) -> DistributedModelParallel:
    """Plan and wrap. TorchRec's shards draw rows of their own; they get ours."""
    plan = planner_of(sharding_type, compute_kernel).collective_plan(model, [sharder], dist.GroupMember.WORLD)
    sharded = DistributedModelParallel(model, device=CPU, plan=plan, sharders=[sharder])
    if sharding_type != "row_wise":  # TorchRec's twin
        twins.set_rows(sharded.module.tables)
    return sharded


def optimizer_of(model: DistributedModelParallel, fused: KeyedOptimizer | None = None) -> CombinedOptimizer:
    """The tables' optimizer, which works in the backward, and one for all that has none."""
    rest = dict(in_backward_optimizer_filter(model.named_parameters()))
    dense = KeyedOptimizerWrapper(rest, lambda parameters: torch.optim.SGD(parameters, lr=0.05))
    return CombinedOptimizer([fused or model.fused_optimizer, dense])


def train(model: nn.Module, optimizer: Any, batches: Iterable[KeyedJaggedTensor], scheduler: Any = None) -> list[float]:
    """The plain loop.

    Returns:
        The losses.
    """
    losses = []
    for features in batches:
        optimizer.zero_grad()
        loss, _ = model(features)
        loss.backward()
        optimizer.step()
        if scheduler is not None:
            scheduler.step()
        losses.append(loss.item())
    return losses


def batches(count: int) -> list[KeyedJaggedTensor]:
    """This rank's, with ids."""
    return [twins.batch(100 * dist.get_rank() + step) for step in range(count)]


def rows_of(model: DistributedModelParallel) -> Tensor:
    """float32 [ROWS, 2 * DIM]: the rows of both hashed tables, read by looking every id up. Collective."""
    model.eval()
    with torch.no_grad():
        pools = model.module.tables(twins.all_ids())
        rows = torch.cat([pools[feature] for feature in twins.FEATURES], 1)
    model.train()
    return rows
