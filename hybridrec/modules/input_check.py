"""What a batch must satisfy before any id of it is looked up. Shared by the unsharded and the sharded collection."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from hybridrec.config import TableConfig
from hybridrec.errors import IdError
from hybridrec.modules.variable_batch import bags_per_feature

_ID_DTYPES = (torch.int32, torch.int64)


def check_features(features: KeyedJaggedTensor, tables: Sequence[TableConfig], is_weighted: bool, where: str) -> None:
    """Refuse a batch that cannot be looked up exactly. Reads the batch, changes nothing.

    Args:
        features: KJT of ids: values int32 or int64 [N], lengths int [F * B] (VBE: [sum of S_f], with inverse
            indices int [F, B]), any order of keys; keys that no table uses are allowed. Meant for host memory: on a
            device reading the lengths waits for it.
        tables: Tables whose features must be there.
        is_weighted: Whether weights float32 [N] must be there; else they are ignored.
        where: Subject of the error messages.

    Raises:
        IdError: Wrong type, dtype or shape, a missing feature, lengths that do not match; names it and the remedy.

    Complexity: O(F * B), a few vectorised passes over the lengths; ids are not read.
    """
    if not isinstance(features, KeyedJaggedTensor):
        raise IdError(
            f"{where}: the batch has type {type(features).__name__}. Pass a torchrec KeyedJaggedTensor of ids."
        )
    _check_keys(features.keys(), tables, where)
    _check_ids(features.values(), where)
    bags = _check_lengths(features, where)
    _check_inverse(features, bags, tables, where)
    if is_weighted:
        _check_weights(features, where)


def check_sequences(features: KeyedJaggedTensor, tables: Sequence[TableConfig], where: str) -> None:
    """As `check_features`, for rows that are not pooled; weights are ignored.

    Raises:
        IdError: As there; or the batch is variable (VBE), which exists for pooled tables alone.
    """
    check_features(features, tables, is_weighted=False, where=where)
    if features.variable_stride_per_key() or features.inverse_indices_or_none() is not None:
        raise IdError(
            f"{where}: the batch is variable (stride_per_key_per_rank or inverse_indices), which does not exist for "
            "sequences of hashed tables. Pass every sample's ids: a KeyedJaggedTensor with one stride and no "
            "inverse_indices."
        )


def _check_keys(keys: Sequence[str], tables: Sequence[TableConfig], where: str) -> None:
    present = set(keys)
    if len(present) != len(keys):
        repeated = sorted({key for key in keys if keys.count(key) > 1})
        raise IdError(f"{where}: the batch has feature {repeated[0]!r} more than once. Name each feature once.")
    missing = [(f, table.name) for table in tables for f in table.feature_names if f not in present]
    if missing:
        wanted = ", ".join(f"{feature!r} (table {name!r})" for feature, name in missing)
        raise IdError(
            f"{where}: the batch lacks {wanted}. It has {', '.join(map(repr, keys)) or 'no feature'}. Put a feature "
            "without ids in the batch with lengths 0, or take it out of the table's feature_names."
        )


def _check_ids(values: Tensor, where: str) -> None:
    if values.dtype not in _ID_DTYPES:
        raise IdError(
            f"{where}: ids have dtype {values.dtype}. Accepted: torch.int64, torch.int32. Convert with "
            "values.to(torch.int64); uint64 hashes keep their bits with values.view(torch.int64)."
        )
    if values.dim() != 1:
        raise IdError(f"{where}: ids have shape {list(values.shape)}. Pass a tensor of one dimension.")


def _check_lengths(features: KeyedJaggedTensor, where: str) -> list[int]:
    """Returns the number of bags of each feature."""
    lengths = features.lengths()
    if lengths.dim() != 1:
        raise IdError(f"{where}: lengths have shape {list(lengths.shape)}. Pass a tensor of one dimension.")
    bags = _check_bags(features, where)
    offsets = features.offsets_or_none()
    if offsets is not None and offsets.numel() and (first := int(offsets[0])) != 0:
        raise IdError(
            f"{where}: offsets begin with {first:,}, so the ids before are in no bag. Pass offsets that begin with 0."
        )
    if features.lengths_or_none() is not None and offsets is not None and offsets.numel():
        _check_same_bounds(features, lengths, offsets, bags, where)
    if lengths.numel() == 0:
        shortest, longest, total = 0, 0, 0
    else:
        # One transfer, should lengths be on a device.
        bounds = torch.stack(lengths.aminmax()).to(torch.int64)
        shortest, longest, total = torch.cat((bounds, lengths.sum(dtype=torch.int64).view(1))).tolist()
    num_ids = features.values().numel()
    if shortest < 0:
        feature, bag = _place(features, int(lengths.argmin()), bags)
        raise IdError(
            f"{where}: a length is {shortest:,} (feature {feature!r}, bag {bag:,}). Lengths are counts of ids: pass "
            "numbers >= 0, or offsets that do not decrease."
        )
    if longest > num_ids:  # also where the sum of lengths would wrap round
        feature, bag = _place(features, int(lengths.argmax()), bags)
        raise IdError(
            f"{where}: a length is {longest:,} (feature {feature!r}, bag {bag:,}) but there are {num_ids:,} ids in "
            "all. Pass counts of ids."
        )
    if total != num_ids:
        sums = [int(part.sum(dtype=torch.int64)) for part in lengths.split(bags)]
        by_feature = ", ".join(f"{key!r} {n:,}" for key, n in zip(features.keys(), sums, strict=True))
        raise IdError(
            f"{where}: lengths add up to {total:,} but there are {num_ids:,} ids (by feature: {by_feature}). Pass "
            "lengths (or offsets) that cover every id once."
        )
    return bags


def _check_bags(features: KeyedJaggedTensor, where: str) -> list[int]:
    """How many bags each feature has, by what the batch says; the lengths must be as many."""
    num_lengths, num_keys = features.lengths().numel(), len(features.keys())
    if features.variable_stride_per_key():
        is_table = all(isinstance(of_ranks, list) for of_ranks in features.stride_per_key_per_rank())
        bags = bags_per_feature(features) if is_table else []
        if len(bags) == num_keys and min(bags, default=0) >= 0 and sum(bags) == num_lengths:
            return bags
        raise IdError(
            f"{where}: {num_lengths:,} lengths for {num_keys:,} features ({', '.join(map(repr, features.keys()))}) of "
            f"{', '.join(f'{n:,}' for n in bags)} bags (stride_per_key_per_rank). Pass one row of "
            "stride_per_key_per_rank for each feature and one length for each bag."
        )
    stride = features.stride()
    if num_lengths != num_keys * stride:
        raise IdError(
            f"{where}: {num_lengths:,} lengths for {num_keys:,} features of {stride:,} bags. Pass one length for each "
            "feature and bag."
        )
    return [stride] * num_keys


def _check_same_bounds(
    features: KeyedJaggedTensor, lengths: Tensor, offsets: Tensor, bags: Sequence[int], where: str
) -> None:
    """A batch may carry both: lengths are what is read, so offsets must not say anything else."""
    if offsets.numel() != lengths.numel() + 1:
        raise IdError(
            f"{where}: {offsets.numel():,} offsets for {lengths.numel():,} bags. Pass one more than there are bags, "
            "or lengths alone."
        )
    differs = offsets.diff() != lengths
    if bool(differs.any()):
        first = int(differs.to(torch.int8).argmax())
        feature, bag = _place(features, first, bags)
        raise IdError(
            f"{where}: feature {feature!r}, bag {bag:,} has length {int(lengths[first]):,}, but its offsets are "
            f"{int(offsets[first]):,} and {int(offsets[first + 1]):,}. Pass lengths or offsets, not both."
        )


def _place(features: KeyedJaggedTensor, position: int, bags: Sequence[int]) -> tuple[str, int]:
    """Feature and bag of an entry of the lengths."""
    for key, count in zip(features.keys(), bags, strict=True):
        if position < count:
            return key, position
        position -= count
    raise IndexError(position)


def _check_inverse(features: KeyedJaggedTensor, bags: Sequence[int], tables: Sequence[TableConfig], where: str) -> None:
    """Of a variable batch: every example must name a bag of every feature that is looked up."""
    inverse = features.inverse_indices_or_none()
    if inverse is None:
        if len(set(bags)) > 1:
            counts = ", ".join(f"{key!r} {n:,}" for key, n in zip(features.keys(), bags, strict=True))
            raise IdError(
                f"{where}: the features have different numbers of bags ({counts}) but the batch has no "
                "inverse_indices, so nothing says which bag belongs to which example. Pass "
                "inverse_indices=(feature names, int64 [features, examples])."
            )
        return
    names, index_FB = inverse
    if index_FB.dtype not in _ID_DTYPES or index_FB.dim() != 2 or index_FB.shape[0] != len(names):
        raise IdError(
            f"{where}: inverse_indices have dtype {index_FB.dtype} and shape {list(index_FB.shape)} for "
            f"{len(names):,} feature names. Pass torch.int64 [features, examples]."
        )
    wanted = list(dict.fromkeys(name for table in tables for name in table.feature_names))
    missing = [name for name in wanted if names.count(name) != 1]
    if missing:
        raise IdError(
            f"{where}: inverse_indices name feature {missing[0]!r} {names.count(missing[0])} times; they have "
            f"{', '.join(map(repr, names)) or 'no feature'}. Name each feature that is looked up once."
        )
    if index_FB.shape[1] == 0:
        return
    lowest, highest = (bound.tolist() for bound in index_FB[[names.index(n) for n in wanted]].aminmax(dim=1))
    of_feature = dict(zip(features.keys(), bags, strict=True))
    for name, low, high in zip(wanted, lowest, highest, strict=True):
        if low < 0 or high >= of_feature[name]:
            raise IdError(
                f"{where}: inverse_indices of feature {name!r} reach from {low:,} to {high:,}, but it has "
                f"{of_feature[name]:,} bags. Pass numbers of its bags, counted from 0."
            )


def _check_weights(features: KeyedJaggedTensor, where: str) -> None:
    weights = features.weights_or_none()
    if weights is None:
        raise IdError(
            f"{where}: the collection is weighted but the batch has no weights. Pass weights to KeyedJaggedTensor, or "
            "build the collection with is_weighted=False."
        )
    if weights.dtype != torch.float32:
        raise IdError(f"{where}: weights have dtype {weights.dtype}. Accepted: torch.float32. Use weights.float().")
    num_ids = features.values().numel()
    if weights.dim() != 1 or weights.numel() != num_ids:
        raise IdError(
            f"{where}: weights have shape {list(weights.shape)} for {num_ids:,} ids. Pass one weight for each id."
        )
