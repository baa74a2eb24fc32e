"""One batch of the pipeline: its states, and which stage may follow which.

::

    TAKEN --distribute--> DISTRIBUTED --map--> MAPPED --start--> COMPUTING --release--> RELEASED
                               ^                 |
                               +----withdraw-----+            drop, from any state that is not final --> DROPPED

Only the training thread changes a state; the host thread works for a batch between a ``submit`` and its job's end.
"""

from __future__ import annotations

import collections
import enum
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from hybridrec.distributed.batch_contents import is_as_before
from hybridrec.distributed.host_thread import Job
from hybridrec.errors import StateError


class BatchState(enum.Enum):
    """See the module's drawing."""

    TAKEN = "taken"
    DISTRIBUTED = "distributed"
    MAPPED = "mapped"
    COMPUTING = "computing"
    RELEASED = "released"
    DROPPED = "dropped"


_LEGAL = {
    (BatchState.TAKEN, BatchState.DISTRIBUTED),
    (BatchState.DISTRIBUTED, BatchState.MAPPED),
    (BatchState.MAPPED, BatchState.DISTRIBUTED),
    (BatchState.MAPPED, BatchState.COMPUTING),
    (BatchState.COMPUTING, BatchState.RELEASED),
    (BatchState.TAKEN, BatchState.DROPPED),
    (BatchState.DISTRIBUTED, BatchState.DROPPED),
    (BatchState.MAPPED, BatchState.DROPPED),
    (BatchState.COMPUTING, BatchState.DROPPED),
}


@dataclass(frozen=True, kw_only=True)
class Mode:
    """What the model was set to when a batch was taken."""

    is_training: bool
    """Whether the batch has a backward."""
    modules: tuple[bool, ...]
    """Whether each hashed collection trains."""


@dataclass(frozen=True)
class StageTime:
    """When a stage worked for a batch, by `time.perf_counter`."""

    stage: str
    start: float
    end: float


@dataclass(kw_only=True, eq=False)
class InFlightBatch:
    """One batch between the loader and the end of its step. A value of the training thread; see the module."""

    index: int
    """0 for the first batch that the pipeline took; the same on all ranks."""
    mode: Mode
    host: Any
    """As the loader gave it: hashed collections take their ids from it."""
    device: Any
    """Its copy on the device: what the model gets."""
    arrived: Any
    """Event behind what the loader's own operations on the device did for the batch."""
    arguments: dict[str, tuple[list[Any], dict[str, Any]]] = field(default_factory=dict)
    """Collection -> what was sent ahead for it: out of ``host`` for hashed ones, out of ``device`` for plain ones."""
    versions: list[tuple[Tensor, int]] = field(default_factory=list)
    """The tensors of hashed ``arguments`` and how often each had been written in place when the batch was taken."""
    contexts: list[Any] = field(default_factory=list)
    """One `HashBatchContext` a hashed collection."""
    dist_inputs: list[Any] = field(default_factory=list)
    """One a hashed collection: awaitables of the keys that this rank owns, then the keys."""
    is_end: bool = False
    """This rank's iterator has ended: ``host`` is an empty batch, or None where there is nothing to compute."""
    ended_ranks: tuple[int, ...] | None = None
    """By the verdict it is not computed, because the data of these ranks has ended."""
    copied: Any = None
    """Event behind the arrival of ``device``; None: it is there."""
    plain: dict[str, Any] | None = None
    """Plain collection -> (its context, its request), once its input dist began."""
    plain_sizes_known: bool = False
    distributing: Job | None = None
    mapping: Job | None = None
    must_not_wait: bool = False
    """The training thread waits for this batch: nothing that it waits for can come any more."""
    is_refused: bool = False
    """All ranks agreed that it cannot be mapped."""
    is_withdrawn: bool = False
    """The job that should have mapped it took it back instead."""
    times: list[StageTime] = field(default_factory=list)
    """Of the stages that worked for it."""
    _state: BatchState = BatchState.TAKEN

    @property
    def is_as_taken(self) -> bool:
        """Whether no tensor of its ids was written in place since it was taken."""
        return is_as_before(self.versions)

    @property
    def state(self) -> BatchState:
        """See the module's drawing."""
        return self._state

    def move_to(self, state: BatchState) -> None:
        """Change the state.

        Raises:
            StateError: That is no legal transition. Nothing changed.
        """
        if (self._state, state) not in _LEGAL:
            raise StateError(
                f"batch {self.index} of the pipeline is {self._state.value}; it cannot become {state.value}."
            )
        self._state = state


@dataclass(kw_only=True, eq=False)
class Source:
    """An iterator in one mode, and the batches that were taken from it and not yet released."""

    iterator: Iterator[Any]
    mode: Mode
    queue: collections.deque[InFlightBatch] = field(default_factory=collections.deque)
    is_exhausted: bool = False
    """`next` raised StopIteration; it is not called again before `progress` has said so to its caller."""
    has_ended: bool = False
    """Nothing is taken for it any more, on any rank, before `progress` has said so."""
    num_steps: int = 0
    """Batches that were over since it last ended."""
