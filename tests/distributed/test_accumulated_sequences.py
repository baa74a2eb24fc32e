"""Accumulated gradients and frozen tables where rows are not pooled."""

from __future__ import annotations

import random

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torchrec.distributed import DistributedModelParallel
from torchrec.distributed.planner import EmbeddingShardingPlanner, ParameterConstraints, Topology
from torchrec.distributed.types import ShardingEnv
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from hybridrec import HashEmbeddingCollection, HashEmbeddingConfig, accumulate_gradients, get_default_hybrid_sharders
from tests.cases.small import kjt
from tests.ranks import RankPool
from tests.unit.modules.batches import apply_optimizer_in_backward

FEATURES = ("f", "g", "h")


class Rows(nn.Module):
    """A model without a dense part."""

    def __init__(self, ec: nn.Module) -> None:
        super().__init__()
        self.ec = ec

    def forward(self, features: KeyedJaggedTensor) -> Tensor:
        found = self.ec(features)
        return torch.cat([found[f].values() for f in FEATURES])


def build(device_rows: int) -> DistributedModelParallel:
    tables = [
        HashEmbeddingConfig(name=n, num_embeddings=50, embedding_dim=8, feature_names=f, device_rows=device_rows)
        for n, f in (("a", ["f", "g"]), ("b", ["h"]))
    ]
    model = Rows(HashEmbeddingCollection(tables=tables))
    apply_optimizer_in_backward(torch.optim.Adagrad, model.ec.parameters(), {"lr": 0.5})
    sharders = get_default_hybrid_sharders(ShardingEnv(world_size=1, rank=0, pg=dist.new_group(backend="gloo")))
    kernels = ParameterConstraints(compute_kernels=["fused_uvm_caching"])
    planner = EmbeddingShardingPlanner(
        topology=Topology(world_size=1, compute_device="cpu"), constraints={"a": kernels, "b": kernels}
    )
    plan = planner.plan(model, sharders)
    return DistributedModelParallel(model, device=torch.device("cpu"), plan=plan, sharders=sharders)


def one_step_for_three(device_rows: int) -> int:
    """Batches without slots; every row equals that of one batch of all, bit for bit."""
    together, accumulated = build(40), build(device_rows)
    accumulate_gradients(accumulated)
    rng = random.Random(1)
    everything = kjt({f: [[i] for i in range(20)] for f in FEATURES})
    for _ in range(10):
        batches = [
            {f: [[rng.randrange(20) for _ in range(rng.randrange(3))] for _ in range(3)] for f in FEATURES}
            for _ in range(3)
        ]
        accumulated.fused_optimizer.zero_grad()
        for batch in batches:
            accumulated(kjt(batch)).square().sum().backward()
        accumulated.fused_optimizer.step()
        together(kjt({f: [bag for batch in batches for bag in batch[f]] for f in FEATURES})).square().sum().backward()
        with torch.no_grad():
            assert torch.equal(accumulated(everything), together(everything))
    return sum(s.oversized for s in accumulated.module.ec.stats())


@pytest.mark.parametrize("device_rows", [40, 6])
def test_one_step_for_three_batches(pool_1: RankPool, device_rows: int) -> None:
    (num_oversized,) = pool_1.run(one_step_for_three, device_rows)
    assert (num_oversized > 0) == (device_rows == 6)


def frozen() -> list[bool]:
    dmp = build(40)
    features = kjt({"f": [[1]], "g": [[2]], "h": [[77, 3]]})
    dmp.module.ec.embeddings["b"].weight.requires_grad_(False)
    before = dmp(features)
    before.sum().backward()
    after = dmp(features)
    is_same = (before == after).all(1).tolist()
    return [*is_same, dmp.module.ec.stats()[1].rows == 0]


def test_a_frozen_table(pool_1: RankPool) -> None:
    assert pool_1.run(frozen) == [[False, False, True, True, True]]
