"""Value types of more than one layer, and the letters that shapes are written in.

========  =====================================================================
letter    meaning
========  =====================================================================
``B``     batch size: bags of one feature (``B_r`` of rank r)
``F``     features;  ``T`` tables;  ``W`` world size
``N``     ids of a batch, with repetitions;  ``U`` unique ids among them
``D``     embedding dim of a table;  ``M`` row-sized optimizer states of a row
``A``     row-wise optimizer states of a row (one float each)
``C``     slots: rows that the device tier of a table holds on this rank
``R``     rows of a table shard (live ids on this rank)
``L``     rows loaded into slots for a batch;  ``V`` victims that make room
========  =====================================================================

A tensor's name carries its shape: ``keys_N``, ``slots_N``, ``rows_UD``.

An *id* is the int64 that the user feeds. Its *key* is ``mix64(id)``, a bijection: what is routed by, stored and
compared inside. Both name the same row.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from torch import Tensor


class FullPolicy(str, enum.Enum):
    """What a table does with a new id when its quota of rows is used up."""

    GROW = "grow"
    EVICT = "evict"
    ERROR = "error"


class UnevenRanks(str, enum.Enum):
    """What a pipeline does when a rank's iterator ends before another's."""

    STOP = "stop"
    DRAIN = "drain"


@dataclass(frozen=True, kw_only=True)
class RowState:
    """One optimizer state that every row has."""

    name: str
    """The optimizer's own name of it, such as ``"sum"`` or ``"exp_avg"``."""
    is_row_wise: bool
    """True: one float a row. False: as many floats as the row has columns."""
    initial_value: float = 0.0
    """What a row that was never trained holds."""


class SlotArrays(NamedTuple):
    """Where one table's slots are. Writes through these tensors do not bump autograd's version counters."""

    weights: Tensor
    """float32 [C, words]: words of the weights (`RowType`); of float32 weights they are [C, D], the weights."""
    row_states: tuple[Tensor, ...]
    """M x float32 [C, D]"""
    row_wise_states: tuple[Tensor, ...]
    """A x float32 [C]"""
