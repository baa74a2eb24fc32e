"""What a batch must satisfy before any id of it is looked up. Shared by the unsharded and the sharded collection."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from hybridrec.config import TableConfig
from hybridrec.errors import IdError

_ID_DTYPES = (torch.int32, torch.int64)


def check_features(features: KeyedJaggedTensor, tables: Sequence[TableConfig], is_weighted: bool, where: str) -> None:
    """Refuse a batch that cannot be looked up exactly. Reads the batch, changes nothing.

    Args:
        features: KJT of ids: values int32 or int64 [N], lengths int [F * B], any order of keys; keys that no table
            uses are allowed. Meant for host memory: on a device reading the lengths waits for it.
        tables: Tables whose features must be there.
        is_weighted: Whether weights float32 [N] must be there; else they are ignored.
        where: Subject of the error messages.

    Raises:
        IdError: Wrong type, dtype or shape, a missing feature, lengths that do not match; names it and the remedy.

    Complexity: O(F * B), two vectorised passes over the lengths; ids are not read.
    """
    if not isinstance(features, KeyedJaggedTensor):
        raise IdError(
            f"{where}: the batch has type {type(features).__name__}. Pass a torchrec KeyedJaggedTensor of ids."
        )
    _check_keys(features.keys(), tables, where)
    _check_ids(features.values(), where)
    # TorchRec derives lengths from offsets and the other way round; the flag says that bags differ from key to key.
    if features.variable_stride_per_key() or features.inverse_indices_or_none() is not None:
        raise IdError(
            f"{where}: the batch has a variable batch size per feature (VBE: stride_per_key_per_rank or "
            "inverse_indices), which hashed collections do not read. Pass a KeyedJaggedTensor of one batch size."
        )
    _check_lengths(features, where)
    if is_weighted:
        _check_weights(features, where)


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


def _check_lengths(features: KeyedJaggedTensor, where: str) -> None:
    lengths = features.lengths()
    num_keys, batch_size = len(features.keys()), features.stride()
    if lengths.dim() != 1:
        raise IdError(f"{where}: lengths have shape {list(lengths.shape)}. Pass a tensor of one dimension.")
    if lengths.numel() != num_keys * batch_size:
        raise IdError(
            f"{where}: {lengths.numel():,} lengths for {num_keys:,} features of {batch_size:,} bags. Pass one length "
            "for each feature and bag."
        )
    offsets = features.offsets_or_none()
    if offsets is not None and offsets.numel() and (first := int(offsets[0])) != 0:
        raise IdError(
            f"{where}: offsets begin with {first:,}, so the ids before are in no bag. Pass offsets that begin with 0."
        )
    if lengths.numel() == 0:
        shortest, longest, total = 0, 0, 0
    else:
        # One transfer, should lengths be on a device.
        bounds = torch.stack(lengths.aminmax()).to(torch.int64)
        shortest, longest, total = torch.cat((bounds, lengths.sum(dtype=torch.int64).view(1))).tolist()
    if shortest < 0:
        raise IdError(f"{where}: a length is {shortest:,}. Lengths are counts of ids: pass numbers >= 0.")
    num_ids = features.values().numel()
    if longest > num_ids:  # also where the sum of lengths would wrap round
        raise IdError(f"{where}: a length is {longest:,} but there are {num_ids:,} ids in all. Pass counts of ids.")
    if total != num_ids:
        raise IdError(
            f"{where}: lengths add up to {total:,} but there are {num_ids:,} ids. Pass lengths (or offsets) that cover "
            "every id once."
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
