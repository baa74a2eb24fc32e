"""What TorchRec's exchange of a KJT received, before it is put in order."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Received:
    """The raw tensors of one exchange, one block a source rank behind the other; views of what is going to be used."""

    lengths: Tensor
    """int64 [sum of bags], of every source rank its bags of all features."""
    num_lengths: Sequence[int]
    """[W] how many of them each rank sent."""
    num_ids: Sequence[int]
    """[W] how many ids each rank sent."""


def wait_received(awaitables: Sequence[Any]) -> list[Received]:
    """Wait for the exchanges under a `KJTListAwaitable`, which may then be waited for as well; none for one rank."""
    result = []
    for awaitable in awaitables:
        if awaitable._workers == 1:
            continue
        for work in awaitable._awaitables:
            work.wait()  # waiting twice is harmless
        splits = awaitable._output_splits
        tensors = dict(zip(splits, awaitable._output_tensors, strict=True))
        result.append(Received(lengths=tensors["lengths"], num_lengths=splits["lengths"], num_ids=splits["values"]))
    return result
