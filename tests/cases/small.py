"""Small batches and models for the cases: a sharded collection beside the unsharded one, on the same batches."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torchrec.distributed import DistributedModelParallel
from torchrec.distributed.planner import EmbeddingShardingPlanner, ParameterConstraints, Topology
from torchrec.distributed.types import ShardingEnv
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from hybridrec import HashEmbeddingBagCollection, HashEmbeddingBagConfig, Uniform, get_default_hybrid_sharders
from tests.unit.modules.batches import apply_optimizer_in_backward

Bags = dict[str, list[list[int]]]
"""Feature -> bags of ids."""


def kjt(bags: Bags, *, is_weighted: bool = False, **changes: Any) -> KeyedJaggedTensor:
    """A batch; an id's weight follows from the id."""
    ids = torch.tensor([i for feature in bags.values() for bag in feature for i in bag], dtype=torch.int64)
    fields: dict[str, Any] = {
        "keys": list(bags),
        "values": ids,
        "lengths": torch.tensor([len(bag) for feature in bags.values() for bag in feature], dtype=torch.int64),
        "weights": (ids % 7 - 3).float() / 4 if is_weighted else None,
        "stride": len(next(iter(bags.values()))),
    }
    return KeyedJaggedTensor(**(fields | changes))


def table(name: str, dim: int, features: Sequence[str], **changes: Any) -> HashEmbeddingBagConfig:
    return HashEmbeddingBagConfig(
        3000, dim, name, feature_names=list(features), initializer=Uniform(-0.1, 0.1), **changes
    )


class Pools(nn.Module):
    """A model without a dense part: the pools are the output."""

    def __init__(self, ebc: nn.Module) -> None:
        super().__init__()
        self.ebc = ebc

    def forward(self, features: KeyedJaggedTensor) -> Tensor:
        values: Tensor = self.ebc(features).values()
        return values


def unsharded(
    tables: list[HashEmbeddingBagConfig],
    *,
    is_weighted: bool = False,
    optimizer: type[torch.optim.Optimizer] = torch.optim.SGD,
    **kwargs: Any,
) -> HashEmbeddingBagCollection:
    collection = HashEmbeddingBagCollection(tables, is_weighted=is_weighted)
    apply_optimizer_in_backward(optimizer, collection.parameters(), kwargs or {"lr": 0.5})
    return collection


def sharded(
    tables: list[HashEmbeddingBagConfig], *, device_rows: int | None = None, **kwargs: Any
) -> DistributedModelParallel:
    """`Pools` over the tables; with ``device_rows`` they are cached."""
    for config in tables:
        config.device_rows = device_rows
    model = Pools(unsharded(tables, **kwargs))
    rank, world_size = dist.get_rank(), dist.get_world_size()
    sharders = get_default_hybrid_sharders(
        ShardingEnv(world_size=world_size, rank=rank, pg=dist.new_group(backend="gloo"))
    )
    kernel = "fused" if device_rows is None else "fused_uvm_caching"
    planner = EmbeddingShardingPlanner(
        topology=Topology(world_size=world_size, local_world_size=world_size, compute_device="cpu"),
        constraints={config.name: ParameterConstraints(compute_kernels=[kernel]) for config in tables},
    )
    plan = planner.collective_plan(model, sharders, dist.GroupMember.WORLD)
    return DistributedModelParallel(model, device=torch.device("cpu"), plan=plan, sharders=sharders)


def glued(batches: Sequence[Bags]) -> Bags:
    """The batches of all ranks as one."""
    return {feature: [bag for batch in batches for bag in batch[feature]] for feature in batches[0]}


def train_alike(
    tables: list[HashEmbeddingBagConfig],
    steps: Sequence[Sequence[Bags]],
    *,
    is_weighted: bool = False,
    **kwargs: Any,
) -> Tensor:
    """Train the sharded collection on each rank's batches and the unsharded one on all; their pools must agree to 1e-6.

    Args:
        tables: Of both.
        steps: Step -> rank -> batch.
        is_weighted: Whether ids have weights.
        kwargs: The optimizer.

    Returns:
        float32 [B, columns]: this rank's pools of the last batch, after training.
    """
    rank, world_size = dist.get_rank(), dist.get_world_size()
    dmp = sharded(tables, is_weighted=is_weighted, **kwargs)
    reference = unsharded(tables, is_weighted=is_weighted, **kwargs)
    pools = torch.empty(0)
    for is_training in (True, False):
        dmp.train(is_training)
        reference.train(is_training)
        for everyone in steps:
            batches = everyone[:world_size]
            first = sum(len(next(iter(b.values()))) for b in batches[:rank])
            pools = dmp(kjt(batches[rank], is_weighted=is_weighted))
            expected = reference(kjt(glued(batches), is_weighted=is_weighted)).values()
            torch.testing.assert_close(
                pools.detach(), expected.detach()[first : first + len(pools)], rtol=1e-6, atol=1e-7
            )
            if is_training:
                factor = torch.arange(1, pools.shape[1] + 1) / pools.shape[1]
                (pools * factor).sum().backward()
                ((expected * factor).sum() / world_size).backward()
    return pools.detach()
