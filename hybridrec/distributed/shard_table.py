"""`ShardTable`: one table of a collection as its owner rank builds it."""

from __future__ import annotations

from dataclasses import dataclass

from hybridrec.distributed.placement import ShardPlacement
from hybridrec.kernels.optimizer import OptimizerSpec
from hybridrec.native.protocol import ShardSpec
from hybridrec.store.row_state_layout import RowStateLayout


@dataclass(frozen=True, kw_only=True)
class ShardTable:
    """One table as its owner rank builds it."""

    name: str
    spec: ShardSpec
    placed: ShardPlacement
    layout: RowStateLayout
    optimizer: OptimizerSpec
    is_owned: bool = False
    """Whether this rank has all rows."""
    num_features: int
    """Features that look it up."""
    kernel: str
    """Which kernel serves it, as all ranks agreed: ``"tbe"`` or ``"torch"``."""
