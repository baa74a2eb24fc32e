"""Jobs of one rank: a model whose hashed collection is not sharded meets TorchRec's `DistributedModelParallel`."""

from __future__ import annotations

import torch
from torch import nn
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig
from torchrec.distributed.model_parallel import DistributedModelParallel, get_default_sharders
from torchrec.distributed.types import ShardingPlan

from hybridrec.config import HashEmbeddingBagConfig
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


def wrap_with_sharders_without_ours(num_embeddings: int, has_dense: bool) -> None:
    """The user forgot our sharders: TorchRec plans what it knows."""
    model = Model(num_embeddings, has_dense)
    DistributedModelParallel(model, device=torch.device("cpu"), sharders=get_default_sharders())


def wrap_with_empty_plan(num_embeddings: int, has_dense: bool) -> None:
    """The user passed a plan that shards nothing."""
    model = Model(num_embeddings, has_dense)
    DistributedModelParallel(model, device=torch.device("cpu"), sharders=[], plan=ShardingPlan({}))
