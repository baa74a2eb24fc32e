"""An unsharded collection refuses scaled losses, too, and those of scalers with a method of their own."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torchrec import KeyedJaggedTensor

from hybridrec import HashEmbeddingBagCollection, HashEmbeddingBagConfig
from hybridrec._compat.grad_scaler import refuse_scaled_losses
from hybridrec.errors import ConfigError
from tests.unit.modules.batches import apply_optimizer_in_backward


class OwnScaler(torch.amp.GradScaler):
    """As devices' libraries have them."""

    def scale(self, outputs: Any) -> Any:
        return outputs * 3


@pytest.mark.parametrize("scaler_class", [torch.amp.GradScaler, OwnScaler])
def test_a_scaled_loss_is_refused_and_no_row_made(scaler_class: type[torch.amp.GradScaler]) -> None:
    collection = HashEmbeddingBagCollection(
        [HashEmbeddingBagConfig(name="t", num_embeddings=10, embedding_dim=4, feature_names=["f"])]
    )
    apply_optimizer_in_backward(torch.optim.SGD, collection.parameters(), {"lr": 0.1})
    ids = KeyedJaggedTensor(keys=["f"], values=torch.tensor([5, 6]), lengths=torch.tensor([1, 1]))
    loss = collection(ids).values().sum()
    for _ in range(2):
        refuse_scaled_losses()  # wrapped once, however often it is asked
        with pytest.raises(ConfigError, match=rf"{scaler_class.__name__}\.scale\(loss\): the loss depends on hashed"):
            scaler_class("cpu").scale(loss)
    assert collection.num_rows() == {"t": 0}
    loss.backward()
    assert collection.num_rows() == {"t": 2}
