"""What the tutorial prints, and how it checks what it prints. Rank 0 speaks, all ranks check."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

CLOSE = 1e-5
"""How far two float32 results of the same sums, added in another order, may be apart."""


class TutorialError(Exception):
    """Something is not as the tutorial says."""


def title(number: int, text: str) -> None:
    """Begin a step."""
    _print(f"\n==== {number}. {text}\n")


def say(text: object) -> None:
    """Explain, or show what something prints as."""
    _print("\n".join(f"  {line}".rstrip() for line in str(text).splitlines()))


def same(what: str, ours: Any, theirs: Any) -> None:
    """Say that two values are equal, after a look.

    Args:
        what: Of what; ends the line that is printed.
        ours: Of hybridrec.
        theirs: What it must be: anything with ``==``, or a tensor, which must be equal bit for bit.

    Raises:
        TutorialError: They differ.
    """
    if isinstance(theirs, Tensor):
        is_same = ours.shape == theirs.shape and ours.dtype == theirs.dtype and torch.equal(ours, theirs)
    else:
        is_same = ours == theirs
    if not is_same:
        raise TutorialError(f"{what}: not the same.\nours:\n{ours}\nexpected:\n{theirs}")
    _print(f"  [same]  {what}")


def close(what: str, ours: Any, theirs: Any, tolerance: float = CLOSE) -> None:
    """Say that two tensors, or lists of numbers, are equal but for rounding.

    Args:
        what: Of what; ends the line that is printed.
        ours: Of hybridrec.
        theirs: What it must be, in the same shape.
        tolerance: Largest absolute difference.

    Raises:
        TutorialError: They differ by more, or one of them is no number.
    """
    first, second = torch.as_tensor(ours).detach(), torch.as_tensor(theirs).detach()
    if first.shape != second.shape:
        raise TutorialError(f"{what}: shapes {tuple(first.shape)} and {tuple(second.shape)}")
    difference = float((first - second).abs().max())
    if not difference <= tolerance:  # NaN is not
        raise TutorialError(f"{what}: differ by {difference:.3g}, more than {tolerance:.3g}.\n{first}\n{second}")
    _print(f"  [close] {what} (to {tolerance:.0e})")


def holds(what: str, is_so: bool) -> None:
    """Say something that is either so or not.

    Raises:
        TutorialError: It is not.
    """
    if not is_so:
        raise TutorialError(f"not so: {what}")
    _print(f"  [holds] {what}")


def _print(text: str) -> None:
    if not dist.is_initialized() or dist.get_rank() == 0:
        print(text, flush=True)
