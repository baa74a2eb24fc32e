"""What models a pipeline takes: several collections, plain tables beside hashed ones, branches, repeated calls."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torchrec.distributed import DistributedModelParallel
from torchrec.distributed.planner import EmbeddingShardingPlanner, ParameterConstraints, Topology
from torchrec.distributed.types import ShardingEnv
from torchrec.modules.embedding_configs import EmbeddingBagConfig, PoolingType
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper
from torchrec.optim.optimizers import in_backward_optimizer_filter
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from hybridrec import (
    ConfigError,
    HashEmbeddingBagCollection,
    HashEmbeddingBagConfig,
    HybridTrainPipelineSparseDist,
    get_default_hybrid_sharders,
)
from hybridrec.distributed.pipelined_call import calls_of
from tests.distributed.pipelines import PipelineBatch
from tests.ranks import RankPool

STEPS = 14
FEATURES = ("a", "b", "c", "p", "q")


def hashed(name: str, *features: str, **kwargs: Any) -> HashEmbeddingBagCollection:
    config = HashEmbeddingBagConfig(
        name=name, num_embeddings=400, embedding_dim=4, feature_names=list(features), device_rows=60, **kwargs
    )
    return HashEmbeddingBagCollection(tables=[config])


def plain(name: str, *features: str) -> EmbeddingBagCollection:
    return EmbeddingBagCollection(
        tables=[EmbeddingBagConfig(name=name, num_embeddings=50, embedding_dim=4, feature_names=list(features))],
        device=torch.device("meta"),
    )


class PropertyBatch(PipelineBatch):
    """With what is made of its fields."""

    def to(self, device: torch.device, non_blocking: bool = False) -> PropertyBatch:
        return PropertyBatch(self.features.to(device), self.labels.to(device))

    @property
    def values(self) -> Tensor:
        return self.features.values()

    @property
    def lengths(self) -> Tensor:
        return self.features.lengths()

    @property
    def kjt(self) -> KeyedJaggedTensor:
        return KeyedJaggedTensor(keys=list(FEATURES), values=self.values, lengths=self.lengths)

    @property
    def shifted(self) -> KeyedJaggedTensor:
        return KeyedJaggedTensor(keys=list(FEATURES), values=self.values + 1, lengths=self.lengths)


class Head(nn.Module):
    """What all models of this file end with."""

    def __init__(self, width: int) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.dense = nn.Linear(width, 1)

    def score(self, pools: list[Tensor], labels: Tensor) -> tuple[Tensor, Tensor]:
        loss = (self.dense(torch.cat(pools, 1)).squeeze(1) - labels).square().mean()
        return loss, loss.detach()


class TwoCollections(Head):
    """Two hashed collections and a plain one."""

    def __init__(self) -> None:
        super().__init__(20)
        self.first = hashed("t1", "a", "b", pooling=PoolingType.MEAN)
        self.second = hashed("t2", "c")
        self.plain = plain("t3", "p", "q")

    def forward(self, batch: PipelineBatch) -> tuple[Tensor, Tensor]:
        pools = [module(batch.features).values() for module in (self.second, self.plain, self.first)]
        return self.score(pools, batch.labels)


class Derived(Head):
    """A collection is looked up with what the forward makes of the batch: it cannot be prefetched, the other is."""

    def __init__(self) -> None:
        super().__init__(12)
        self.first = hashed("t1", "a", "b")
        self.second = hashed("t2", "c")

    def forward(self, batch: PipelineBatch) -> tuple[Tensor, Tensor]:
        moved = KeyedJaggedTensor(
            keys=batch.features.keys(), values=batch.features.values() + 1, lengths=batch.features.lengths()
        )
        return self.score([self.first(batch.features).values(), self.second(moved).values()], batch.labels)


class Repeated(Head):
    """One collection is called twice."""

    def __init__(self) -> None:
        super().__init__(12)
        self.first = hashed("t1", "a")
        self.second = hashed("t2", "b")

    def forward(self, batch: PipelineBatch) -> tuple[Tensor, Tensor]:
        once, again = self.first(batch.features).values(), self.first(batch.features).values()
        return self.score([once, again, self.second(batch.features).values()], batch.labels)


class Switched(Head):
    """After tracing, a switch makes the model pass something else."""

    def __init__(self) -> None:
        super().__init__(8)
        self.first = hashed("t1", "a")
        self.second = hashed("t2", "c")
        self.is_other_way = False

    def forward(self, batch: PipelineBatch) -> tuple[Tensor, Tensor]:
        features = batch.features
        if self.is_other_way:
            features = KeyedJaggedTensor(
                keys=features.keys(), values=features.values().flip(0), lengths=features.lengths()
            )
        return self.score([self.first(features).values(), self.second(batch.features).values()], batch.labels)


class Rebuilt(Head):
    """The batch's field is a property that makes a KJT of the same tensors anew; then the model passes another one."""

    def __init__(self) -> None:
        super().__init__(4)
        self.first = hashed("t1", "a")
        self.is_other_way = False

    def forward(self, batch: PropertyBatch) -> tuple[Tensor, Tensor]:
        return self.score([self.first(batch.shifted if self.is_other_way else batch.kjt).values()], batch.labels)


class Built(Head):
    """The forward makes the KJT: tracing cannot say of what, so the collection is not prefetched."""

    def __init__(self) -> None:
        super().__init__(8)
        self.first = hashed("t1", "a")
        self.second = hashed("t2", "c")

    def forward(self, batch: PropertyBatch) -> tuple[Tensor, Tensor]:
        kjt = KeyedJaggedTensor(keys=list(FEATURES), values=batch.values, lengths=batch.lengths)
        return self.score([self.first(kjt).values(), self.second(batch.features).values()], batch.labels)


class Writing(Head):
    """The forward writes the ids in place, which on the host are the loader's own."""

    def __init__(self) -> None:
        super().__init__(4)
        self.first = hashed("t1", "a")
        self.change = Change()

    def forward(self, batch: PropertyBatch) -> tuple[Tensor, Tensor]:
        self.change(batch.features)
        return self.score([self.first(batch.features).values()], batch.labels)


class Change(nn.Module):
    def forward(self, features: KeyedJaggedTensor) -> None:
        features.values().remainder_(7)


class Unused(Head):
    """One collection does not reach the loss: its rows are never stepped, and must not stay pinned by the output."""

    def __init__(self) -> None:
        super().__init__(4)
        self.first = hashed("t1", "a")
        self.second = hashed("t2", "c")

    def forward(self, batch: PipelineBatch) -> tuple[Tensor, Tensor]:
        unused = self.second(batch.features).values()
        loss, output = self.score([self.first(batch.features).values()], batch.labels)
        return loss, output + 0 * unused.sum()


def build(model: Head) -> tuple[DistributedModelParallel, CombinedOptimizer]:
    apply_optimizer_in_backward(
        torch.optim.Adagrad, [p for n, p in model.named_parameters() if "embedding_bags" in n], {"lr": 0.1}
    )
    world_size, rank = dist.get_world_size(), dist.get_rank()
    env = ShardingEnv(world_size=world_size, rank=rank, pg=dist.new_group(backend="gloo"))
    sharders = get_default_hybrid_sharders(env)
    names = [
        c.name for m in model.modules() if isinstance(m, EmbeddingBagCollection) for c in m.embedding_bag_configs()
    ]
    names += [
        c.name for m in model.modules() if isinstance(m, HashEmbeddingBagCollection) for c in m.embedding_bag_configs()
    ]
    planner = EmbeddingShardingPlanner(
        topology=Topology(world_size=world_size, local_world_size=world_size, compute_device="cpu"),
        constraints={
            n: ParameterConstraints(
                sharding_types=["row_wise"], compute_kernels=["fused" if n == "t3" else "fused_uvm_caching"]
            )
            for n in names
        },
    )
    plan = planner.collective_plan(model, sharders, dist.GroupMember.WORLD)
    dmp = DistributedModelParallel(model, device=torch.device("cpu"), plan=plan, sharders=sharders)
    for module in dmp.modules():
        if hasattr(module, "_lookups") and calls_of(module) is None:
            for name, parameter in module.named_parameters():
                if "t3" in name:
                    with torch.no_grad():
                        parameter.copy_(torch.linspace(-0.1, 0.1, parameter.numel()).view_as(parameter))
    dense = KeyedOptimizerWrapper(
        dict(in_backward_optimizer_filter(dmp.named_parameters())), lambda p: torch.optim.SGD(p, lr=0.1)
    )
    return dmp, CombinedOptimizer([dmp.fused_optimizer, dense])


def batches() -> list[PropertyBatch]:
    generator = torch.Generator().manual_seed(dist.get_rank())
    result = []
    for _ in range(STEPS):
        lengths = torch.randint(0, 4, (len(FEATURES) * 5,), generator=generator)
        ids = torch.randint(0, 50, (int(lengths.sum()),), generator=generator)
        result.append(
            PropertyBatch(
                KeyedJaggedTensor(keys=list(FEATURES), values=ids, lengths=lengths),
                torch.rand(5, generator=generator),
            )
        )
    return result


def losses(model_class: Callable[[], Head], depth: int, **kwargs: Any) -> list[float]:
    """The plain loop at depth 0. `Switched` switches at step 7. ``kwargs`` are the pipeline's."""
    dmp, optimizer = build(model_class())
    data = batches()
    device = torch.device("cpu")
    pipeline = HybridTrainPipelineSparseDist(dmp, optimizer, device, pipe_n_batch=depth, **kwargs) if depth else None
    iterator = iter(data)
    result, kept = [], []
    for step in range(STEPS):
        if isinstance(dmp.module, (Switched, Rebuilt)):
            dmp.module.is_other_way = step in (7, 8, 11)
        if pipeline is None:
            optimizer.zero_grad()
            loss, output = dmp(data[step])
            loss.backward()
            optimizer.step()
        else:
            output = pipeline.progress(iterator)
            kept.append(output)
        result.append(output.item())
    if pipeline is not None:
        with pytest.raises(StopIteration):
            pipeline.progress(iterator)
    loss = output = None  # a plain loop's last graph pins its rows, which is right
    for module in dmp.modules():
        if hasattr(module, "stats") and any(s.pins for s in module.stats()):
            raise AssertionError(f"pins: {module.stats()}")
    return result


def same_as_the_plain_loop(model_class: Callable[[], Head], depth: int, **kwargs: Any) -> None:
    expected, got = losses(model_class, 0), losses(model_class, depth, **kwargs)
    assert got == expected


@pytest.mark.parametrize("model_class", [TwoCollections, Derived, Repeated, Switched, Rebuilt, Built, Writing, Unused])
@pytest.mark.parametrize("depth", [1, 3, 4])
def test_models_train_as_in_the_plain_loop(pool_2: RankPool, model_class: Callable[[], Head], depth: int) -> None:
    pool_2.run(same_as_the_plain_loop, model_class, depth)


class OneValue(Head):
    """Returns the loss alone."""

    def __init__(self) -> None:
        super().__init__(4)
        self.first = hashed("t1", "a")

    def forward(self, batch: PipelineBatch) -> Tensor:
        return self.score([self.first(batch.features).values()], batch.labels)[0]


def no_output() -> None:
    dmp, optimizer = build(OneValue())
    pipeline = HybridTrainPipelineSparseDist(dmp, optimizer, torch.device("cpu"))
    with pytest.raises(ConfigError, match="the model returned a Tensor, not .losses, output."):
        pipeline.progress(iter(batches()))
    pipeline.reset()
    assert not any(s.pins for s in dmp.module.first.stats())


def test_a_model_that_returns_no_output_is_refused(pool_1: RankPool) -> None:
    pool_1.run(no_output)


def both_returned() -> None:
    dmp, optimizer = build(TwoCollections())
    pipeline = HybridTrainPipelineSparseDist(dmp, optimizer, torch.device("cpu"), return_loss=True)
    iterator = iter(batches())
    output, loss = pipeline.progress(iterator)
    assert loss.requires_grad and output.item() == loss.item()
    pipeline.reset()


def test_return_loss(pool_1: RankPool) -> None:
    pool_1.run(both_returned)
