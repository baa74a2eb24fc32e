"""What `verified` finds."""

from __future__ import annotations

from dataclasses import dataclass

from hybridrec.debug.location import RowLocation
from hybridrec.errors import HybridRecError


@dataclass(frozen=True, kw_only=True)
class Difference:
    """The first difference that a rank found. ``str`` of it is for reading."""

    rank: int
    step: int
    """Training batch of the collection, since it was sharded: 1 for the first."""
    table: str
    id: int | None
    """The smallest id of the table that differs; None if all rows are right and their pools are not."""
    num_ids: int
    """How many rows of the batch differ in this table."""
    moment: str
    """``"before the lookup"`` or ``"after the update"``; of pools ``"in the lookup"``."""
    part: str = ""
    """``"weights"`` or the optimizer state that differs."""
    column: int = 0
    """The first one of that part."""
    expected: float = 0.0
    got: float = 0.0
    where: RowLocation | None = None

    def __str__(self) -> str:
        start = f"rank {self.rank}, training step {self.step}, table {self.table!r}"
        if self.id is None:
            return f"{start}: the pools differ, though the rows that they are made of are those of a plain table."
        return (
            f"{start}, id {self.id}, {self.moment}: {self.part}[{self.column}] is {self.got!r}, in a plain table "
            f"{self.expected!r}; {self.num_ids:,} rows of the batch differ in this table.\n{self.where}"
        )


class VerifyError(HybridRecError, RuntimeError):
    """A row is not what a plain table would hold.

    Found before its batch was looked up, the batch is undone. Found after its rows were stepped, it is committed.
    """

    def __init__(self, difference: Difference) -> None:
        super().__init__(str(difference))
        self.difference = difference


@dataclass(kw_only=True)
class Verification:
    """What `verified` has compared so far on this rank."""

    steps: int = 0
    """Training batches, summed over collections."""
    rows: int = 0
    """Rows compared after an update."""
    unverified_steps: int = 0
    """Batches whose forward came before the mode began."""
    difference: Difference | None = None
