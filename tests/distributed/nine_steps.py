"""The user's script, in nine steps, with nothing of ours but names: what every rank runs.

Its device is an argument; nothing else differs between devices.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset
from torchrec.distributed import DistributedModelParallel
from torchrec.distributed.planner import EmbeddingShardingPlanner, ParameterConstraints, Topology
from torchrec.distributed.types import ShardingEnv
from torchrec.modules.embedding_configs import PoolingType
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper
from torchrec.optim.optimizers import in_backward_optimizer_filter
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor
from torchrec.streamable import Pipelineable

from hybridrec import HashEmbeddingBagCollection, HashEmbeddingBagConfig, TableStats
from hybridrec.distributed.hybrid_train_pipeline import HybridTrainPipelineSparseDist
from hybridrec.distributed.sharding_plan import get_default_hybrid_sharders

FEATURES = ("user", "item")
DIM = 8


@dataclass(frozen=True, kw_only=True)
class Script:
    """What differs between runs of the script."""

    device: str
    constrained: bool = False
    planned_rows: int = 400
    hbm_cap: int | None = None
    """Bytes of the device tier of a rank; on the host, of its memory."""
    depth: int = 3
    epochs: int = 2
    ids_on_device: bool = False
    """The loader yields KJTs that are on the device already."""
    device_as_str: bool = False
    pin_memory: bool = False
    use_pipeline: bool = True


# 1. A batch: any fields, among them a KeyedJaggedTensor.
@dataclass
class Batch(Pipelineable):
    dense: Tensor
    sparse: KeyedJaggedTensor
    labels: Tensor
    name: str = field(default="")

    def to(self, device: torch.device, non_blocking: bool = False) -> Batch:
        return Batch(
            self.dense.to(device, non_blocking=non_blocking),
            self.sparse.to(device, non_blocking=non_blocking),
            self.labels.to(device, non_blocking=non_blocking),
            self.name,
        )

    def pin_memory(self) -> Batch:
        return Batch(self.dense.pin_memory(), self.sparse.pin_memory(), self.labels.pin_memory(), self.name)

    def record_stream(self, stream: torch.Stream) -> None:
        self.dense.record_stream(stream)
        self.sparse.record_stream(stream)
        self.labels.record_stream(stream)


# 2. Data.
class RandomRecDataset(IterableDataset[Batch]):
    def __init__(self, rank: int, num_batches: int = 12, batch_size: int = 6) -> None:
        self.rank, self.num_batches, self.batch_size = rank, num_batches, batch_size

    def __iter__(self) -> Iterator[Batch]:
        info = torch.utils.data.get_worker_info()
        worker, workers = (info.id, info.num_workers) if info is not None else (0, 1)
        for i in range(worker, self.num_batches, workers):
            generator = torch.Generator().manual_seed(1000 * self.rank + i)
            lengths = torch.randint(0, 4, (len(FEATURES) * self.batch_size,), generator=generator)
            ids = torch.randint(0, 300, (int(lengths.sum()),), generator=generator) * 2**48 - 2**55
            yield Batch(
                dense=torch.rand(self.batch_size, 4, generator=generator),
                sparse=KeyedJaggedTensor(keys=list(FEATURES), values=ids, lengths=lengths),
                labels=torch.randint(0, 2, (self.batch_size,), generator=generator).float(),
                name=f"batch {i}",
            )


# 4. The model: model(batch) returns (loss, result).
class TestModel(nn.Module):
    __test__ = False

    def __init__(self, device: str | torch.device, planned_rows: int) -> None:
        super().__init__()
        table_configs = [
            HashEmbeddingBagConfig(
                name=f"{name}_table",
                num_embeddings=10**12,
                planned_rows=planned_rows,
                embedding_dim=DIM,
                feature_names=[name],
                pooling=pooling,
            )
            for name, pooling in zip(FEATURES, (PoolingType.SUM, PoolingType.MEAN), strict=True)
        ]
        self.ebc = HashEmbeddingBagCollection(device=device, tables=table_configs)
        torch.manual_seed(5)
        self.over = nn.Sequential(nn.Linear(len(FEATURES) * DIM + 4, 8), nn.ReLU(), nn.Linear(8, 1))
        self.loss_fn = nn.BCEWithLogitsLoss()

    def forward(self, batch: Batch) -> tuple[Tensor, Tensor]:
        embeddings = self.ebc(batch.sparse).values()
        result = self.over(torch.cat([batch.dense, embeddings], 1)).squeeze(1)
        return self.loss_fn(result, batch.labels), result


def run(script: Script) -> tuple[list[Tensor], tuple[TableStats, ...], int]:
    """Steps 3 to 9 on this rank, whose process group exists.

    Returns:
        The results of every batch, on the host; the tables' statistics; bytes of ids that came on the device.
    """
    # 3. Device, groups.
    device = torch.device(script.device)
    rank, world_size = dist.get_rank(), dist.get_world_size()
    host_gp = dist.new_group(backend="gloo")
    host_env = ShardingEnv(world_size=world_size, rank=rank, pg=host_gp)
    test_model = TestModel(script.device if script.device_as_str else device, script.planned_rows)

    # 5. The sparse optimizer.
    apply_optimizer_in_backward(
        torch.optim.Adagrad, test_model.ebc.parameters(), optimizer_kwargs={"lr": 0.001, "eps": 0.1}
    )

    # 6. Sharders, constraints, plan.
    hybrid_sharder = get_default_hybrid_sharders(host_env=host_env)
    constraints = {
        f"{name}_table": ParameterConstraints(sharding_types=["row_wise"], compute_kernels=["fused"])
        for name in FEATURES
    }
    caps = {} if script.hbm_cap is None else {"hbm_cap": script.hbm_cap}
    planner = EmbeddingShardingPlanner(
        topology=Topology(world_size=world_size, local_world_size=world_size, compute_device=device.type, **caps),
        batch_size=6,
        constraints=constraints if script.constrained else None,
    )
    plan = planner.collective_plan(test_model, hybrid_sharder, dist.GroupMember.WORLD)
    logging.info(plan)

    # 7. The sharded model.
    ddp_model = DistributedModelParallel(test_model, device=device, plan=plan, sharders=hybrid_sharder)

    # 8. The optimizers.
    dense_optimizer = KeyedOptimizerWrapper(
        dict(in_backward_optimizer_filter(ddp_model.named_parameters())), lambda p: torch.optim.Adagrad(p, lr=0.1)
    )
    optimizer = CombinedOptimizer([ddp_model.fused_optimizer, dense_optimizer])

    # 9. Training.
    pipeline = HybridTrainPipelineSparseDist(
        ddp_model, optimizer, device, execute_all_batches=True, pipe_n_batch=script.depth
    )
    num_workers = 0 if script.ids_on_device else 2
    loader = DataLoader(
        RandomRecDataset(rank),
        batch_size=None,
        num_workers=num_workers,
        pin_memory=script.pin_memory,
        multiprocessing_context="fork" if num_workers else None,  # what a script has that nobody spawned
    )
    results = []
    for _ in range(script.epochs):
        batched_iterator = iter(loader)
        if script.ids_on_device:
            batched_iterator = (batch.to(device) for batch in batched_iterator)
        if not script.use_pipeline:
            for batch in batched_iterator:
                optimizer.zero_grad()
                loss, result = ddp_model(batch.to(device))
                loss.backward()
                optimizer.step()
                results.append(result.detach().cpu())
            continue
        while True:
            try:
                results.append(pipeline.progress(batched_iterator).detach().cpu())
            except StopIteration:
                break
    return results, ddp_model.module.ebc.stats(), pipeline.stats().copied_bytes
