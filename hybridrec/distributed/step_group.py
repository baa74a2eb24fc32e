"""The batches of a pipeline since its last step: one, or as many as gradients are accumulated over."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from hybridrec.distributed.accumulation import accumulate_gradients
from hybridrec.distributed.sharded_collection import ShardedHashCollection
from hybridrec.errors import ConfigError
from hybridrec.types import FullPolicy


class StepGroup:
    """Which batches the next step is for."""

    def __init__(self, num_steps: Any, *, depth: int, max_open: int) -> None:
        """
        Args:
            num_steps: N: batches a step.
            depth: Of the pipeline.
            max_open: Most batches in flight and waiting for which what is evicted does not depend on the depth.

        Raises:
            ConfigError: ``num_steps`` is no positive int.
        """
        if isinstance(num_steps, bool) or not isinstance(num_steps, int) or num_steps < 1:
            raise ConfigError(f"accumulation_steps={num_steps!r}. Pass an int from 1 (a step a batch) on.")
        self._num_steps, self._depth, self._max_open = num_steps, depth, max_open
        self._is_end: list[bool] = []
        self._modules: Sequence[ShardedHashCollection] = ()

    @property
    def num_open(self) -> int:
        """Most batches that keep their rows in slots at a time."""
        return self._depth + self._num_steps - 1

    @property
    def num_batches(self) -> int:
        """Batches since the last step, the one that computes included."""
        return len(self._is_end)

    @property
    def num_taken(self) -> int:
        """Those of them that came from the iterator."""
        return sum(not is_end for is_end in self._is_end)

    @property
    def is_full(self) -> bool:
        """Whether the step is due."""
        return len(self._is_end) == self._num_steps

    def use(self, model: nn.Module, modules: Sequence[ShardedHashCollection]) -> None:
        """Train this model.

        Args:
            model: The model.
            modules: Its hashed collections.

        Raises:
            ConfigError: The depth and the group are too large together for a table that evicts.
            StateError: See `accumulate_gradients`.
        """
        self._modules = modules
        if self._num_steps == 1 or not modules:
            return
        evicting = [t.name for m in modules for t in m.table_configs if t.full_policy is FullPolicy.EVICT]
        if evicting and self.num_open > self._max_open:
            raise ConfigError(
                f"accumulation_steps={self._num_steps} and pipe_n_batch={self._depth} keep {self.num_open} batches "
                f"open. With full_policy='evict' (table {evicting[0]!r}) at most {self._max_open} may be, so that what "
                "is evicted does not depend on the depth. Choose less of one."
            )
        accumulate_gradients(model)

    def add(self, *, is_end: bool) -> None:
        """A batch begins to compute. ``is_end``: it is an empty one, behind the iterator's end."""
        self._is_end.append(is_end)

    def step(self, optimizer_step: Callable[[], None]) -> None:
        """One step for all."""
        optimizer_step()
        for module in self._modules:
            module.lookup.gradients.step()  # done already if its optimizer is part of the pipeline's

    def drop(self, optimizer: torch.optim.Optimizer) -> int:
        """They are as if they had never been; how many of them came from the iterator."""
        if self._is_end and self._num_steps > 1:
            for module in self._modules:
                module.lookup.gradients.drop()
            optimizer.zero_grad()
        num_taken = self.num_taken
        self.clear()
        return num_taken

    def clear(self) -> None:
        """The next batch begins a group."""
        self._is_end.clear()
