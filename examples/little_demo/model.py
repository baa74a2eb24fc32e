"""A small DLRM: embeddings, their pairwise products, an MLP over both."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torchrec.modules.embedding_modules import EmbeddingBagCollectionInterface

from examples.little_demo.dataset import Batch

EMBEDDING_DIM = 16


class LittleDLRM(nn.Module):
    """Will this user like this movie?

    After Naumov et al. 2019, "Deep Learning Recommendation Model for Personalization and Recommendation Systems",
    without the bottom MLP: this data set has no dense features.
    """

    pairs: Tensor
    """int64 [2, F * (F - 1) / 2]: row and column numbers of the pairs of different features."""

    def __init__(self, ebc: EmbeddingBagCollectionInterface, *, num_features: int, device: torch.device) -> None:
        """Build the over-arch for the embeddings that the collection will pool.

        Args:
            ebc: One output of `EMBEDDING_DIM` columns a feature.
            num_features: F.
            device: Of the MLP.
        """
        super().__init__()
        self.ebc = ebc
        pairs = torch.triu_indices(num_features, num_features, offset=1, device=device)
        self.register_buffer("pairs", pairs, persistent=False)
        num_inputs = num_features * EMBEDDING_DIM + pairs.shape[1]
        self.over = nn.Sequential(
            nn.Linear(num_inputs, 64, device=device),
            nn.ReLU(),
            nn.Linear(64, 32, device=device),
            nn.ReLU(),
            nn.Linear(32, 1, device=device),
        )
        self.loss = nn.BCEWithLogitsLoss()

    def forward(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Score one batch.

        Returns:
            The mean loss, float32 [], and the logits of "liked", float32 [B].
        """
        pooled = self.ebc(batch.ids).values()  # [B, F * D]
        embeddings = pooled.view(len(pooled), -1, EMBEDDING_DIM)  # [B, F, D]
        products = embeddings @ embeddings.transpose(1, 2)  # [B, F, F]
        interactions = products[:, self.pairs[0], self.pairs[1]]
        logits = self.over(torch.cat([pooled, interactions], 1)).squeeze(1)
        return self.loss(logits, batch.labels), logits
