"""Tables whose parameter has ``requires_grad=False``: their rows are read, as in eval mode, and nothing else happens.

A training batch is split before MAP. Ids of frozen tables leave it: their bags are empty there, so that nothing is
inserted, pinned, scored or stepped. A second batch, of their ids alone, is read; its output takes the frozen features'
places in the first one's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from hybridrec.distributed.shard_table import ShardTable
from hybridrec.errors import ConfigError


def frozen_of(parameters: Sequence[nn.Parameter], tables: Sequence[ShardTable]) -> tuple[bool, ...]:
    """[T]: which tables do not train: ``requires_grad`` of their parameter is False now.

    Raises:
        ConfigError: A table that was sharded without an optimizer, because it was frozen, is to train.
    """
    frozen = tuple(not parameter.requires_grad for parameter in parameters)
    for table, is_frozen in zip(tables, frozen, strict=True):
        if not is_frozen and table.optimizer.kind == "none":
            raise ConfigError(
                f"table {table.name!r}: requires_grad was set to True, but it was sharded without an optimizer. "
                "Call apply_optimizer_in_backward for it before sharding, or set requires_grad to False."
            )
    return frozen


def split_frozen(keys: KeyedJaggedTensor, is_frozen_F: Tensor) -> tuple[KeyedJaggedTensor, KeyedJaggedTensor]:
    """
    Args:
        keys: F features, host memory.
        is_frozen_F: bool [F].

    Returns:
        The batch without ids of frozen features, and that of these alone; both with all features and bags.
    """
    lengths_FB = keys.lengths().view(is_frozen_F.shape[0], keys.stride())
    is_frozen_N = is_frozen_F.repeat_interleave(lengths_FB.sum(1), output_size=keys.values().shape[0])
    parts = []
    for is_in_F, is_in_N in ((~is_frozen_F, ~is_frozen_N), (is_frozen_F, is_frozen_N)):
        weights_N = keys.weights_or_none()
        parts.append(
            KeyedJaggedTensor(
                keys=keys.keys(),
                values=keys.values()[is_in_N],
                weights=None if weights_N is None else weights_N[is_in_N],
                lengths=(lengths_FB * is_in_F.unsqueeze(1).to(lengths_FB.dtype)).flatten(),
                stride=keys.stride(),
            )
        )
    return parts[0], parts[1]


@dataclass(kw_only=True)
class FrozenPart:
    """What of a training batch is only read."""

    batch: Any
    """The `MappedBatch` of its ids, without a transaction."""
    where: tuple[Tensor, ...]
    """bool [columns]: which are frozen. Where nothing is pooled: int64, the places among all cells (rows, if all have
    one width) of those that train, and of those that are read, so that the device is not asked how many there are. From
    SWAP on where the slots are."""
    output: Tensor | None = None
    """What was read; from SWAP on."""
    ready: Any = None
    """Event behind that; None: it is there."""

    @property
    def tensors(self) -> list[Tensor]:
        """What a stream uses that merges."""
        assert self.output is not None
        return [self.output, *self.where]

    def merge(self, trained: Tensor, *, is_pooled: bool) -> Tensor:
        """The output of the whole batch, from that of the part that trains: [bags, columns], or the rows of ids."""
        assert self.output is not None
        if is_pooled:
            return torch.where(self.where[0], self.output, trained)
        trained_at, read_at = self.where
        merged = trained.new_empty((trained_at.shape[0] + read_at.shape[0], trained.shape[1]))
        return merged.index_copy_(0, trained_at, trained).index_copy_(0, read_at, self.output)

    def trained_part(self, grad: Tensor, *, is_pooled: bool) -> Tensor:
        """Of the gradient of what `merge` gave, what the part that trains gets."""
        return grad if is_pooled else grad.index_select(0, self.where[0])
