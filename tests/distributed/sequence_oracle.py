"""The oracle for rows that are not pooled: bags of one id, whose rows travel as pickled arrays, one by one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tests.distributed.oracle import Batch, Oracle, Part, scenario_loss

Place = tuple[int, str, int]
"""Table, feature, place among the feature's ids in a rank's batch."""
Piece = tuple[int, str, int, int]
"""And the first column."""


class SequenceOracle(Oracle):
    """One rank of the oracle; see `Oracle`."""

    is_pooled = False

    def step(self, batches: Sequence[Batch], dense_optimizer: torch.optim.Optimizer, *, train: bool = True) -> Tensor:
        """One step over all ranks' batches; returns this rank's loss."""
        mine = batches[self.rank]
        rows_of, saved = self._look_up(batches)
        leaves = {
            (t, f): torch.stack([rows_of[self.rank][t, f, p] for p, _ in _ids(mine, f)] or [torch.empty(table.dim)])[
                : sum(1 for _ in _ids(mine, f))
            ].requires_grad_(train)
            for t, table in enumerate(self.tables)
            for f in table.features
        }
        dense_optimizer.zero_grad()
        parts = [
            (leaf, torch.tensor([len(b) for b in mine.bags[f]], dtype=torch.int64)) for (_, f), leaf in leaves.items()
        ]
        loss = scenario_loss(self.dense(parts), mine.labels)
        if train:
            loss.backward()
            self.step_number += 1
            grads = {
                (t, f, p): leaf.grad[p] / self.world_size for (t, f), leaf in leaves.items() for p in range(len(leaf))
            }
            self._update(batches, _everyones(grads), saved)
            dense_optimizer.step()
        return loss.detach()

    def _owned(self, part: Part, batches: Sequence[Batch]) -> Iterator[tuple[int, str, int, int]]:
        """(rank, feature, place, id) of what this rank looks up, ordered (feature, source rank, place)."""
        for feature in part.table.features:
            for rank, batch in enumerate(batches):
                for place, id_ in _ids(batch, feature):
                    if part.has(id_, self.rank, self.world_size):
                        yield rank, feature, place, id_

    def _look_up(self, batches: Sequence[Batch]) -> tuple[list[dict[Place, Tensor]], list[object]]:
        """For each rank the rows of its ids, wherever they were looked up; and what the kernels keep."""
        found: list[dict[Piece, Tensor]] = [{} for _ in batches]
        saved = []
        for part, known, kernel in zip(self.mine, self.rows, self.kernels, strict=True):
            t, owned = self.tables.index(part.table), list(self._owned(part, batches))
            slots = torch.tensor([known[id_] for *_, id_ in owned], dtype=torch.int64)
            rows, kept = kernel.forward(slots, torch.arange(len(owned) + 1), None)
            saved.append(kept)
            for (rank, feature, place, _), row in zip(owned, rows, strict=True):
                found[rank][t, feature, place, part.first] = row.clone()
        merged: list[dict[Piece, Tensor]] = [{} for _ in batches]
        for of_owner in _everyones(found):
            for rank, rows_of_rank in enumerate(of_owner):
                merged[rank].update(rows_of_rank)
        return [self._whole(pieces) for pieces in merged], saved

    def _whole(self, pieces: dict[Piece, Tensor]) -> dict[Place, Tensor]:
        """Rows of all columns."""
        firsts = [[part.first for part in self.parts if part.table is table] for table in self.tables]
        return {
            (t, f, p): torch.cat([pieces[t, f, p, first] for first in firsts[t]])
            for t, f, p in dict.fromkeys(key[:3] for key in pieces)
        }

    def _update(self, batches: Sequence[Batch], grads: Sequence[dict[Place, Tensor]], saved: Sequence[object]) -> None:
        for part, kernel, kept in zip(self.mine, self.kernels, saved, strict=True):
            t = self.tables.index(part.table)
            columns = slice(part.first, part.first + part.dim)
            of_ids = [grads[r][t, feature, place][columns] for r, feature, place, _ in self._owned(part, batches)]
            grad = torch.stack(of_ids) if of_ids else torch.empty(0, part.dim)
            kernel.backward(kept, grad, step=self.step_number)


def _ids(batch: Batch, feature: str) -> Iterator[tuple[int, int]]:
    return enumerate(id_ for bag in batch.bags[feature] for id_, _ in bag)


def _everyones(value: Any) -> list[Any]:
    everyone = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, value)
    return everyone
