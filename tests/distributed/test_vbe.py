"""Variable batch per feature (VBE): distinct bags travel and are pooled, examples get the pools of their bags.

The oracle is that of the other tests; what VBE adds, a pool for each example and the sum of its gradients, is written
here with plain loops. A batch is its own `Batch` of distinct bags, filled up with empty ones.
"""

from __future__ import annotations

import dataclasses
import random
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
from torchrec.modules.embedding_configs import PoolingType

from hybridrec import HashEmbeddingBagCollection, HashEmbeddingBagConfig
from hybridrec.modules.variable_batch import expand
from tests.distributed.kjt_forms import train
from tests.distributed.oracle import Batch, Oracle
from tests.distributed.scenario import (
    Scenario,
    build,
    device_rows,
    state_of,
    universe,
)
from tests.ranks import RankPool, RankPools
from tests.unit.modules.batches import apply_optimizer_in_backward

FEATURES = ("word", "bought", "user", "clicked")  # not the order of the tables
STEPS = 12


@dataclass(frozen=True, kw_only=True)
class Variable(Batch):
    """A batch of distinct bags. ``bags`` are filled up with empty ones, and ``num_bags`` is the most of a feature."""

    strides: dict[str, list[int]]
    """Feature -> bags, in as many parts as TorchRec's ``stride_per_key_per_rank`` has columns."""
    inverse: dict[str, list[int]]
    """Feature -> the bag of each example."""

    def kjt(self, scenario: Scenario) -> KeyedJaggedTensor:
        """Of the distinct bags. The inverse indices name the features in another order, and one more."""
        names = [*reversed(FEATURES), "other"]
        index = [self.inverse[f] for f in reversed(FEATURES)] + [[7] * len(self.labels)]
        bags = {f: self.bags[f][: sum(self.strides[f])] for f in FEATURES}
        return _kjt(
            scenario,
            bags,
            stride_per_key_per_rank=[self.strides[f] for f in FEATURES],
            inverse_indices=(names, torch.tensor(index, dtype=torch.int64).view(len(names), -1)),
        )

    def expanded(self, scenario: Scenario) -> KeyedJaggedTensor:
        """The same examples as an ordinary batch."""
        bags = {f: [self.bags[f][i] for i in self.inverse[f]] for f in FEATURES}
        return _kjt(scenario, bags, stride=len(self.labels))


def _kjt(scenario: Scenario, bags: dict[str, list[list[tuple[int, float]]]], **fields: Any) -> KeyedJaggedTensor:
    entries = [entry for feature in bags.values() for bag in feature for entry in bag]
    return KeyedJaggedTensor(
        keys=list(bags),
        values=torch.tensor([e[0] for e in entries], dtype=torch.int64),
        lengths=torch.tensor([len(bag) for feature in bags.values() for bag in feature], dtype=torch.int32),
        weights=torch.tensor([e[1] for e in entries], dtype=torch.float32) if scenario.is_weighted else None,
        **fields,
    )


def variable_batch(scenario: Scenario, rng: random.Random, strides: dict[str, list[int]], examples: int) -> Variable:
    """Random bags and examples."""
    most = max(map(sum, strides.values()))
    bags: dict[str, list[list[tuple[int, float]]]] = {}
    for table in scenario.tables:
        ids = universe(scenario, table)
        for feature in table.features:
            n = sum(strides[feature])
            filled = [[(rng.choice(ids), rng.uniform(-1, 1)) for _ in range(rng.randrange(4))] for _ in range(n)]
            bags[feature] = filled + [[]] * (most - n)
    inverse = {f: [rng.randrange(sum(strides[f])) for _ in range(examples)] for f in FEATURES}
    labels = torch.tensor([float(rng.random() < 0.5) for _ in range(examples)])
    return Variable(bags=bags, labels=labels, num_bags=most, strides=strides, inverse=inverse)


def make_variable(scenario: Scenario, step: int, rank: int) -> Variable:
    """Strides that differ between features, steps and ranks; among them the case [[4, 2], [0, 3]]."""
    rng = random.Random(f"{scenario.seed} {step} {rank}")
    kind = (step + rank) % 5
    if kind == 0:  # two columns, as of a batch that was put together from two parts
        strides = {"word": [4, 2], "bought": [0, 3], "user": [1, 0], "clicked": [2, 2]}
    elif kind == 1:  # on one rank all are equal, while the other's differ
        strides = {f: [3] for f in FEATURES}
    else:
        strides = {f: [rng.randrange(1, 7)] for f in FEATURES}
    if kind != 2:
        return variable_batch(scenario, rng, strides, examples=rng.randrange(1, 12))
    strides["bought"] = [0]  # a feature without bags serves no example
    return variable_batch(scenario, rng, strides, examples=0)


class _ExpandByHand(torch.autograd.Function):
    """One example after the other, in numpy."""

    @staticmethod
    def forward(ctx: Any, pooled: Tensor, inverse: list[list[int]], dims: list[int]) -> Tensor:
        ctx.inverse, ctx.dims, ctx.shape = inverse, dims, pooled.shape
        columns = np.cumsum([0, *dims])
        rows = pooled.numpy()
        out = np.zeros((len(inverse[0]), columns[-1]), np.float32)
        for f, index in enumerate(inverse):
            for example, bag in enumerate(index):
                out[example, columns[f] : columns[f + 1]] = rows[bag, columns[f] : columns[f + 1]]
        return torch.from_numpy(out)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        columns = np.cumsum([0, *ctx.dims])
        total = np.zeros(ctx.shape, np.float32)
        for f, index in enumerate(ctx.inverse):
            for example, bag in enumerate(index):
                total[bag, columns[f] : columns[f + 1]] += grad.numpy()[example, columns[f] : columns[f + 1]]
        return torch.from_numpy(total), None, None


class VariableOracle(Oracle):
    """Expands the pools of bags to those of examples, after MEAN."""

    def _mean(self, pooled: Tensor, batch: Batch) -> Tensor:
        assert isinstance(batch, Variable)
        pairs = [(f, t.dim) for t in self.tables for f in t.features]
        by_bag = super()._mean(pooled, batch)
        expanded: Tensor = _ExpandByHand.apply(by_bag, [batch.inverse[f] for f, _ in pairs], [d for _, d in pairs])
        return expanded


def _slots(scenario: Scenario, batches: list[list[Variable]]) -> dict[str, int]:
    return {t.name: device_rows(scenario, t, batches, dist.get_world_size()) for t in scenario.tables}


def train_variable(scenario: Scenario, depth: int | None) -> int:
    """Train this rank against its oracle, bit for bit; returns how many rows came back from the store."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    batches = [[make_variable(scenario, s, r) for r in range(world_size)] for s in range(scenario.steps)]
    kjts = [everyone[rank].kjt(scenario) for everyone in batches]
    ids = {t.name: universe(scenario, t) for t in scenario.tables}
    dmp = train(scenario, batches, kjts, oracle_class=VariableOracle, universe=ids, depth=depth)
    return sum(s.loads for s in dmp.module.ebc.stats())


@pytest.mark.parametrize("depth", [None, 3])
@pytest.mark.parametrize("world_size", [1, 2])
def test_variable_batches_equal_the_oracle(pools: dict[int, RankPool], world_size: int, depth: int | None) -> None:
    """SUM and MEAN, a shared table, evictions; in a plain loop and in a pipeline."""
    scenario = Scenario(steps=20, ids_per_table=60)
    assert all(loads > 0 for loads in pools[world_size].run(train_variable, scenario, depth))


@pytest.mark.parametrize(("world_size", "optimizer"), [(2, "adam"), (3, "rowwise_adagrad")])
def test_weighted_variable_batches_equal_the_oracle(
    pools: dict[int, RankPool], world_size: int, optimizer: str
) -> None:
    scenario = Scenario(is_weighted=True, optimizer=optimizer, steps=STEPS, ids_per_table=60)
    pools[world_size].run(train_variable, scenario, 3)


def test_variable_batches_that_do_not_fit_the_cache_equal_the_oracle(pool_2: RankPool) -> None:
    """Caches of three rows a rank: batches are computed in parts."""
    pool_2.run(train_variable, Scenario(cache="tenth", steps=STEPS, ids_per_table=60), 2)


@pytest.mark.parametrize("depth", [None, 3])
def test_variable_batches_on_a_device_equal_the_oracle(npu_pools: RankPools, depth: int | None) -> None:
    """On the simulated NPU: inverse indices, too, travel on the swap stream and are waited for."""
    npu_pools[2].run(train_variable, Scenario(device="npu", steps=STEPS, ids_per_table=60), depth)


def train_both_ways(scenario: Scenario) -> list[list[float]]:
    """Losses of variable batches and of the same examples as ordinary ones; rows are compared at the end."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    batches = [[make_variable(scenario, s, r) for r in range(world_size)] for s in range(scenario.steps)]
    losses, states = [], []
    for is_expanded in (False, True):
        dmp, optimizer = build(dataclasses.replace(scenario, cache="all"), _slots(scenario, batches) | _ALL)
        losses.append([])
        for everyone in batches:
            batch = everyone[rank]
            features = batch.expanded(scenario) if is_expanded else batch.kjt(scenario)
            optimizer.zero_grad()
            loss = dmp(features, batch.labels)
            loss.backward()
            optimizer.step()
            losses[-1].append(loss.item())
        states.append(state_of(dmp))
    for table, expected in zip(*states, strict=True):
        for id_, record in expected.items():
            np.testing.assert_allclose(table[id_], record, rtol=1e-5, atol=1e-6)
    return losses


_ALL = {"user": 200, "item": 200, "word": 200}


@pytest.mark.parametrize("world_size", [1, 2])
def test_variable_batches_equal_their_expansion(pools: dict[int, RankPool], world_size: int) -> None:
    """Bit for bit as long as no gradient was summed in another order, that is in the first step; then to 1e-6."""
    for variable, expanded in pools[world_size].run(train_both_ways, Scenario(steps=STEPS, ids_per_table=60)):
        assert variable[0] == expanded[0]
        assert variable == pytest.approx(expanded, rel=1e-6, abs=1e-6)


def refusal(is_mine: bool) -> str:
    """One rank's batch lacks inverse indices; afterwards all train on."""
    scenario = Scenario(steps=1, ids_per_table=60)
    world_size = dist.get_world_size()
    batches = [[make_variable(scenario, 3, r) for r in range(world_size)]]
    dmp, _ = build(scenario, _slots(scenario, batches) | _ALL)
    batch = batches[0][dist.get_rank()]
    features = batch.kjt(scenario)
    if is_mine or dist.get_rank() == world_size - 1:
        features = features.permute([0, 1, 2, 3])  # TorchRec's permute loses them
    try:
        dmp(features, batch.labels)
    except ValueError as e:
        dmp(batch.kjt(scenario), batch.labels).backward()
        return f"{type(e).__name__}: {e}"
    return "no error"


@pytest.mark.parametrize("world_size", [1, 2])
def test_variable_batches_without_inverse_indices_are_refused(pools: dict[int, RankPool], world_size: int) -> None:
    texts = pools[world_size].run(refusal, world_size == 1)
    assert len(set(texts)) == 1
    assert texts[0].startswith("IdError") and "has no inverse_indices" in texts[0], texts[0]


# ---- unsharded -------------------------------------------------------------------------------------------------------


def _unsharded(pooling: PoolingType) -> tuple[HashEmbeddingBagCollection, EmbeddingBagCollection]:
    """A hashed collection, and TorchRec's with the same rows."""
    names = {"a": ["x", "y"], "b": ["y", "z"]}
    hashed = HashEmbeddingBagCollection(
        [HashEmbeddingBagConfig(30, 4, n, feature_names=list(f), pooling=pooling) for n, f in names.items()]
    )
    plain = EmbeddingBagCollection(
        [
            EmbeddingBagConfig(num_embeddings=30, embedding_dim=4, name=n, feature_names=list(f), pooling=pooling)
            for n, f in names.items()
        ]
    )
    for name, bag in plain.embedding_bags.items():
        bag.weight.data.copy_(hashed.embedding_bags[name].read(torch.arange(30)))
    apply_optimizer_in_backward(torch.optim.SGD, hashed.parameters(), {"lr": 0.1})
    return hashed, plain


def _features(examples: int = 5) -> KeyedJaggedTensor:
    generator = torch.Generator().manual_seed(2)
    strides = [[2], [4], [1]]
    lengths = torch.tensor([2, 0, 1, 3, 0, 2, 4])
    index = torch.stack([torch.randint(s[0], (examples,), generator=generator) for s in strides])
    return KeyedJaggedTensor(
        keys=["z", "x", "y"],
        values=torch.randint(30, (int(lengths.sum()),), generator=generator),
        lengths=lengths,
        stride_per_key_per_rank=strides,
        inverse_indices=(["z", "x", "y"], index),
    )


@pytest.mark.parametrize("pooling", [PoolingType.SUM, PoolingType.MEAN])
def test_the_unsharded_collection_equals_torchrecs(pooling: PoolingType) -> None:
    hashed, plain = _unsharded(pooling)
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    factor = torch.randn(5, 16, generator=torch.Generator().manual_seed(1))
    for _ in range(3):
        actual, expected = hashed(_features()), plain(_features())
        assert actual.keys() == expected.keys()
        torch.testing.assert_close(actual.values(), expected.values(), rtol=1e-6, atol=1e-7)
        (actual.values() * factor).sum().backward()
        optimizer.zero_grad()
        (expected.values() * factor).sum().backward()
        optimizer.step()
    for name, bag in plain.embedding_bags.items():
        torch.testing.assert_close(hashed.embedding_bags[name].read(torch.arange(30)), bag.weight.data)


def test_inverse_indices_of_features_with_equal_strides_expand_too() -> None:
    """As in TorchRec's unsharded collection; its sharded one leaves them unread."""
    hashed, plain = _unsharded(PoolingType.SUM)
    features = KeyedJaggedTensor(
        keys=["x", "y", "z"],
        values=torch.arange(6),
        lengths=torch.ones(6, dtype=torch.int64),
        inverse_indices=(["x", "y", "z"], torch.tensor([[1, 0, 1], [0, 0, 0], [1, 1, 1]])),
    )
    torch.testing.assert_close(hashed(features).values(), plain(features).values())
    assert hashed(features).values().shape == (3, 16)


def test_a_batch_without_examples_has_an_empty_output() -> None:
    hashed, _ = _unsharded(PoolingType.SUM)
    output = hashed(_features(examples=0)).values()
    assert output.shape == (0, 16)
    output.sum().backward()


# ---- `expand` --------------------------------------------------------------------------------------------------------


def test_the_gradient_of_a_bag_is_summed_in_the_order_of_its_examples() -> None:
    """Of values for which another order gives another sum; so often that a split among threads would show."""
    examples, bags, dims = 4000, 3, [5, 1, 64]
    generator = torch.Generator().manual_seed(4)
    inverse = torch.randint(bags - 1, (len(dims), examples), generator=generator)  # the last bag has no example
    pooled = torch.randn(bags, sum(dims), generator=generator, requires_grad=True)
    grad = torch.randn(examples, sum(dims), generator=generator) * 10 ** torch.randint(
        -3, 4, (examples, 1), generator=generator
    )
    expand(pooled, inverse, dims).backward(grad)
    leaf = pooled.detach().clone().requires_grad_()
    expected = _ExpandByHand.apply(leaf, inverse.tolist(), dims)
    assert torch.equal(expand(pooled, inverse, dims), expected)
    expected.backward(grad)
    assert torch.equal(pooled.grad, leaf.grad)
    assert not pooled.grad[-1].any()
