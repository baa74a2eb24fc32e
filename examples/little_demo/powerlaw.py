"""Made-up clicks whose best possible AUC is known: a power law over raw ids, and a planted logit for each id.

Everything is a function of the seed and a position, computed when it is needed; any number of rows takes no memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from examples.little_demo.batch import Batch, DataSet, Share, TableFacts
from examples.little_demo.hashing import mix

BASE_LOGIT = -1.0
"""Of a row whose ids all have the planted logit 0: 27 % clicks."""
LOGIT_SIZE = 0.75
"""Standard deviation of one id's planted logit."""
TRAIN, TEST, SAMPLE = 0, 1, 2
"""Parts of the data; each is drawn from random numbers of its own."""
SAMPLE_ROWS = 50_000


@dataclass(frozen=True, kw_only=True)
class PowerLawSizes:
    """How much data, and how skewed."""

    rows: int = 200_000
    """Rows to train on; a quarter as many are held out. Both are rounded up to whole batches."""
    ids: int = 20_000
    """Different ids of a feature."""
    features: int = 4
    exponent: float = 1.05
    """The k-th most frequent id of a feature is drawn in proportion to k^-exponent. 0: all alike."""


class PowerLaw(DataSet):
    """Every row has one id a feature, and is clicked with probability sigmoid(base + sum of its ids' planted logits).

    Nobody can rank rows better than by that sum, so that its AUC on the rows held out is the best a model can hope for
    there, up to chance.
    """

    name = "powerlaw"
    unit = "rows"

    def __init__(self, sizes: PowerLawSizes, *, seed: int) -> None:
        """Compute nothing yet."""
        self.sizes = sizes
        self.features = tuple(f"f{number}" for number in range(1, sizes.features + 1))
        self._seed = seed % 2**64
        """Random numbers are seeded by whole numbers from 0 on; a user's seed may be negative."""

    def tables(self) -> list[TableFacts]:
        ids = self._draw(SAMPLE, 0, SAMPLE_ROWS)[0]
        return [
            TableFacts(
                feature=feature,
                ids=torch.from_numpy(column),
                is_sample=True,
                planned_rows=self.sizes.ids,
            )
            for feature, column in zip(self.features, ids, strict=True)
        ]

    def describe(self) -> str:
        return (
            f"power law, {self.sizes.rows:,} rows to learn, {self.sizes.features} features of {self.sizes.ids:,} ids, "
            f"exponent {self.sizes.exponent}"
        )

    def num_batches(self, batch_size: int) -> int | None:
        return -(-self.sizes.rows // batch_size)

    def train_batches(self, share: Share, epoch: int) -> Iterator[Batch]:
        return self._batches(TRAIN, self.sizes.rows, share)

    def test_batches(self, share: Share) -> Iterator[Batch]:
        return self._batches(TEST, -(-self.sizes.rows // 4), share)

    def planted_logits(self, batch: Batch) -> Tensor:
        """The logits that the labels were drawn with, float64 [B]: no model ranks better."""
        ids_FB = batch.ids.values().view(len(self.features), -1).numpy()
        return torch.from_numpy(self._logits(ids_FB))

    def _batches(self, part: int, num_rows: int, share: Share) -> Iterator[Batch]:
        for number in range(-(-num_rows // share.batch_size))[share.first :: share.step]:
            # The whole batch is drawn, so that its rows do not depend on how many ranks share it.
            ids_FB, labels_B = self._draw(part, number, share.batch_size)
            mine = slice(share.rank, None, share.world_size)
            labels, values = torch.from_numpy(labels_B[mine].copy()), torch.from_numpy(ids_FB[:, mine].copy())
            lengths = torch.ones(values.numel(), dtype=torch.int64)
            ids = KeyedJaggedTensor(keys=list(self.features), values=values.view(-1), lengths=lengths)
            yield Batch(torch.empty(len(labels), 0), ids, labels)

    def _draw(self, part: int, number: int, num_rows: int) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        """One batch: int64 [F, B] ids and float32 [B] labels."""
        random = np.random.default_rng([self._seed, part, number])
        ranks_FB = self._popularity(random.random((len(self.features), num_rows)))
        columns_F1 = np.arange(1, len(self.features) + 1, dtype=np.uint64)[:, None] << np.uint64(48)
        seed = mix(np.array([self._seed], np.uint64))
        ids_FB = mix((columns_F1 | ranks_FB) ^ seed).view(np.int64)
        clicked_B = random.random(num_rows) < 1.0 / (1.0 + np.exp(-self._logits(ids_FB)))
        return ids_FB, clicked_B.astype(np.float32)

    def _popularity(self, uniform: NDArray[np.float64]) -> NDArray[np.uint64]:
        """Ranks 0 .. ids - 1, 0 the most popular, from uniform numbers in [0, 1).

        The inverse of the distribution function of the density x^-exponent on [1, ids + 1), rounded down.
        """
        top, power = float(self.sizes.ids + 1), 1.0 - self.sizes.exponent
        x = top**uniform if abs(power) < 1e-9 else (1.0 + uniform * (top**power - 1.0)) ** (1.0 / power)
        return np.clip(x.astype(np.int64) - 1, 0, self.sizes.ids - 1).astype(np.uint64)

    def _logits(self, ids_FB: NDArray[np.int64]) -> NDArray[np.float64]:
        """Planted logits of rows, float64 [B]: a function of the ids alone."""
        # Four uniform 16-bit numbers of the hash of the id, added up: nearly normal, mean 2, variance 4 / 12.
        bits = mix(ids_FB.view(np.uint64))
        fields = [((bits >> np.uint64(16 * k)) & np.uint64(0xFFFF)).astype(np.float64) / 65_536 for k in range(4)]
        planted_FB = (sum(fields) - 2.0) * np.sqrt(3.0) * LOGIT_SIZE
        return np.asarray(BASE_LOGIT + planted_FB.sum(axis=0), np.float64)
