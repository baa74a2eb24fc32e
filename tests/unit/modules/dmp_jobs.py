"""Jobs of one rank: a model whose hashed collection is not sharded meets TorchRec's `DistributedModelParallel`."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig
from torchrec.distributed.model_parallel import DistributedModelParallel, get_default_sharders
from torchrec.distributed.types import ShardingPlan

from hybridrec.config import HashEmbeddingBagConfig
from hybridrec.errors import ConfigError
from hybridrec.modules.hash_embedding_bag import HashEmbeddingBagCollection


class Model(nn.Module):
    """A hashed collection, a linear layer, and optionally a dense collection."""

    def __init__(self, num_embeddings: int, has_dense: bool) -> None:
        """Only the construction matters here: there is no forward."""
        super().__init__()
        self.hashed = HashEmbeddingBagCollection([HashEmbeddingBagConfig(num_embeddings, 4, "user")])
        self.linear = nn.Linear(4, 1)
        if has_dense:
            config = EmbeddingBagConfig(10, 4, "item")
            self.dense = EmbeddingBagCollection([config], device=torch.device("meta"))


def refusal(num_embeddings: int, has_dense: bool, how: str) -> str:
    """Wrap a model and return what `ConfigError` said; the rank and its process group stay usable.

    Args:
        num_embeddings: Nominal rows of the hashed table.
        has_dense: Whether the model has something that TorchRec can shard.
        how: ``"sharders without ours"``: the user forgot them, TorchRec plans what it knows. ``"empty plan"``: the user
            passed a plan that shards nothing.
    """
    model = Model(num_embeddings, has_dense)
    device = torch.device("cpu")
    with pytest.raises(ConfigError) as error:
        if how == "empty plan":
            DistributedModelParallel(model, device=device, sharders=[], plan=ShardingPlan({}))
        else:
            DistributedModelParallel(model, device=device, sharders=get_default_sharders())
    return str(error.value)
