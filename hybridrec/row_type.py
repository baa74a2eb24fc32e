"""`RowType`: what a row's weights are, and how they lie in 32-bit words."""

from __future__ import annotations

import enum

import torch
from torch import Tensor


class RowType(enum.IntEnum):
    """The type of a row's weights; optimizer state is float32 whatever it is.

    Slots, store and whatever moves rows hold weights as float32 *words* that nobody computes with: the weights' bytes,
    padded with zeros to whole words. Of float32 weights the words are the weights.
    """

    FLOAT32 = 0
    BFLOAT16 = 1
    FLOAT16 = 2

    @classmethod
    def of(cls, dtype: torch.dtype) -> RowType:
        """The member of a dtype. KeyError: there is none."""
        return cls[str(dtype).removeprefix("torch.").upper()]

    @property
    def dtype(self) -> torch.dtype:
        """Torch's name for it."""
        dtype: torch.dtype = getattr(torch, self.name.lower())
        return dtype

    def num_words(self, dim: int) -> int:
        """Words of the weights of a row of ``dim`` columns."""
        return -(-dim * self.dtype.itemsize // 4)

    def values(self, words_NW: Tensor, dim: int) -> Tensor:
        """A view of words: weights [N, dim] of this type. The words of a row are next to each other."""
        if self is RowType.FLOAT32:
            return words_NW
        return words_NW.view(self.dtype)[:, :dim]

    def words(self, values_ND: Tensor) -> Tensor:
        """float32 [N, words] of weights [N, D], which are rounded to this type, to the nearest and ties to even."""
        if self is RowType.FLOAT32:
            return values_ND.to(torch.float32)
        n, dim = values_ND.shape
        words = torch.zeros((n, self.num_words(dim)), dtype=torch.float32, device=values_ND.device)
        self.values(words, dim).copy_(values_ND)
        return words
