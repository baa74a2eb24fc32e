"""What ``full_policy="evict"`` drops from a table depends neither on depth nor on what was withdrawn meanwhile."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torchrec.distributed import DistributedModelParallel
from torchrec.distributed.planner import EmbeddingShardingPlanner, Topology
from torchrec.distributed.types import ShardingEnv
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper
from torchrec.optim.optimizers import in_backward_optimizer_filter
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from hybridrec import (
    HashEmbeddingBagCollection,
    HashEmbeddingBagConfig,
    HybridTrainPipelineSparseDist,
    get_default_hybrid_sharders,
)
from tests.distributed.pipelines import PipelineBatch
from tests.ranks import RankPool

STEPS = 60


class Model(nn.Module):
    def __init__(self, ebc: nn.Module) -> None:
        super().__init__()
        self.ebc = ebc
        torch.manual_seed(1)
        self.dense = nn.Linear(8, 1)

    def forward(self, batch: PipelineBatch) -> tuple[torch.Tensor, torch.Tensor]:
        loss = (self.dense(self.ebc(batch.features).values()).squeeze(1) - batch.labels).square().mean()
        return loss, loss.detach()


def build(device_rows: int) -> tuple[DistributedModelParallel, CombinedOptimizer]:
    config = HashEmbeddingBagConfig(
        name="t",
        num_embeddings=200,
        embedding_dim=8,
        feature_names=["f"],
        max_rows=120 * dist.get_world_size(),
        full_policy="evict",
        device_rows=device_rows,
    )
    ebc = HashEmbeddingBagCollection(tables=[config])
    apply_optimizer_in_backward(torch.optim.Adagrad, ebc.parameters(), {"lr": 0.1})
    model = Model(ebc)
    env = ShardingEnv(world_size=dist.get_world_size(), rank=dist.get_rank(), pg=dist.new_group(backend="gloo"))
    sharders = get_default_hybrid_sharders(env)
    planner = EmbeddingShardingPlanner(topology=Topology(world_size=dist.get_world_size(), compute_device="cpu"))
    plan = planner.collective_plan(model, sharders, dist.GroupMember.WORLD)
    dmp = DistributedModelParallel(model, device=torch.device("cpu"), plan=plan, sharders=sharders)
    dense = KeyedOptimizerWrapper(
        dict(in_backward_optimizer_filter(dmp.named_parameters())), lambda p: torch.optim.SGD(p, lr=0.1)
    )
    return dmp, CombinedOptimizer([dmp.fused_optimizer, dense])


def batches() -> list[PipelineBatch]:
    """Ids drift, so that old ones fall out of use and come back much later."""
    generator = torch.Generator().manual_seed(dist.get_rank())
    result = []
    for step in range(STEPS):
        base = step * 6 % 300
        ids = torch.randint(base, base + 30, (12,), generator=generator) * 7919
        kjt = KeyedJaggedTensor(keys=["f"], values=ids, lengths=torch.full((4,), 3))
        result.append(PipelineBatch(kjt, torch.rand(4, generator=generator)))
    return result


def train(depth: int, device_rows: int, disturb: bool) -> dict[str, Any]:
    dmp, optimizer = build(device_rows)
    data = batches()
    losses = []
    pipeline = HybridTrainPipelineSparseDist(dmp, optimizer, torch.device("cpu"), pipe_n_batch=max(1, depth))
    iterator = iter(data)
    for step in range(STEPS):
        if depth == 0:  # the plain loop
            optimizer.zero_grad()
            loss, output = dmp(data[step])
            loss.backward()
            optimizer.step()
        else:
            output = pipeline.progress(iterator)
        losses.append(output.item())
        if disturb and step >= 24 and step % 3 == 0:  # ids that are about to be evicted, and some that were
            dmp.eval()
            with torch.no_grad():
                losses += [dmp(data[step - back])[1].item() for back in range(14, 25)]
            dmp.train()
        if disturb and depth and step % 9 == 5:
            pipeline.reset()
            iterator = iter(data[pipeline.batches_committed :])
    ebc = dmp.module.ebc
    (stats,) = ebc.stats()
    keys, rows, scores, slots, _ = ebc.lookup.log.group.entries(0)
    ebc.lookup.flush()
    records = ebc.lookup.log.group.read_records(0, np.asarray(rows))
    order = np.argsort(keys)
    return {
        "losses": losses,
        "keys": keys[order].tolist(),
        "scores": scores[order].tolist(),
        "records": records[order].tobytes(),
        "evicted": stats.evicted,
        "inserted": stats.inserted,
        "pins": stats.pins,
    }


def all_alike() -> None:
    plain = {disturb: train(0, 120, disturb) for disturb in (False, True)}
    assert plain[True]["evicted"] > 50
    for depth, device_rows, disturb in ((1, 40, False), (2, 120, True), (3, 40, True), (5, 60, True), (12, 60, True)):
        other = train(depth, device_rows, disturb)
        for name, value in plain[disturb].items():
            assert other[name] == value, (depth, device_rows, disturb, name)


def test_the_same_rows_are_evicted_at_every_depth(pool_1: RankPool, pool_2: RankPool) -> None:
    pool_1.run(all_alike)
    pool_2.run(all_alike)
