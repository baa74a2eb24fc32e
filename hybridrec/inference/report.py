"""What freezing did to each table: sizes, and errors against the float32 rows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class TableReport:
    """One frozen table. Errors are of the stored values; initial rows of unknown ids have none."""

    table: str
    dtype: str
    """``"fp32"``, ``"fp16"``, ``"int8"`` or ``"int4"``."""
    dim: int
    """D."""
    rows: int
    """R, ids that are known."""
    bytes: int
    """Of ids, rows, scales and biases together."""
    max_abs_error: float
    """The largest difference to a float32 value."""
    mean_abs_error: float
    """The mean over all values."""

    @property
    def bytes_per_row(self) -> float:
        """The id included."""
        return self.bytes / (self.rows + 1)  # the row of zeros takes as much

    def __str__(self) -> str:
        return (
            f"{self.table!r}: {self.rows:,} rows x {self.dim} as {self.dtype}, {self.bytes:,} bytes "
            f"({self.bytes_per_row:.1f} a row, {8 + 4 * self.dim} as fp32), error at most {self.max_abs_error:.3g}, "
            f"{self.mean_abs_error:.3g} on average"
        )


@dataclass(frozen=True, kw_only=True)
class FreezeReport:
    """All tables of a frozen collection."""

    tables: tuple[TableReport, ...]
    """In the order of the collection."""

    @property
    def bytes(self) -> int:
        """Of all tables."""
        return sum(table.bytes for table in self.tables)

    def __str__(self) -> str:
        return "\n".join([*map(str, self.tables), f"together {self.bytes:,} bytes"])

    def to_json(self) -> list[dict[str, Any]]:
        """For a manifest."""
        return [asdict(table) for table in self.tables]

    @staticmethod
    def from_json(tables: list[Mapping[str, Any]]) -> FreezeReport:
        """What `to_json` gave."""
        return FreezeReport(tables=tuple(TableReport(**table) for table in tables))


class ErrorSum:
    """Differences between rows and what was stored of them, chunk by chunk."""

    def __init__(self) -> None:
        self._largest, self._total, self._count = 0.0, 0.0, 0

    def add(self, rows_nD: Tensor, stored_nD: Tensor) -> None:
        """float32 [n, D] each. Values that are not finite, which only float formats hold, have no error."""
        if rows_nD.numel() == 0:
            return
        difference = torch.where(torch.isfinite(rows_nD), (stored_nD - rows_nD).abs(), 0)
        self._largest = max(self._largest, float(difference.max()))
        self._total += float(difference.sum(dtype=torch.float64))
        self._count += rows_nD.numel()

    def merge(self, figures: Tensor) -> None:
        """Add those of another rank, as it tells them."""
        largest, total, count = figures.tolist()
        self._largest, self._total = max(self._largest, largest), self._total + total
        self._count += int(count)

    def figures(self) -> Tensor:
        """float64 [3]: the largest, the sum, how many."""
        return torch.tensor([self._largest, self._total, self._count], dtype=torch.float64)

    @property
    def largest(self) -> float:
        """0 without values."""
        return self._largest

    @property
    def mean(self) -> float:
        """0 without values."""
        return self._total / max(1, self._count)
