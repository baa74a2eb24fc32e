"""What callers pass: arrays of any kind as tensors, names as lists of them."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hybridrec.errors import ConfigError

Ids = Tensor | NDArray[np.int64] | Sequence[int]
"""int64 [N]."""


def as_tensor(values: object, what: str) -> Tensor:
    """A tensor as it is; a numpy array or a list, copied only where torch cannot share its memory.

    Args:
        values: Of the caller.
        what: For messages, such as ``"embeddings: ids"``.

    Raises:
        ConfigError: It is nothing of that, or holds no numbers.
    """
    if isinstance(values, Tensor):
        return values
    if isinstance(values, list | tuple) and not values:
        return torch.empty(0, dtype=torch.int64)
    try:
        array = np.require(values, requirements=["C", "W"])
        return torch.from_numpy(array)
    except (TypeError, ValueError) as e:
        raise ConfigError(
            f"{what} are a {type(values).__name__} that holds no array ({e}). Pass a tensor, a numpy array or a list."
        ) from e


def check_names(tables: Collection[str] | None, where: str) -> None:
    """Raise `ConfigError` if one name is in the place of a list of names."""
    if isinstance(tables, str):
        raise ConfigError(f"{where}: tables={tables!r} is one string. Pass a list of names: tables=[{tables!r}].")
