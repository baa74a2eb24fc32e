"""The unsharded collection against `torchrec.EmbeddingBagCollection`, and what a forward may and may not change."""

from __future__ import annotations

import copy
import io
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
from torchrec.modules.embedding_configs import PoolingType
from torchrec.optim import apply_optimizer_in_backward as torchrec_apply_optimizer_in_backward

from hybridrec.config import HashEmbeddingBagConfig
from hybridrec.errors import CapacityError, ConfigError, StateError
from hybridrec.modules.hash_embedding_bag import HashEmbeddingBagCollection
from hybridrec.native import mix64
from hybridrec.store.initializer import Uniform
from tests.unit.modules.batches import (
    EXTREME_IDS,
    DenseTwin,
    apply_optimizer_in_backward,
    random_batch,
    tables,
    trainable,
)

KEYS = ("w", "unused", "i", "v", "u")  # neither the order of the tables, nor only what they use
OPTIMIZERS: list[tuple[type, dict[str, Any]]] = [
    (torch.optim.SGD, {"lr": 0.1}),
    (torch.optim.SGD, {"lr": 0.1, "weight_decay": 0.0}),
    (torch.optim.Adagrad, {"lr": 0.1}),
    (torch.optim.Adagrad, {"lr": 0.1, "initial_accumulator_value": 0.5, "eps": 1e-3}),
]


def relative_error(actual: Tensor, expected: Tensor) -> float:
    """Largest difference, relative to the largest value."""
    actual, expected = actual.detach(), expected.detach()
    return float((actual - expected).abs().max() / expected.abs().max().clamp(min=1e-30))


def state_of(collection: HashEmbeddingBagCollection) -> dict[str, Any]:
    """Everything that training may change, by table."""
    return {name: bag.get_extra_state() for name, bag in collection.embedding_bags.items()} | {
        "batches": collection.get_extra_state()
    }


def assert_same_state(actual: Any, expected: Any) -> None:
    """Equal bit for bit, whatever is nested how."""
    if isinstance(expected, Tensor):
        assert torch.equal(actual, expected)
    elif isinstance(expected, dict):
        assert actual.keys() == expected.keys()
        for key, value in expected.items():
            assert_same_state(actual[key], value)
    elif isinstance(expected, list):
        assert len(actual) == len(expected)
        for a, e in zip(actual, expected, strict=True):
            assert_same_state(a, e)
    else:
        assert actual == expected


# ---- the same as TorchRec ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_weighted", [False, True])
@pytest.mark.parametrize("batch_size", [1, 5])
def test_forward_equals_torchrec(is_weighted: bool, batch_size: int) -> None:
    collection = trainable(is_weighted=is_weighted)
    dense = DenseTwin(collection, torch.optim.SGD, lr=0.1)
    features = random_batch(KEYS, batch_size, seed=1, is_weighted=is_weighted)
    expected = dense(features)
    for actual in (collection(features), collection.eval()(features)):
        assert actual.keys() == expected.keys() == ["u", "v", "i@item", "i@word", "w"]
        assert actual.length_per_key() == expected.length_per_key()
        assert actual.values().shape == (batch_size, 3 + 3 + 8 + 1 + 1)
        torch.testing.assert_close(actual.values(), expected.values())


@pytest.mark.parametrize(("batch_size", "longest"), [(0, 4), (3, 0)])
def test_batches_without_ids(batch_size: int, longest: int) -> None:
    """Of no bags (`torchrec` fails there), or of empty bags: zeros, and a training step that changes no row."""
    collection = trainable(torch.optim.Adam, lr=0.1)
    pooled = collection(random_batch(KEYS, batch_size, seed=1, longest=longest)).values()
    assert torch.equal(pooled, torch.zeros(batch_size, 16))
    pooled.sum().backward()
    assert collection.num_rows() == {"user": 0, "item": 0, "word": 0}
    assert collection.get_extra_state() == {"num_batches": 1}


@pytest.mark.parametrize("is_weighted", [False, True])
@pytest.mark.parametrize(("optimizer", "kwargs"), OPTIMIZERS)
def test_training_equals_torch_optimizers(optimizer: type, kwargs: dict[str, Any], is_weighted: bool) -> None:
    collection = trainable(optimizer, is_weighted, **kwargs)
    dense = DenseTwin(collection, optimizer, **kwargs)
    for step in range(10):
        features = random_batch(KEYS, 6, seed=step, is_weighted=is_weighted)
        target = torch.randn(6, 16, generator=torch.Generator().manual_seed(step))
        actual = collection(features).values()
        expected = dense(features).values()
        assert relative_error(actual, expected) < 1e-6
        ((actual - target) ** 2).sum().backward()
        dense.optimizer.zero_grad()
        ((expected - target) ** 2).sum().backward()
        dense.optimizer.step()
    for name, bag in dense.module.embedding_bags.items():
        assert relative_error(collection.embedding_bags[name].read(dense.pool), bag.weight) < 1e-6


def test_adam_equals_torchs_sparse_adam() -> None:
    """Rows that a batch lacks are not stepped: that is SparseAdam, where every row's step count is the batch's."""
    collection = trainable(torch.optim.Adam, lr=0.05)
    dense = DenseTwin(collection, torch.optim.SGD, lr=0.1)
    for bag in dense.module.embedding_bags.values():
        bag.sparse = True
    dense.optimizer = torch.optim.SparseAdam(list(dense.module.parameters()), lr=0.05)
    for step in range(10):
        features = random_batch(KEYS, 6, seed=step)
        target = torch.randn(6, 16, generator=torch.Generator().manual_seed(step))
        ((collection(features).values() - target) ** 2).sum().backward()
        dense.optimizer.zero_grad()
        ((dense(features).values() - target) ** 2).sum().backward()
        dense.optimizer.step()
    for name, bag in dense.module.embedding_bags.items():
        assert relative_error(collection.embedding_bags[name].read(dense.pool), bag.weight) < 1e-5


def test_a_table_that_the_loss_leaves_out_steps_with_a_zero_gradient() -> None:
    """One backward is one step of all tables: Adam's moments of the other table decay."""
    collection = trainable(torch.optim.Adam, lr=0.1)
    features = random_batch(KEYS, 4, seed=3)
    collection(features).values().sum().backward()
    before = state_of(collection)
    collection(features)["u"].sum().backward()
    after = state_of(collection)
    torch.testing.assert_close(after["item"]["states"][0], before["item"]["states"][0] * 0.9)
    assert after["batches"] == {"num_batches": 2}


def test_output_order_does_not_follow_the_batch() -> None:
    collection = trainable()
    features = random_batch(KEYS, 4, seed=5)
    turned = features.permute([4, 2, 0, 3, 1])
    assert torch.equal(collection(features).values(), collection(turned).values())


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_id_dtypes_name_the_same_rows(dtype: torch.dtype) -> None:
    collection = trainable()
    ids = torch.tensor([5, -5, 2**31 - 1, -(2**31)])
    lengths = torch.tensor([1, 1, 1, 1])
    expected = collection(KeyedJaggedTensor(["u", "v", "i", "w"], ids, lengths=lengths)).values()
    actual = collection(KeyedJaggedTensor(["u", "v", "i", "w"], ids.to(dtype), lengths=lengths)).values()
    assert torch.equal(actual, expected)


def test_weights_are_ignored_unless_the_collection_is_weighted() -> None:
    collection = trainable()
    features = random_batch(KEYS, 4, seed=5, is_weighted=True)
    plain = KeyedJaggedTensor(features.keys(), features.values(), lengths=features.lengths())
    assert torch.equal(collection(features).values(), collection(plain).values())


def test_every_int64_is_an_id_of_its_own() -> None:
    collection = HashEmbeddingBagCollection([HashEmbeddingBagConfig(1, 4, "t")])
    apply_optimizer_in_backward(torch.optim.SGD, collection.parameters(), {"lr": 1.0})
    ids = torch.tensor(EXTREME_IDS)
    features = KeyedJaggedTensor(["t"], ids, lengths=torch.ones(len(ids), dtype=torch.int64))
    initial = collection(features).values().detach()
    assert len(torch.unique(initial, dim=0)) == len(ids)
    steps = torch.arange(1.0, len(ids) + 1).unsqueeze(1)
    (collection(features).values() * steps).sum().backward()
    torch.testing.assert_close(collection(features).values(), initial - steps)
    assert collection.num_rows() == {"t": len(ids)}


# ---- weights of ids ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["train", "eval", "frozen"])
def test_gradients_of_weights(mode: str) -> None:
    """The output is linear in the weights, so differences over a long step are exact up to float32's rounding."""
    collection = HashEmbeddingBagCollection(tables(initializer=Uniform(-1.0, 1.0)), is_weighted=True)
    apply_optimizer_in_backward(torch.optim.SGD, collection.parameters(), {"lr": 0.0})
    collection.train(mode == "train")
    collection.requires_grad_(mode != "frozen")
    features = random_batch(KEYS, 3, seed=2, is_weighted=True)

    def pooled(weights: Tensor) -> Tensor:
        return collection(
            KeyedJaggedTensor(features.keys(), features.values(), weights=weights, lengths=features.lengths())
        ).values()

    if mode == "train":  # a second backward through one lookup is refused, so no gradcheck
        weights = features.weights().clone().requires_grad_()
        direction = torch.randn(3, 16, generator=torch.Generator().manual_seed(0))
        (pooled(weights) * direction).sum().backward()
        with torch.no_grad():
            fixed = weights.detach()
            differences = [pooled(fixed + step) - pooled(fixed - step) for step in torch.eye(len(weights))]
        expected = torch.stack([(difference * direction).sum() / 2 for difference in differences])
        torch.testing.assert_close(weights.grad, expected, rtol=1e-4, atol=1e-5)
    else:
        weights = features.weights().double().requires_grad_()
        assert torch.autograd.gradcheck(lambda w: pooled(w.float()), (weights,), eps=0.5, atol=1e-4, rtol=1e-4)


# ---- what changes and what does not ------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["eval", "no_grad", "inference_mode", "frozen", "dropped graph"])
def test_reading_changes_nothing(how: str) -> None:
    collection = trainable(torch.optim.Adagrad, lr=0.1)
    collection(random_batch(KEYS, 4, seed=1)).values().sum().backward()
    before = copy.deepcopy(state_of(collection))
    twin = copy.deepcopy(collection)
    features = random_batch(KEYS, 8, seed=2)
    if how == "eval":
        collection.eval()(features)
        collection.train()
    elif how == "no_grad":
        with torch.no_grad():
            collection(features)
    elif how == "inference_mode":
        with torch.inference_mode():
            collection(features)
    elif how == "frozen":
        collection.requires_grad_(False)
        assert not collection(features).values().requires_grad
        collection.requires_grad_(True)
    else:
        del features
        collection(random_batch(KEYS, 8, seed=2))
    assert_same_state(state_of(collection), before)
    features = random_batch(KEYS, 4, seed=3)
    for module in (collection, twin):
        module(features).values().sum().backward()
    assert_same_state(state_of(collection), state_of(twin))


def test_eval_reads_trained_and_initial_rows() -> None:
    collection = trainable(lr=1.0)
    one = KeyedJaggedTensor(["u", "v", "i", "w"], torch.tensor([7]), lengths=torch.tensor([1, 0, 0, 0]))
    two = KeyedJaggedTensor(["u", "v", "i", "w"], torch.tensor([7, 8]), lengths=torch.tensor([1, 1, 0, 0]))
    untrained = collection.eval()(two)
    collection.train()(one)["u"].sum().backward()
    read = collection.eval()(two)
    torch.testing.assert_close(read["u"], untrained["u"] - 1.0)
    assert torch.equal(read["v"], untrained["v"])
    assert not read.values().requires_grad


def test_frozen_tables_stay_while_others_train() -> None:
    collection = trainable()
    collection.embedding_bags["item"].requires_grad_(False)
    collection(random_batch(KEYS, 4, seed=1)).values().sum().backward()
    assert collection.num_rows()["item"] == 0
    assert collection.num_rows()["word"] > 0


def test_initial_rows_depend_on_seed_and_table_alone() -> None:
    features = random_batch(("u", "v", "i", "w"), 4, seed=1)
    first = HashEmbeddingBagCollection(tables())(features).values()
    again = HashEmbeddingBagCollection(list(reversed(tables())))(features)
    assert torch.equal(first[:, :3], again["u"])
    assert not torch.equal(first[:, :3], HashEmbeddingBagCollection(tables(seed=1))(features)["u"])


def test_the_learning_rate_of_the_attached_optimizer_is_in_force() -> None:
    collection = trainable(lr=1.0)
    features = KeyedJaggedTensor(["u", "v", "i", "w"], torch.tensor([7]), lengths=torch.tensor([1, 0, 0, 0]))
    before = collection(features)["u"].detach()
    collection.embedding_bags["user"].weight._in_backward_optimizers[0].param_groups[0]["lr"] = 0.25
    collection(features)["u"].sum().backward()
    torch.testing.assert_close(collection(features)["u"], before - 0.25)


def test_the_users_default_device_and_dtype_change_nothing() -> None:
    """Every tensor that is made inside says where and what it is: under the meta device a forgotten one would show."""
    features = random_batch(KEYS, 4, seed=1)
    expected = trainable(torch.optim.Adagrad, lr=0.1)
    expected(features).values().sum().backward()
    torch.set_default_dtype(torch.float64)
    try:
        with torch.device("meta"):
            actual = trainable(torch.optim.Adagrad, lr=0.1)
            actual(features).values().sum().backward()
            states = state_of(actual)
    finally:
        torch.set_default_dtype(torch.float32)
    assert_same_state(states, state_of(expected))


# ---- refusals ----------------------------------------------------------------------------------------------------


def test_backward_without_an_optimizer_says_what_to_call() -> None:
    collection = HashEmbeddingBagCollection(tables())
    pooled = collection(random_batch(KEYS, 4, seed=1)).values()
    with pytest.raises(ConfigError, match=r"table 'user' has no optimizer.*apply_optimizer_in_backward\(torch\.optim"):
        pooled.sum().backward()
    assert collection.num_rows() == {"user": 0, "item": 0, "word": 0}


def test_an_optimizer_on_some_tables_only_trains_none() -> None:
    collection = HashEmbeddingBagCollection(tables())
    apply_optimizer_in_backward(torch.optim.SGD, [collection.embedding_bags["user"].weight], {"lr": 0.1})
    with pytest.raises(ConfigError, match=r"table 'item' has no optimizer"):
        collection(random_batch(KEYS, 4, seed=1)).values().sum().backward()
    assert collection.num_rows() == {"user": 0, "item": 0, "word": 0}


def test_two_optimizers_are_refused() -> None:
    collection = trainable()
    apply_optimizer_in_backward(torch.optim.Adagrad, collection.parameters(), {"lr": 0.1})
    with pytest.raises(ConfigError, match=r"table 'user' has 2 optimizers \(SGD, Adagrad\)"):
        collection(random_batch(KEYS, 4, seed=1)).values().sum().backward()


def test_a_second_backward_through_one_forward_is_refused() -> None:
    collection = trainable()
    loss = collection(random_batch(KEYS, 4, seed=1)).values().sum()
    loss.backward(retain_graph=True)
    before = copy.deepcopy(state_of(collection))
    with pytest.raises(StateError, match=r"second backward through one forward"):
        loss.backward()
    assert_same_state(state_of(collection), before)


@pytest.mark.parametrize("device", ["gpu", 3, "cpu:x"])
def test_unknown_devices_are_refused(device: Any) -> None:
    with pytest.raises(ConfigError, match=r"device="):
        HashEmbeddingBagCollection(tables(), device=device)


# ---- quotas ------------------------------------------------------------------------------------------------------


def limited(full_policy: str) -> HashEmbeddingBagCollection:
    """One table of at most three rows."""
    collection = HashEmbeddingBagCollection(
        [HashEmbeddingBagConfig(9, 2, "t", max_rows=3, full_policy=full_policy, seed=4)]
    )
    apply_optimizer_in_backward(torch.optim.Adagrad, collection.parameters(), {"lr": 0.5})
    return collection


def batch_of(*ids: int) -> KeyedJaggedTensor:
    """One bag for each id."""
    return KeyedJaggedTensor(
        ["t"], torch.tensor(ids, dtype=torch.int64), lengths=torch.ones(len(ids), dtype=torch.int64)
    )


def test_error_refuses_the_batch_that_does_not_fit() -> None:
    collection = limited("error")
    collection(batch_of(1, 2, 2)).values().sum().backward()
    before = copy.deepcopy(state_of(collection))
    with pytest.raises(CapacityError, match=r"table 't': the batch needs 4 rows but max_rows=3\. Raise max_rows"):
        collection(batch_of(1, 3, 4))
    assert_same_state(state_of(collection), before)
    collection.eval()(batch_of(1, 3, 4))
    collection.train()(batch_of(1, 3)).values().sum().backward()
    assert collection.num_rows() == {"t": 3}


def test_two_forwards_that_do_not_fit_together_refuse_the_second_backward() -> None:
    collection = limited("error")
    first, second = collection(batch_of(1, 2)).values().sum(), collection(batch_of(3, 4)).values().sum()
    first.backward()
    with pytest.raises(CapacityError, match=r"needs 4 rows"):
        second.backward()
    assert collection.num_rows() == {"t": 2}


def test_evict_drops_the_row_that_was_unused_longest_after_twelve_batches() -> None:
    collection = limited("evict")
    initial = collection(batch_of(1)).values().detach()
    for ids in ((1,), (2,), (3,)):
        collection(batch_of(*ids)).values().sum().backward()
    for _ in range(10):
        collection(batch_of(3)).values().sum().backward()
    assert not torch.equal(collection(batch_of(1)).values(), initial)
    with pytest.raises(CapacityError, match=r"needs 5 rows but max_rows=3 and only 1 may be evicted"):
        collection(batch_of(4, 5))
    collection(batch_of(4)).values().sum().backward()  # batch 14: of 1, 2, 3, batch 1 alone is 13 back
    ids = set(collection.embedding_bags["t"].get_extra_state()["ids"].tolist())
    assert ids == {2, 3, 4}
    assert torch.equal(collection.eval()(batch_of(1)).values(), initial)


def test_victims_of_equal_age_go_in_order_of_their_unsigned_keys_and_never_from_the_batch() -> None:
    keys = {i: int(mix64(torch.tensor([i]))) for i in range(1, 50)}
    positive = sorted((i for i, key in keys.items() if key > 0), key=keys.__getitem__)
    negative = next(i for i, key in keys.items() if key < 0)
    lowest, low, high = positive[:3]
    collection = HashEmbeddingBagCollection(
        [HashEmbeddingBagConfig(9, 2, "t", max_rows=4, full_policy="evict", planned_rows=4)]
    )
    apply_optimizer_in_backward(torch.optim.SGD, collection.parameters(), {"lr": 0.5})
    collection(batch_of(high, lowest, negative, low)).values().sum().backward()
    for _ in range(12):
        collection(batch_of()).values().sum().backward()
    collection(batch_of(lowest, 99)).values().sum().backward()  # the lowest key is in the batch itself: it stays
    ids = set(collection.embedding_bags["t"].get_extra_state()["ids"].tolist())
    assert ids == {lowest, 99, high, negative}
    collection(batch_of(low)).values().sum().backward()  # back, as a new row; the next victim is of the living ones
    assert set(collection.embedding_bags["t"].get_extra_state()["ids"].tolist()) == {lowest, 99, low, negative}
    collection(batch_of(100)).values().sum().backward()
    assert set(collection.embedding_bags["t"].get_extra_state()["ids"].tolist()) == {lowest, 99, low, 100}


# ---- the module as others see it ---------------------------------------------------------------------------------


def test_repr_is_torchrecs_with_our_names() -> None:
    hashed = HashEmbeddingBagCollection(tables())
    assert repr(hashed) == (
        "HashEmbeddingBagCollection(\n"
        "  (embedding_bags): ModuleDict(\n"
        "    (user): HashEmbeddingBag(1000000000000, 3, mode='sum')\n"
        "    (item): HashEmbeddingBag(50, 8, mode='mean')\n"
        "    (word): HashEmbeddingBag(7, 1, mode='sum')\n"
        "  )\n"
        ")"
    )
    small = [EmbeddingBagConfig(50, 8, "item", feature_names=["i"], pooling=PoolingType.MEAN)]
    dense = repr(EmbeddingBagCollection(small))
    assert repr(HashEmbeddingBagCollection(small)).replace("HashEmbeddingBag", "EmbeddingBag") == dense


def test_devices_and_configs() -> None:
    configs = tables()
    for device in (None, "meta", torch.device("meta"), "cpu", torch.device("cpu")):
        collection = HashEmbeddingBagCollection(configs, device=device)
        assert collection.device == torch.device("meta")
        assert collection.target_device == torch.device("cpu")
    assert [c.name for c in collection.embedding_bag_configs()] == ["user", "item", "word"]
    assert collection.embedding_bag_configs()[0] is not configs[0]
    assert not collection.is_weighted()
    assert HashEmbeddingBagCollection(configs, is_weighted=True).is_weighted()


def test_parameters_have_torchrecs_names_and_nominal_shapes() -> None:
    parameters = dict(HashEmbeddingBagCollection(tables()).named_parameters())
    assert {name: tuple(p.shape) for name, p in parameters.items()} == {
        "embedding_bags.user.weight": (10**12, 3),
        "embedding_bags.item.weight": (50, 8),
        "embedding_bags.word.weight": (7, 1),
    }


@pytest.mark.parametrize("clone", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))], ids=["deepcopy", "pickle"])
def test_copies_train_alike_and_apart(clone: Any) -> None:
    collection = trainable(torch.optim.Adagrad, lr=0.1)
    collection(random_batch(KEYS, 4, seed=1)).values().sum().backward()
    other = clone(collection)
    before = copy.deepcopy(state_of(collection))
    features = random_batch(KEYS, 8, seed=2)
    other(features).values().sum().backward()
    assert_same_state(state_of(collection), before)
    collection(features).values().sum().backward()
    assert_same_state(state_of(other), state_of(collection))


def test_state_dict_carries_rows_and_states() -> None:
    collection = trainable(torch.optim.Adam, lr=0.1)
    collection(random_batch(KEYS, 4, seed=1)).values().sum().backward()
    file = io.BytesIO()
    torch.save(collection.state_dict(), file)
    assert file.tell() < 50_000
    file.seek(0)
    other = trainable(torch.optim.Adam, lr=0.1)
    other.load_state_dict(torch.load(file, weights_only=True))
    features = random_batch(KEYS, 8, seed=2)
    for module in (collection, other):
        module(features).values().sum().backward()
    assert_same_state(state_of(other), state_of(collection))


def test_rows_without_states_start_adagrad_at_its_initial_value() -> None:
    trained = trainable(torch.optim.SGD, lr=0.1)
    features = random_batch(KEYS, 4, seed=1)
    trained(features).values().sum().backward()
    other = trainable(torch.optim.Adagrad, lr=0.1, initial_accumulator_value=0.25)
    other.load_state_dict(trained.state_dict())
    one = KeyedJaggedTensor(["u", "v", "i", "w"], torch.tensor([10**9]), lengths=torch.tensor([1, 0, 0, 0]))
    other(one).values().sum().backward()
    states = other.embedding_bags["user"].get_extra_state()["states"][0]
    assert sorted(states.unique().tolist()) == [0.25, 1.25]


def test_states_of_another_optimizer_are_refused() -> None:
    other = trainable(torch.optim.Adam, lr=0.1)
    trained = trainable(torch.optim.Adagrad, lr=0.1)
    features = random_batch(KEYS, 4, seed=1)
    trained(features).values().sum().backward()
    other.load_state_dict(trained.state_dict())
    with pytest.raises(
        ConfigError, match=r"table 'user': .* another optimizer than Adam, which needs 2 states a row; .* 1"
    ):
        other(features).values().sum().backward()


def test_a_state_dict_of_another_dim_is_refused() -> None:
    state = trainable().state_dict()
    other = HashEmbeddingBagCollection([HashEmbeddingBagConfig(10**12, 3, "user")])
    rows = {"ids": torch.tensor([1]), "scores": torch.tensor([1]), "rows": torch.zeros(1, 4), "states": []}
    state = {k: v for k, v in state.items() if ".user." in k or k == "_extra_state"}
    with pytest.raises(ConfigError, match=r"table 'user': rows in the state_dict have shape \[1, 4\] for 1 ids"):
        other.load_state_dict({**state, "embedding_bags.user._extra_state": rows})


def test_torchrecs_own_apply_optimizer_in_backward_works() -> None:
    collection = HashEmbeddingBagCollection(tables())
    with pytest.warns(DeprecationWarning, match="deprecated"):
        torchrec_apply_optimizer_in_backward(torch.optim.SGD, collection.parameters(), {"lr": 0.1})
    collection(random_batch(KEYS, 4, seed=1)).values().sum().backward()
    assert collection.num_rows()["user"] > 0
