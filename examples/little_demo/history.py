"""What happened while training, batch by batch, and where it is shown: above the progress bar and in TensorBoard."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from tqdm import tqdm  # type: ignore[import-untyped]  # it has no types

if TYPE_CHECKING:
    from hybridrec import TableStats

REPORT_EVERY = 10
"""Batches between two reports."""


@dataclass(kw_only=True)
class History:
    """Of one rank."""

    losses: list[Tensor] = field(default_factory=list)
    """float32 [], one a batch, on the device."""
    num_rows: int = 0
    """Rows trained on."""
    steps: list[int] = field(default_factory=list)
    """Number of batches at each report."""
    hit_rates: list[dict[str, float]] = field(default_factory=list)
    """table -> share of the ids looked up since the report before whose row was on the device; NaN if there was none.
    ``"all"`` is all tables together."""


class Recorder:
    """Fills a `History`, and reports every `REPORT_EVERY` batches and at the end."""

    def __init__(
        self, read_stats: Callable[[], Sequence[TableStats]], *, bar: tqdm | None = None, board: Board | None = None
    ) -> None:
        """Nothing happened yet.

        Args:
            read_stats: The counters of this rank's tables.
            bar: Advanced by one a batch; shows loss and hit rate. None: nothing is shown.
            board: Where to log. None: nowhere.
        """
        self.history = History()
        self._read_stats, self._bar, self._board = read_stats, bar, board
        self._seen: dict[str, tuple[int, int]] = {}

    def add(self, loss: Tensor, num_rows: int) -> None:
        """One batch was trained on.

        Args:
            loss: float32 [], detached.
            num_rows: Of the batch.
        """
        self.history.losses.append(loss)
        self.history.num_rows += num_rows
        if self._bar is not None:
            self._bar.update()
        if len(self.history.losses) % REPORT_EVERY == 0:
            self._report()

    def finish(self) -> History:
        """Report what is left to report."""
        reported = self.history.steps[-1] if self.history.steps else 0
        if len(self.history.losses) > reported:
            self._report()
        return self.history

    def _report(self) -> None:
        history = self.history
        first = history.steps[-1] if history.steps else 0
        history.steps.append(len(history.losses))
        history.hit_rates.append(self._hit_rates())
        if self._bar is None and self._board is None:
            return  # reading a loss waits for the device
        losses = torch.stack(history.losses[first:]).tolist()
        if self._bar is not None:
            loss, step = sum(losses) / len(losses), history.steps[-1]
            self._bar.set_postfix(loss=f"{loss:.4f}", hits_of_rank_0=f"{history.hit_rates[-1]['all']:.1%}")
            self._bar.write(f"batch {step:>6}  loss {loss:.7f}")
        if self._board is not None:
            for step, loss in enumerate(losses, first + 1):
                self._board.add("loss", loss, step)
            for table, rate in history.hit_rates[-1].items():
                self._board.add(f"hit_rate/{table}", rate, history.steps[-1])

    def _hit_rates(self) -> dict[str, float]:
        now = {s.table: (s.access_hits, s.accesses) for s in self._read_stats()}
        now["all"] = (sum(hits for hits, _ in now.values()), sum(accesses for _, accesses in now.values()))
        before, self._seen = self._seen, now
        return {table: _share(counts, before.get(table, (0, 0))) for table, counts in now.items()}


def _share(now: tuple[int, int], before: tuple[int, int]) -> float:
    accesses = now[1] - before[1]
    return (now[0] - before[0]) / accesses if accesses else float("nan")


class Board:
    """A TensorBoard log."""

    def __init__(self, folder: Path) -> None:
        """Start a log.

        Args:
            folder: Made if it is missing.
        """
        from torch.utils.tensorboard import SummaryWriter  # an optional package; not to be loaded for nothing

        self._writer: Any = SummaryWriter(str(folder))

    def add(self, name: str, value: float, step: int) -> None:
        """Log one number."""
        self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        """Write what is buffered."""
        self._writer.close()
