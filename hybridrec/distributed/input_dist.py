"""DIST: send every id to the rank that owns its row, over the host group.

TorchRec's row-wise input dist does the work. Its block size of 0 means "unsigned value mod W", so what it is given
are keys, `mix64(id)`: consecutive or even ids then spread over the ranks too. Keys stay keys on the owner.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor
from torchrec.distributed.types import Awaitable
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from hybridrec._compat.torchrec import RwSparseFeaturesDist
from hybridrec.backend import HOST
from hybridrec.modules.variable_batch import filled_lengths, inverse_of
from hybridrec.native import mix64

MAX_KNOWN_ORDERS = 64
"""Orders of a KJT's keys that are remembered at a time."""


class HashInputDist(RwSparseFeaturesDist):  # type: ignore[misc]
    """KJT of raw ids of this rank's batch -> awaitable of the KJT of keys that this rank owns, of all ranks' batches.

    The result's bags are ordered (feature, source rank, bag); ids inside a bag keep their order.
    """

    def __init__(self, host_group: dist.ProcessGroup, num_features: int) -> None:
        super().__init__(
            pg=host_group,
            num_features=num_features,
            feature_hash_sizes=[0] * num_features,
            device=HOST,
            is_sequence=False,
            keep_original_indices=True,
        )

    def forward(self, features: KeyedJaggedTensor) -> Awaitable[Awaitable[KeyedJaggedTensor]]:
        """
        Args:
            features: F features in the order of the lookup; ids int64 [N], lengths int64 [F * B], host memory.
        """
        keyed = KeyedJaggedTensor(
            keys=features.keys(),
            values=mix64(features.values()),
            weights=features.weights_or_none(),
            lengths=features.lengths(),
            stride=features.stride(),
        )
        if self._world_size == 1:
            return self._dist(keyed)  # one owner: nothing to sort by
        return super().forward(keyed)


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
