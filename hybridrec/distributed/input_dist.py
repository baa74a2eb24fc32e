"""DIST: send every id to the rank that owns its row, over the host group.

What travels are keys, `mix64(id)`. Row-wise features are sorted by owner, which TorchRec's operator does: its block
size of 0 means "unsigned value mod W", and of keys consecutive or even ids spread over the ranks too. Features that
one rank owns go there whole. Keys stay keys on the owner.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torchrec.distributed.types import Awaitable
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from hybridrec._compat.torchrec import KJTAllToAll, bucketize_kjt_before_all2all
from hybridrec.backend import HOST
from hybridrec.modules.variable_batch import filled_lengths, inverse_of
from hybridrec.native import mix64

MAX_KNOWN_ORDERS = 64
"""Orders of a KJT's keys that are remembered at a time."""


class Sorted(NamedTuple):
    """A batch as it is sent."""

    features: KeyedJaggedTensor
    """Keys, rank after rank: of each its row-wise features, then those that it owns."""
    position_N: Tensor | None
    """int64 [N]: where each id of the batch went among the values; None if nobody asked, or nothing moved."""


class Router:
    """Sorts a batch by the ranks that own its rows."""

    def __init__(self, num_features: int, owned_features: Sequence[int]) -> None:
        """
        Args:
            num_features: Row-wise features.
            owned_features: [W], features that each rank owns.
        """
        self._num_features, self._owned_features = num_features, list(owned_features)
        self._block_sizes = torch.zeros(num_features, dtype=torch.int64)
        self.splits = [num_features + owned for owned in owned_features]
        """[W], how many features each rank gets."""

    def by_rank(self, of_feature_F: Tensor) -> list[Tensor]:
        """Something of every feature as each rank gets the features: [W] x [features of the rank]."""
        shared, *owned = of_feature_F.split([self._num_features, *self._owned_features])
        return [torch.cat((shared, of_rank)) for of_rank in owned]

    def sort(self, keyed: KeyedJaggedTensor, *, needs_positions: bool = False) -> Sorted:
        """
        Args:
            keyed: Keys int64 [N], lengths int64, host memory; the row-wise features first, then those that rank 0
                owns, rank 1, and so on. All of as many bags.
            needs_positions: Whether to say where each id went.
        """
        if len(self.splits) == 1 or self._num_features == 0:
            return Sorted(keyed, None)  # as it should be
        has_owned = any(self._owned_features)
        bags, row_wise = keyed.stride(), keyed
        num_row_wise = keyed.values().numel()
        if has_owned:
            num_row_wise = int(keyed.lengths()[: self._num_features * bags].sum())
            row_wise = _part(keyed, self._num_features, num_row_wise)
        sorted_by_owner, position_N = bucketize_kjt_before_all2all(
            row_wise,
            num_buckets=len(self.splits),
            block_sizes=self._block_sizes,
            output_permute=needs_positions,
            keep_original_indices=True,
        )
        if not has_owned:
            return Sorted(sorted_by_owner, position_N)
        return self._interleave(keyed, num_row_wise, sorted_by_owner, position_N)

    def _interleave(
        self, keyed: KeyedJaggedTensor, num_row_wise: int, row_wise: KeyedJaggedTensor, position_N: Tensor | None
    ) -> Sorted:
        """Put what each rank owns behind its row-wise features."""
        bags, world_size = keyed.stride(), len(self.splits)
        shared_sizes = [self._num_features * bags] * world_size
        owned_sizes = [num_owned * bags for num_owned in self._owned_features]
        shared_lengths, owned_lengths = row_wise.lengths(), keyed.lengths()[self._num_features * bags :]
        shared, owned = _sums(shared_lengths, shared_sizes), _sums(owned_lengths, owned_sizes)

        def interleaved(all_values: Tensor, row_wise_values: Tensor) -> Tensor:
            return torch.cat(_zip(row_wise_values.split(shared), all_values[num_row_wise:].split(owned)))

        weights, row_wise_weights = keyed.weights_or_none(), row_wise.weights_or_none()
        names, first = keyed.keys(), self._num_features
        keys: list[str] = []
        for num_owned in self._owned_features:
            keys += names[: self._num_features] + names[first : first + num_owned]
            first += num_owned
        features = KeyedJaggedTensor(
            keys=keys,
            values=interleaved(keyed.values(), row_wise.values()),
            weights=None if weights is None or row_wise_weights is None else interleaved(weights, row_wise_weights),
            lengths=torch.cat(_zip(shared_lengths.split(shared_sizes), owned_lengths.split(owned_sizes))),
            stride=bags,
        )
        return Sorted(features, None if position_N is None else _moved_on(position_N, shared, owned))


class HashInputDist(nn.Module):
    """KJT of raw ids of this rank's batch -> awaitable of the KJT of keys that this rank owns, of all ranks' batches.

    The result's bags are ordered (feature, source rank, bag); ids inside a bag keep their order.
    """

    def __init__(
        self, host_group: dist.ProcessGroup, num_features: int, owned_features: Sequence[int] | None = None
    ) -> None:
        """
        Args:
            host_group: gloo group of all ranks.
            num_features: Row-wise features.
            owned_features: [W], features that one rank owns, by rank; None: there are none.
        """
        super().__init__()
        owned = [0] * host_group.size() if owned_features is None else owned_features
        self.router = Router(num_features, owned)
        self._dist = KJTAllToAll(pg=host_group, splits=self.router.splits)

    def forward(self, features: KeyedJaggedTensor) -> Awaitable[Awaitable[KeyedJaggedTensor]]:
        """
        Args:
            features: F features, ordered as `Router.sort` wants them; ids int64 [N], lengths int64 [F * B], host
                memory.
        """
        awaitable: Awaitable[Awaitable[KeyedJaggedTensor]] = self.send(self.router.sort(keyed(features)).features)
        return awaitable

    def send(self, features: KeyedJaggedTensor) -> Awaitable[Awaitable[KeyedJaggedTensor]]:
        """The exchange alone, of what `Router.sort` gave."""
        awaitable: Awaitable[Awaitable[KeyedJaggedTensor]] = self._dist(features)
        return awaitable


def keyed(features: KeyedJaggedTensor) -> KeyedJaggedTensor:
    """The same features with keys, `mix64` of the ids, in their place."""
    return KeyedJaggedTensor(
        keys=features.keys(),
        values=mix64(features.values()),
        weights=features.weights_or_none(),
        lengths=features.lengths(),
        stride=features.stride(),
    )


def _part(features: KeyedJaggedTensor, num_features: int, num_values: int) -> KeyedJaggedTensor:
    """The first features, which have so many values."""
    weights = features.weights_or_none()
    return KeyedJaggedTensor(
        keys=features.keys()[:num_features],
        values=features.values()[:num_values],
        weights=None if weights is None else weights[:num_values],
        lengths=features.lengths()[: num_features * features.stride()],
        stride=features.stride(),
    )


def _zip(first: Sequence[Tensor], second: Sequence[Tensor]) -> list[Tensor]:
    return list(itertools.chain.from_iterable(zip(first, second, strict=True)))


def _sums(lengths: Tensor, sizes: Sequence[int]) -> list[int]:
    """The sums of parts of so many lengths."""
    totals = torch.zeros(lengths.numel() + 1, dtype=torch.int64)
    torch.cumsum(lengths, 0, out=totals[1:])
    sums: list[int] = totals[torch.tensor([0, *itertools.accumulate(sizes)])].diff().tolist()
    return sums


def _moved_on(position_N: Tensor, shared: Sequence[int], owned: Sequence[int]) -> Tensor:
    """Where ids went: row-wise ones, from where they went without what each rank owns; then the others, in order."""
    ends_W = torch.tensor(list(itertools.accumulate(shared)))
    before_W = torch.tensor([0, *itertools.accumulate(owned)])[:-1]
    row_wise = position_N + before_W[torch.searchsorted(ends_W, position_N, right=True)]
    whole = ends_W.repeat_interleave(torch.tensor(owned)) + torch.arange(sum(owned))
    return torch.cat((row_wise, whole))


class FeatureOrder:
    """Brings the features of a user's KJT into the order of the lookup, on the host, as int64."""

    def __init__(self, feature_names: list[str], *, is_weighted: bool) -> None:
        """
        Args:
            feature_names: [F], in the order of the lookup; a name may occur more than once (tables that share it).
            is_weighted: Whether weights travel along; otherwise a KJT's weights are left behind.
        """
        self._feature_names = feature_names
        self._is_weighted = is_weighted
        self._orders: dict[tuple[str, ...], tuple[list[int], Tensor] | None] = {}
        self.copied_bytes = 0
        """Bytes of KJTs that came on another device and were copied to the host."""

    def apply(self, features: KeyedJaggedTensor) -> KeyedJaggedTensor:
        """The features as the lookup wants them, all of as many bags. The user's tensors are never written."""
        values, lengths, weights = features.values(), features.lengths(), features.weights_or_none()
        if not self._is_weighted:
            weights = None
        if values.device != HOST or lengths.device != HOST:
            tensors = [t for t in (values, lengths, weights) if t is not None]
            self.copied_bytes += sum(t.numel() * t.element_size() for t in tensors)
            values = values.to(HOST)
            weights = weights.to(HOST) if weights is not None else None
        # Ranks may hold int32 and int64 lengths; they meet in one exchange.
        lengths_FS = filled_lengths(features).to(HOST)
        ordered = KeyedJaggedTensor(
            keys=features.keys(),
            values=values.to(torch.int64).contiguous(),
            lengths=lengths_FS.flatten(),
            weights=weights.contiguous() if weights is not None else None,
            stride=lengths_FS.shape[1],
        )
        order = self._order_of(features.keys())
        return ordered if order is None else ordered.permute(order[0], order[1])

    def inverse(self, features: KeyedJaggedTensor) -> Tensor | None:
        """int64 [F, B], host memory: the bag of each example (VBE); None if examples are bags."""
        return inverse_of(features, self._feature_names)

    def empty(self) -> KeyedJaggedTensor:
        """A batch of no bags: what a rank sends when its own batch is refused."""
        return KeyedJaggedTensor(
            keys=self._feature_names,
            values=torch.empty(0, dtype=torch.int64),
            lengths=torch.empty(0, dtype=torch.int64),
            weights=torch.empty(0) if self._is_weighted else None,
            stride=0,
        )

    def _order_of(self, keys: list[str]) -> tuple[list[int], Tensor] | None:
        known = tuple(keys)
        if known not in self._orders:
            if len(self._orders) >= MAX_KNOWN_ORDERS:
                self._orders.clear()  # a loader that shuffles its keys must not fill the memory
            order = [keys.index(name) for name in self._feature_names]
            is_identity = order == list(range(len(keys)))
            self._orders[known] = None if is_identity else (order, torch.tensor(order, dtype=torch.int32))
        return self._orders[known]
