"""What a user's batch is made of, without asking its class: the tensors and KJTs that its fields hold."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from torch import Tensor
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from hybridrec.errors import ConfigError

MAX_OBJECTS = 4096
"""A batch that refers to more, say a list of texts, is looked at so far."""


def _contents(batch: Any) -> Iterator[Tensor | KeyedJaggedTensor]:
    """The tensors and KJTs in a batch's fields, in lists, tuples, mappings and objects there; those of KJTs too."""
    left, seen = [batch], {id(batch)}
    while left:
        value = left.pop()
        if isinstance(value, (Tensor, KeyedJaggedTensor)):
            yield value
        if isinstance(value, Tensor):
            continue
        parts: list[Any] = []
        if isinstance(value, Mapping):
            parts += value.values()
        elif isinstance(value, (list, tuple)):
            parts += value
        elif dataclasses.is_dataclass(value):  # which may have slots
            parts += (getattr(value, field.name, None) for field in dataclasses.fields(value))
        if not isinstance(value, type):
            parts += getattr(value, "__dict__", {}).values()
        for part in parts:
            if len(seen) < MAX_OBJECTS and id(part) not in seen:
                seen.add(id(part))
                left.append(part)


def kjts_of(batch: Any) -> list[KeyedJaggedTensor]:
    """The KJTs of a batch."""
    return [value for value in _contents(batch) if isinstance(value, KeyedJaggedTensor)]


def versions_of(batch: Any) -> list[tuple[Tensor, int]]:
    """The tensors of a batch, and how often each was written in place so far."""
    return [(t, t._version) for t in _contents(batch) if isinstance(t, Tensor) and not t.is_inference()]


def is_as_before(versions: Iterable[tuple[Tensor, int]]) -> bool:
    """Whether none of the tensors was written in place since."""
    return all(tensor._version == version for tensor, version in versions)


def check_without_samples(features: KeyedJaggedTensor) -> None:
    """
    Raises:
        ConfigError: A KJT of an empty batch has ids or bags.
    """
    num_ids, num_bags = features.values().numel(), features.lengths().numel()
    if num_ids or num_bags:
        raise ConfigError(
            f"make_empty_batch returned a batch with {num_ids} ids in {num_bags} bags, which would be trained again "
            "and again until the other ranks' data ends. Return one without samples: KeyedJaggedTensors of stride 0."
        )
