"""A training script for torchrun, as a user writes one; each rank writes what it trained. See test_two_nodes.py."""

from __future__ import annotations

import argparse
import json
import os
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torchrec.distributed import DistributedModelParallel
from torchrec.distributed.planner import EmbeddingShardingPlanner, ParameterConstraints, Topology
from torchrec.distributed.types import ShardingEnv
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper
from torchrec.optim.optimizers import in_backward_optimizer_filter
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor
from torchrec.streamable import Pipelineable

from hybridrec import (
    HashEmbeddingBagCollection,
    HashEmbeddingBagConfig,
    HybridTrainPipelineSparseDist,
    get_default_hybrid_sharders,
)
from tests.distributed.scenario import Scenario, make_batch, make_dense, state_of, to_kjt

SCENARIO = Scenario(steps=40, ids_per_table=300, batch_size=16)
DEVICE_ROWS = 60
"""Fewer than the rows that each rank owns, so that rows move."""
VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK")


@dataclass
class Batch(Pipelineable):
    """What the loader yields."""

    features: KeyedJaggedTensor
    labels: Tensor

    def to(self, device: torch.device, non_blocking: bool = False) -> Batch:
        return Batch(self.features.to(device, non_blocking), self.labels.to(device, non_blocking=non_blocking))

    def record_stream(self, stream: torch.Stream) -> None:
        self.features.record_stream(stream)
        self.labels.record_stream(stream)

    def pin_memory(self) -> Batch:
        return Batch(self.features.pin_memory(), self.labels.pin_memory())


class Model(nn.Module):
    """Embeddings and a small dense part; returns (loss, result)."""

    def __init__(self) -> None:
        super().__init__()
        tables = [
            HashEmbeddingBagConfig(
                name=t.name,
                num_embeddings=10**12,
                planned_rows=SCENARIO.ids_per_table,
                device_rows=DEVICE_ROWS,
                embedding_dim=t.dim,
                feature_names=list(t.features),
            )
            for t in SCENARIO.tables
        ]
        self.ebc = HashEmbeddingBagCollection(tables)
        self.dense = make_dense(sum(t.dim * len(t.features) for t in SCENARIO.tables))

    def forward(self, batch: Batch) -> tuple[Tensor, Tensor]:
        logits = self.dense(self.ebc(batch.features).values()).squeeze(1)
        loss = nn.functional.binary_cross_entropy_with_logits(logits, batch.labels, reduction="sum")
        return loss, loss.detach()


def main() -> None:
    """Train, and write losses and rows of this rank."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--loop", choices=["plain", "pipeline"], required=True)
    args = parser.parse_args()
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    rank, world_size = dist.get_rank(), dist.get_world_size()
    device = torch.device("cpu")

    model = Model()
    apply_optimizer_in_backward(torch.optim.Adagrad, model.ebc.parameters(), {"lr": 0.05})
    host_group = dist.new_group(backend="gloo")
    sharders = get_default_hybrid_sharders(ShardingEnv(world_size=world_size, rank=rank, pg=host_group))
    local_world_size = int(os.environ["LOCAL_WORLD_SIZE"])
    topology = Topology(world_size=world_size, local_world_size=local_world_size, compute_device=device.type)
    constraints = {t.name: ParameterConstraints(compute_kernels=["fused_uvm_caching"]) for t in SCENARIO.tables}
    planner = EmbeddingShardingPlanner(topology=topology, constraints=constraints)
    plan = planner.collective_plan(model, sharders, dist.GroupMember.WORLD)
    dmp = DistributedModelParallel(model, device=device, plan=plan, sharders=sharders)
    dense = KeyedOptimizerWrapper(
        dict(in_backward_optimizer_filter(dmp.named_parameters())), lambda p: torch.optim.Adagrad(p, lr=0.1)
    )
    optimizer = CombinedOptimizer([dmp.fused_optimizer, dense])
    made = (make_batch(SCENARIO, step, rank, world_size) for step in range(SCENARIO.steps))
    batches = (Batch(to_kjt(SCENARIO, batch), batch.labels) for batch in made)

    losses = []
    if args.loop == "pipeline":
        pipeline = HybridTrainPipelineSparseDist(dmp, optimizer, device, execute_all_batches=True)
        for _ in range(SCENARIO.steps):
            losses.append(pipeline.progress(batches).item())
    else:
        for batch in batches:
            optimizer.zero_grad()
            loss, result = dmp(batch)
            loss.backward()
            optimizer.step()
            losses.append(result.item())

    arrays = {}
    for t, rows in enumerate(state_of(dmp)):
        arrays[f"ids_{t}"] = np.array(sorted(rows), np.int64)
        arrays[f"rows_{t}"] = np.stack([rows[i] for i in sorted(rows)])
    np.savez(args.out / f"rank_{rank}.npz", losses=np.array(losses), **arrays)
    victims = sum(stats.victims for stats in dmp.module.ebc.stats())
    facts = {"victims": victims, "threads": torch.get_num_threads(), **{name: os.environ[name] for name in VARIABLES}}
    (args.out / f"rank_{rank}.json").write_text(json.dumps(facts))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
