"""How long the stages worked, and how long the training thread waited for which of them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from hybridrec.distributed.in_flight import StageTime

QUEUE = "queue"
"""What is waited for while no stage works for the batch: the batches before it."""


class PipelineClock:
    """Sums of seconds. Used by the training thread alone."""

    def __init__(self) -> None:
        self._stages: dict[str, float] = {}
        self._stalls: dict[str, float] = {}

    def add(self, stage: str, seconds: float) -> None:
        """A stage worked on the training thread, which therefore waited for it."""
        self._stages[stage] = self._stages.get(stage, 0.0) + seconds
        self.add_stall(stage, seconds)

    def add_stall(self, stage: str, seconds: float) -> None:
        """The training thread waited for a stage."""
        self._stalls[stage] = self._stalls.get(stage, 0.0) + seconds

    def add_stages(self, times: Iterable[StageTime]) -> None:
        """The stages of a batch that is over."""
        for time in times:
            self._stages[time.stage] = self._stages.get(time.stage, 0.0) + time.end - time.start

    def add_wait(self, start: float, end: float, times: Iterable[StageTime]) -> None:
        """The training thread waited from ``start`` to ``end`` for a batch; its stages say for what."""
        rest = end - start
        for time in times:
            overlap = min(end, time.end) - max(start, time.start)
            if overlap > 0:
                self.add_stall(time.stage, overlap)
                rest -= overlap
        self.add_stall(QUEUE, max(0.0, rest))

    def stage_seconds(self) -> Mapping[str, float]:
        """Stage -> seconds."""
        return dict(self._stages)

    def stall_seconds(self) -> Mapping[str, float]:
        """Stage -> seconds."""
        return dict(self._stalls)
