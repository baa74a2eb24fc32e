"""TorchRec's model classes train on hashed collections; nothing but the collection is exchanged."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
from torchrec.datasets.utils import Batch
from torchrec.distributed import DistributedModelParallel
from torchrec.distributed.planner import EmbeddingShardingPlanner, ParameterConstraints, Topology
from torchrec.models.deepfm import SimpleDeepFMNN
from torchrec.models.dlrm import DLRM, DLRM_DCN, DLRM_Projection, DLRMTrain
from torchrec.modules.mlp import MLP
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper
from torchrec.optim.optimizers import in_backward_optimizer_filter

from hybridrec import (
    HashEmbeddingBagCollection,
    HashEmbeddingBagConfig,
    HybridTrainPipelineSparseDist,
    Uniform,
    get_default_hybrid_sharders,
)
from tests.conformance.twins import IDS
from tests.ranks import RankPools
from tests.unit.modules.batches import apply_optimizer_in_backward

CPU = torch.device("cpu")
STEPS, BATCH, DIM, NUM_DENSE = 10, 8, 8, 3
FEATURES = ("user", "item", "word")


class Squared(nn.Module):
    """A model of (dense, sparse) features as a task: ``task(batch) -> (loss, output)``."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, batch: Batch) -> tuple[Tensor, Tensor]:
        prediction = self.model(batch.dense_features, batch.sparse_features).squeeze(-1)
        loss = ((prediction - batch.labels) ** 2).mean()
        return loss, loss.detach()


class TwoTower(nn.Module):
    """The model of TorchRec's retrieval example: one collection, a tower a side, a dot product."""

    def __init__(self, embedding_bag_collection: nn.Module) -> None:
        super().__init__()
        self.ebc = embedding_bag_collection
        self.query = MLP(in_size=DIM, layer_sizes=[8, 6], device=CPU)
        self.candidate = MLP(in_size=2 * DIM, layer_sizes=[8, 6], device=CPU)

    def forward(self, dense_features: Tensor, sparse_features: KeyedJaggedTensor) -> Tensor:
        pooled = self.ebc(sparse_features)
        query = self.query(pooled["user"])
        candidate = self.candidate(torch.cat([pooled["item"], pooled["word"]], dim=1))
        return (query * candidate).sum(dim=1)


def dlrm(collection: nn.Module) -> nn.Module:
    return DLRMTrain(DLRM(collection, NUM_DENSE, [8, DIM], [8, 1], CPU))


def dlrm_dcn(collection: nn.Module) -> nn.Module:
    return DLRMTrain(DLRM_DCN(collection, NUM_DENSE, [8, DIM], [8, 1], 2, 4, CPU))


def dlrm_projection(collection: nn.Module) -> nn.Module:
    return DLRMTrain(DLRM_Projection(collection, NUM_DENSE, [8, DIM], [8, 1], [2 * DIM], [2 * DIM], CPU))


def deep_fm(collection: nn.Module) -> nn.Module:
    return Squared(SimpleDeepFMNN(NUM_DENSE, collection, hidden_layer_size=8, deep_fm_dimension=4))


def two_tower(collection: nn.Module) -> nn.Module:
    return Squared(TwoTower(collection))


Build = Callable[[nn.Module], nn.Module]
MODELS: list[Build] = [dlrm, dlrm_dcn, dlrm_projection, deep_fm, two_tower]


def hashed() -> HashEmbeddingBagCollection:
    configs = [
        HashEmbeddingBagConfig(
            10**12, DIM, name, feature_names=[name], planned_rows=100, initializer=Uniform(-0.5, 0.5)
        )
        for name in FEATURES
    ]
    return HashEmbeddingBagCollection(configs)


def dense() -> EmbeddingBagCollection:
    rows = {name: bag.read(IDS) for name, bag in hashed().embedding_bags.items()}
    collection = EmbeddingBagCollection(
        [EmbeddingBagConfig(num_embeddings=len(IDS), embedding_dim=DIM, name=n, feature_names=[n]) for n in FEATURES]
    )
    with torch.no_grad():
        for name, bag in collection.embedding_bags.items():
            bag.weight.copy_(rows[name])
    return collection


def batches(rank: int) -> list[Batch]:
    """The same few batches again and again, so that a loss that does not fall has not learnt."""
    generator = torch.Generator().manual_seed(rank)
    result = []
    for _ in range(2):
        lengths = torch.randint(4, (len(FEATURES) * BATCH,), generator=generator)
        ids = IDS[torch.randint(len(IDS), (int(lengths.sum()),), generator=generator)]
        kjt = KeyedJaggedTensor(list(FEATURES), ids, lengths=lengths)
        labels = (torch.rand(BATCH, generator=generator) < 0.5).float()
        result.append(Batch(torch.rand(BATCH, NUM_DENSE, generator=generator), kjt, labels))
    return result * (STEPS // 2)


def numbered(batch: Batch) -> Batch:
    kjt = batch.sparse_features
    rows = KeyedJaggedTensor(kjt.keys(), torch.searchsorted(IDS, kjt.values()), lengths=kjt.lengths())
    return Batch(batch.dense_features, rows, batch.labels)


def build(make: Build, collection: nn.Module) -> nn.Module:
    torch.manual_seed(1)
    return make(collection)


def train(model: nn.Module, data: list[Batch], optimizer: Any) -> list[float]:
    losses = []
    for batch in data:
        optimizer.zero_grad()
        loss, _ = model(batch)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("make", MODELS)
def test_unsharded_equals_torchrecs_collection(make: Build) -> None:
    mine, reference = build(make, hashed()), build(make, dense())
    weights = [p for n, p in mine.named_parameters() if "embedding_bags" in n]
    apply_optimizer_in_backward(torch.optim.Adagrad, weights, {"lr": 0.1})
    rest = dict(in_backward_optimizer_filter(mine.named_parameters()))
    assert len(rest) == len(dict(mine.named_parameters())) - len(FEATURES)
    got = train(mine, batches(0), torch.optim.Adagrad(rest.values(), lr=0.1))
    expected = train(reference, [numbered(b) for b in batches(0)], torch.optim.Adagrad(reference.parameters(), lr=0.1))
    assert got == pytest.approx(expected, rel=1e-4)
    assert got[-1] < 0.9 * got[0]


def sharded_losses(make: Build, kernel: str, depth: int) -> list[float]:
    """The plain loop at depth 0."""
    model = build(make, hashed())
    weights = [p for n, p in model.named_parameters() if "embedding_bags" in n]
    apply_optimizer_in_backward(torch.optim.Adagrad, weights, {"lr": 0.1})
    size = dist.get_world_size()
    sharders = get_default_hybrid_sharders()
    planner = EmbeddingShardingPlanner(
        topology=Topology(world_size=size, local_world_size=size, compute_device="cpu"),
        constraints={n: ParameterConstraints(sharding_types=["row_wise"], compute_kernels=[kernel]) for n in FEATURES},
    )
    plan = planner.collective_plan(model, sharders, dist.GroupMember.WORLD)
    dmp = DistributedModelParallel(model, device=CPU, plan=plan, sharders=sharders)
    rest = KeyedOptimizerWrapper(
        dict(in_backward_optimizer_filter(dmp.named_parameters())), lambda p: torch.optim.Adagrad(p, lr=0.1)
    )
    optimizer = CombinedOptimizer([dmp.fused_optimizer, rest])
    data = batches(dist.get_rank())
    if depth == 0:
        return train(dmp, data, optimizer)
    pipeline = HybridTrainPipelineSparseDist(dmp, optimizer, CPU, pipe_n_batch=depth, return_loss=True)
    iterator = iter(data)
    return [pipeline.progress(iterator)[1].item() for _ in data]


def sharded(make: Build) -> tuple[list[float], list[float], list[float]]:
    return (
        sharded_losses(make, "fused", 0),
        sharded_losses(make, "fused_uvm_caching", 0),
        sharded_losses(make, "fused_uvm", 4),
    )


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("make", MODELS)
def test_sharded_and_pipelined_give_the_bits_of_the_plain_loop(pools: RankPools, make: Build, world_size: int) -> None:
    for plain, cached, pipelined in pools[world_size].run(sharded, make):
        assert cached == plain and pipelined == plain
        assert plain[-1] < 0.9 * plain[0]
