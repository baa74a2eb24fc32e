"""Batches whose features have different numbers of bags: TorchRec's variable batch per feature (VBE).

Such a KJT carries each distinct bag of a feature once; its inverse indices say which bag each of the B examples has.
What is looked up, sent and pooled are the distinct bags: features are filled up with empty bags to the longest one, so
that everything in between sees an ordinary batch of S bags. Examples exist only before and after.

    # stride_per_key = [3, 1], B = 4                bags           output, for each example
    # "ad"    inverse [0, 2, 1, 2]   lengths [1, 2, 1]    pool 0, pool 2, pool 1, pool 2
    # "user"  inverse [0, 0, 0, 0]   lengths [5, -, -]    pool 0, pool 0, pool 0, pool 0     - : filled up
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from hybridrec.backend import HOST
from hybridrec.kernels.row_gradients import sum_bags


def bags_per_feature(features: KeyedJaggedTensor) -> list[int]:
    """[F], S_f. Of a VBE batch from what it was built with, not from what TorchRec may have cached."""
    if features.variable_stride_per_key():
        return [sum(of_ranks) for of_ranks in features.stride_per_key_per_rank()]
    return [features.lengths().numel() // max(1, len(features.keys()))] * len(features.keys())


def filled_lengths(features: KeyedJaggedTensor) -> Tensor:
    """int64 [F, S], contiguous, on the lengths' device: how long every bag is, 0 for those that a feature lacks."""
    lengths: Tensor = features.lengths().to(torch.int64).contiguous()
    counts = bags_per_feature(features)
    most = max(counts, default=0)
    if all(count == most for count in counts):
        return lengths.view(len(counts), most)
    is_there = torch.arange(most) < torch.tensor(counts).unsqueeze(1)
    filled: Tensor = lengths.new_zeros((len(counts), most))
    filled[is_there.to(lengths.device)] = lengths
    return filled


def inverse_of(features: KeyedJaggedTensor, feature_names: Sequence[str]) -> Tensor | None:
    """int64 [F, B], host memory: which bag each example has, for the named features; None if examples are bags."""
    inverse = features.inverse_indices_or_none()
    if inverse is None:
        return None
    names, index = inverse
    ordered: Tensor = index.to(HOST, torch.int64)[[names.index(name) for name in feature_names]]
    return ordered


def expand(pooled_SC: Tensor, inverse_FB: Tensor, dims: Sequence[int]) -> Tensor:
    """Give every example the pools of its bags.

    The gradient of a bag is the sum of those of its examples, added in their order: the same bits on every run, which
    the backward of ``index_select`` does not promise.

    Args:
        pooled_SC: float32 [S, C], feature after feature.
        inverse_FB: int64 [F, B] on the same device, values below S.
        dims: [F], the columns of each feature; their sum is C.

    Returns:
        float32 [B, C].
    """
    expanded: Tensor = _Expand.apply(pooled_SC, inverse_FB, list(dims))
    return expanded


class _Expand(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, pooled_SC: Tensor, inverse_FB: Tensor, dims: list[int]) -> Tensor:
        ctx.save_for_backward(inverse_FB)
        ctx.dims, ctx.num_bags = dims, pooled_SC.shape[0]
        parts = pooled_SC.split(dims, 1)
        return torch.cat([part.index_select(0, index) for part, index in zip(parts, inverse_FB, strict=True)], 1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_BC: Tensor) -> tuple[Tensor | None, ...]:
        (inverse_FB,) = ctx.saved_tensors
        if inverse_FB.shape[1] == 0:
            return grad_BC.new_zeros((ctx.num_bags, grad_BC.shape[1])), None, None
        # Examples of one bag stand together, in their order; a bag of "bags" again, as in `row_gradients`.
        sorted_FB, order_FB = torch.sort(inverse_FB, dim=1, stable=True)
        bounds = torch.arange(ctx.num_bags + 1, device=inverse_FB.device).expand(inverse_FB.shape[0], -1).contiguous()
        starts_F = torch.searchsorted(sorted_FB, bounds)
        parts = zip(grad_BC.split(ctx.dims, 1), order_FB, starts_F, strict=True)
        grads = [sum_bags(part.contiguous(), order, starts, None) for part, order, starts in parts]
        return torch.cat(grads, 1), None, None
