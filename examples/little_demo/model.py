"""A small DLRM: embeddings, their pairwise products, an MLP over both."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torchrec.modules.embedding_modules import EmbeddingBagCollectionInterface

from examples.little_demo.batch import Batch

EMBEDDING_DIM = 16


class LittleDLRM(nn.Module):
    """Will this user like this movie, will this advertisement be clicked?

    After Naumov et al. 2019, "Deep Learning Recommendation Model for Personalization and Recommendation Systems".
    Where there are dense features, the bottom MLP makes one more embedding of them.
    """

    pairs: Tensor
    """int64 [2, E * (E - 1) / 2]: row and column numbers of the pairs of different embeddings."""

    def __init__(
        self, ebc: EmbeddingBagCollectionInterface, *, num_features: int, num_dense: int = 0, device: torch.device
    ) -> None:
        """Build the MLPs around the embeddings that the collection will pool.

        Args:
            ebc: One output of `EMBEDDING_DIM` columns a feature.
            num_features: F.
            num_dense: Dense features; may be 0.
            device: Of the MLPs.
        """
        super().__init__()
        self.ebc = ebc
        self.bottom = _mlp([num_dense, 32, EMBEDDING_DIM], device) if num_dense else None
        num_embeddings = num_features + (num_dense > 0)  # E
        pairs = torch.triu_indices(num_embeddings, num_embeddings, offset=1, device=device)
        self.register_buffer("pairs", pairs, persistent=False)
        self.over = _mlp([num_embeddings * EMBEDDING_DIM + pairs.shape[1], 64, 32, 1], device)
        self.loss = nn.BCEWithLogitsLoss()

    def forward(self, batch: Batch) -> tuple[Tensor, tuple[Tensor, Tensor, Tensor]]:
        """Score one batch.

        Returns:
            The mean loss to differentiate, float32 []; and what is reported: that loss, the logits of the label 1 and
            the labels, both float32 [B], all detached.
        """
        embeddings = self.ebc(batch.ids).values()  # [B, F * D]
        if self.bottom is not None:
            embeddings = torch.cat([self.bottom(batch.dense), embeddings], 1)  # [B, E * D]
        by_embedding = embeddings.unflatten(1, (-1, EMBEDDING_DIM))  # [B, E, D]
        products = by_embedding @ by_embedding.transpose(1, 2)  # [B, E, E]
        interactions = products[:, self.pairs[0], self.pairs[1]]
        logits = self.over(torch.cat([embeddings, interactions], 1)).squeeze(1)
        loss = self.loss(logits, batch.labels)
        return loss, (loss.detach(), logits.detach(), batch.labels.detach())


def _mlp(sizes: list[int], device: torch.device) -> nn.Sequential:
    """Linear layers with a ReLU between each two."""
    layers: list[nn.Module] = []
    for inputs, outputs in zip(sizes, sizes[1:], strict=False):
        layers += [nn.Linear(inputs, outputs, device=device), nn.ReLU()]
    return nn.Sequential(*layers[:-1])
