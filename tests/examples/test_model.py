"""The little DLRM over TorchRec's own collection."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from examples.little_demo.batch import Batch
from examples.little_demo.model import EMBEDDING_DIM, LittleDLRM
from examples.little_demo.movielens import FEATURES

CPU = torch.device("cpu")


def small_model(num_dense: int = 0) -> LittleDLRM:
    torch.manual_seed(0)
    tables = [
        EmbeddingBagConfig(name=name, num_embeddings=5, embedding_dim=EMBEDDING_DIM, feature_names=[name])
        for name in FEATURES
    ]
    ebc = EmbeddingBagCollection(tables=tables, device=CPU)
    return LittleDLRM(ebc, num_features=len(FEATURES), num_dense=num_dense, device=CPU)


def small_batch(num_dense: int = 0) -> Batch:
    ids = KeyedJaggedTensor(
        keys=list(FEATURES),
        values=torch.tensor([0, 1, 2, 3, 4, 0, 1, 2]),
        lengths=torch.tensor([1, 1, 1, 1, 1, 1, 2, 0, 0]),
    )
    dense = torch.arange(3.0 * num_dense).view(3, num_dense) / 10
    return Batch(dense, ids, torch.tensor([1.0, 0.0, 1.0]))


def test_forward_returns_mean_loss_and_one_logit_a_rating() -> None:
    loss, (reported, logits, labels) = small_model()(small_batch())
    assert loss.shape == ()
    assert logits.shape == (3,)
    assert reported == loss
    assert not reported.requires_grad and not logits.requires_grad
    assert labels.tolist() == small_batch().labels.tolist()
    expected: Tensor = -(labels * logits.sigmoid().log() + (1 - labels) * (1 - logits.sigmoid()).log()).mean()
    torch.testing.assert_close(loss, expected)


def test_over_arch_sees_embeddings_and_each_pair_once() -> None:
    model = small_model()
    seen: list[Tensor] = []
    model.over.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    model(small_batch())
    pooled = model.ebc(small_batch().ids)
    user, movie, genre = (pooled[name] for name in FEATURES)
    pairs = torch.stack([(user * movie).sum(1), (user * genre).sum(1), (movie * genre).sum(1)], 1)
    torch.testing.assert_close(seen[0], torch.cat([user, movie, genre, pairs], 1))


def test_dense_features_become_one_more_embedding() -> None:
    model = small_model(num_dense=2)
    seen: list[Tensor] = []
    model.over.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    batch = small_batch(num_dense=2)
    model(batch)
    assert model.bottom is not None
    embeddings = [model.bottom(batch.dense), *(model.ebc(batch.ids)[name] for name in FEATURES)]
    pairs = [(embeddings[a] * embeddings[b]).sum(1) for a in range(4) for b in range(a + 1, 4)]
    torch.testing.assert_close(seen[0], torch.cat([*embeddings, torch.stack(pairs, 1)], 1))


@pytest.mark.parametrize("num_dense", [0, 2])
def test_every_parameter_learns(num_dense: int) -> None:
    model = small_model(num_dense)
    loss, _ = model(small_batch(num_dense))
    loss.backward()
    without = [name for name, p in model.named_parameters() if p.grad is None or not p.grad.any()]
    assert without == []


def test_ids_stay_in_host_memory_when_a_batch_moves() -> None:
    moved = small_batch(num_dense=2).to(torch.device("meta"))
    assert moved.dense.device.type == "meta"
    assert moved.labels.device.type == "meta"
    assert moved.ids.values().device == CPU
