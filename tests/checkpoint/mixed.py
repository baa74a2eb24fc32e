"""Hashed tables beside TorchRec's own, sharded in every way: training that saves, and what loads it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from fbgemm_gpu.split_table_batched_embeddings_ops_training import SplitTableBatchedEmbeddingBagsCodegen
from torch import Tensor, nn
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, EmbeddingCollection, EmbeddingConfig, KeyedJaggedTensor
from torchrec.distributed import DistributedModelParallel
from torchrec.distributed.sharding_plan import (
    column_wise,
    construct_module_sharding_plan,
    data_parallel,
    row_wise,
    table_wise,
)
from torchrec.distributed.types import ShardedTensor, ShardingPlan
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper
from torchrec.optim.optimizers import in_backward_optimizer_filter
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad

from hybridrec import HashEmbeddingBagCollection, HashEmbeddingBagConfig, Uniform, get_default_hybrid_sharders
from tests.unit.modules.batches import apply_optimizer_in_backward

ROWS, DIM = 11, 8
OPTIMIZERS = {"adagrad": torch.optim.Adagrad, "rowwise_adagrad": RowWiseAdagrad, "adam": torch.optim.Adam}
PLAN = {"row": "row_wise", "table": "table_wise", "column": "column_wise", "all": "data_parallel"}
"""Plain table -> how it is sharded."""
MOVED = {"row": "column_wise", "table": "row_wise", "column": "table_wise", "all": "data_parallel"}
"""Another plan."""
FEED = {"other": "column"}
"""Plain table -> whose feature it has, if not its own."""
HASHED = {"h": "table_wise", "k": "row_wise"}
"""Hashed table -> how it is sharded."""
FEATURES = ("f_h", "f_k", "f_row", "f_table", "f_column", "f_all", "f_sequence")


class Mixed(nn.Module):
    """Two pooled collections, one of them hashed, a sequence of TorchRec's, and a dense part."""

    def __init__(self, plain: EmbeddingBagCollection, hashed: HashEmbeddingBagCollection) -> None:
        super().__init__()
        self.hashed, self.plain = hashed, plain
        self.sequence = EmbeddingCollection(
            tables=[
                EmbeddingConfig(num_embeddings=ROWS, embedding_dim=DIM, name="sequence", feature_names=["f_sequence"])
            ]
        )
        self.dense = nn.Linear(6 * DIM, 1)

    def forward(self, features: KeyedJaggedTensor, labels: Tensor) -> Tensor:
        pooled = torch.cat([self.hashed(features).values(), self.plain(features).values()], dim=1)
        rows = self.sequence(features)["f_sequence"].values()
        return ((self.dense(pooled).squeeze(1) - labels) ** 2).mean() + (rows**2).mean()


def plan_of(how: str, rank: int) -> Any:
    world_size = dist.get_world_size()
    if how == "column_wise":
        return column_wise(ranks=[(rank + 1) % world_size, rank])
    if how == "dense":
        return row_wise(compute_kernel="dense")
    return {"row_wise": row_wise(), "data_parallel": data_parallel()}.get(how) or table_wise(rank=rank)


def build(
    plan: Mapping[str, str] = PLAN,
    *,
    optimizer: str = "adagrad",
    hashed: Mapping[str, str] = HASHED,
    rows: int = ROWS,
    hashed_optimizer: str = "adagrad",
) -> tuple[DistributedModelParallel, CombinedOptimizer]:
    torch.manual_seed(3)
    features = {name: f"f_{FEED.get(name, name)}" for name in plan}
    bags = [
        EmbeddingBagConfig(num_embeddings=rows, embedding_dim=DIM, name=name, feature_names=[feature])
        for name, feature in features.items()
    ]
    hashes = [
        HashEmbeddingBagConfig(10**12, DIM, n, feature_names=[f"f_{n}"], planned_rows=90, initializer=Uniform(-1, 1))
        for n in hashed
    ]
    model = Mixed(EmbeddingBagCollection(tables=bags), HashEmbeddingBagCollection(hashes))
    apply_optimizer_in_backward(OPTIMIZERS[hashed_optimizer], model.hashed.parameters(), {"lr": 0.1})
    outside = [f"embedding_bags.{name}.weight" for name, how in plan.items() if how in ("data_parallel", "dense")]
    parameters = [p for name, p in model.plain.named_parameters() if name not in outside]
    for part in (parameters, model.sequence.parameters()):
        apply_optimizer_in_backward(OPTIMIZERS[optimizer], part, {"lr": 0.1})
    sharders = get_default_hybrid_sharders()
    by_type = {sharder.module_type: sharder for sharder in sharders}
    world_size, last = dist.get_world_size(), dist.get_world_size() - 1
    modules = {
        "plain": {name: plan_of(how, last) for name, how in plan.items()},
        "hashed": {name: plan_of(how, last) for name, how in hashed.items()},
        "sequence": {"sequence": table_wise(rank=last)},
    }
    plans = {
        name: construct_module_sharding_plan(
            getattr(model, name),
            tables,
            sharder=by_type[type(getattr(model, name))],
            device_type="cpu",
            local_size=world_size,
            world_size=world_size,
        )
        for name, tables in modules.items()
    }
    dmp = DistributedModelParallel(model, device=torch.device("cpu"), plan=ShardingPlan(plans), sharders=sharders)
    rest = dict(in_backward_optimizer_filter(dmp.named_parameters()))
    return dmp, CombinedOptimizer(
        [dmp.fused_optimizer, KeyedOptimizerWrapper(rest, lambda p: torch.optim.Adagrad(p, lr=0.1))]
    )


def batch_of(step: int, rank: int) -> tuple[KeyedJaggedTensor, Tensor]:
    generator = torch.Generator().manual_seed(100 * step + rank)
    lengths = torch.randint(1, 4, (len(FEATURES) * 5,), generator=generator)
    ids = torch.randint(ROWS, (int(lengths.sum()),), generator=generator)
    ids[: int(lengths[:10].sum())] *= 7**20 // 3
    return KeyedJaggedTensor(list(FEATURES), ids, lengths=lengths), torch.rand(5, generator=generator)


def train(dmp: DistributedModelParallel, optimizer: CombinedOptimizer, steps: range) -> list[float]:
    losses = []
    for step in steps:
        optimizer.zero_grad()
        loss = dmp(*batch_of(step, dist.get_rank()))
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def kernels_of(dmp: DistributedModelParallel) -> list[Any]:
    """FBGEMM's, of this rank."""
    lookups = [lookup for part in (dmp.module.plain, dmp.module.sequence) for lookup in part._lookups]
    return [m for lookup in lookups for m in lookup.modules() if isinstance(m, SplitTableBatchedEmbeddingBagsCodegen)]


def tensors_of(dmp: DistributedModelParallel, optimizer: CombinedOptimizer) -> dict[str, Tensor]:
    """Weights and fused states of TorchRec's tables, whole. Collective."""
    mine: dict[str, Any] = {}
    for part in ("plain", "sequence"):
        mine |= {f"{part}.{name}": value for name, value in getattr(dmp.module, part).state_dict().items()}
    for parameter, states in optimizer.state_dict()["state"].items():
        mine |= {f"{parameter}:{key}": v for key, v in states.items() if isinstance(v, ShardedTensor)}
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, {name: parts_of(value) for name, value in mine.items()})
    found: dict[str, Tensor] = {}
    for name, (size, parts) in (entry for one in everyone for entry in one.items()):
        whole = found.setdefault(name, torch.full(size, torch.nan))
        for offsets, part in parts:
            whole[tuple(slice(o, o + n) for o, n in zip(offsets, part.shape, strict=True))] = part
    return found


def parts_of(value: Any) -> tuple[tuple[int, ...], list[tuple[list[int], Tensor]]]:
    """(shape, what this rank has of it and where)."""
    if not isinstance(value, ShardedTensor):
        return tuple(value.shape), [([0] * value.dim(), value.detach().clone())]
    return tuple(value.size()), [(s.metadata.shard_offsets, s.tensor.clone()) for s in value.local_shards()]


def same(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> bool:
    """Bit for bit, and complete."""
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)
