"""The shadow of a collection: a plain, unlimited table that is trained beside it, and compared with it.

A kernel of the same class over slots that nobody shares: no routing, cache, swap, transaction or pipeline. It gets each
training batch's keys and the gradient of its pools, as the collection gets them on this rank, so that both must hold
the same rows and states::

    forward   rows of the batch, where the collection has them  ==  the shadow's;   pools  ==  the shadow's
    backward  both are stepped;  rows and states of the batch   ==  the shadow's

A row that was trained before is copied when a batch first uses it; that of an unknown id is computed anew.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hybridrec.cache import BatchTransaction
from hybridrec.debug.difference import Difference, Verification, VerifyError
from hybridrec.debug.location import where
from hybridrec.debug.records import initial_records, read_records, read_slots, split_record, write_records
from hybridrec.distributed.lookup import PooledLookup
from hybridrec.distributed.mapped_batch import KernelInput, MappedBatch
from hybridrec.distributed.sharded_collection import ShardedHashCollection
from hybridrec.modules.hash_table import PROTECTED_BATCHES
from hybridrec.native import unmix64
from hybridrec.types import FullPolicy

_FIRST_SLOTS = 1024


class _ShadowTable:
    """Which rows of one table the shadow has, and where."""

    def __init__(self, old_keys: NDArray[np.int64], *, may_evict: bool) -> None:
        self.slot_of_key: dict[int, int] = {}
        self.num_slots = _FIRST_SLOTS
        self.next_slot = 0
        self._old_keys = np.sort(old_keys)
        self._may_evict = may_evict
        self._last_used: dict[int, int] = {}

    def is_old(self, keys_U: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Which keys had a row when the mode began."""
        at = np.minimum(np.searchsorted(self._old_keys, keys_U), max(len(self._old_keys) - 1, 0))
        return self._old_keys[at] == keys_U if len(self._old_keys) else np.zeros(len(keys_U), bool)

    def may_be_evicted(self, keys_U: NDArray[np.int64], ordinal: int) -> NDArray[np.bool_]:
        """Which keys a full table may have dropped since their last batch."""
        if not self._may_evict:
            return np.zeros(len(keys_U), bool)
        return np.array([self._last_used.get(k, ordinal) < ordinal - PROTECTED_BATCHES for k in keys_U.tolist()], bool)

    def used(self, keys_U: NDArray[np.int64], ordinal: int) -> None:
        """A batch was trained."""
        if self._may_evict:
            self._last_used.update(dict.fromkeys(keys_U.tolist(), ordinal))

    def forget(self, keys_U: NDArray[np.int64]) -> None:
        """These rows were changed unseen: they are copied when they are next used, like old ones."""
        for key in keys_U.tolist():
            self.slot_of_key.pop(key, None)
        self._old_keys = np.union1d(self._old_keys, keys_U)


@dataclass(kw_only=True)
class _Uniques:
    """The rows of one table in a batch."""

    keys_U: NDArray[np.int64]
    places_U: Tensor
    """int64 [U]: slots, or row numbers of a batch that has no slots."""
    shadow_slots_U: Tensor
    """int64 [U]"""


@dataclass(kw_only=True)
class _Pending:
    """A batch between its forward and its backward."""

    uniques: list[_Uniques]
    """[T]"""
    inputs: list[KernelInput]
    """One a kernel, with slots of the shadow."""
    learning_rates: list[float]


def is_shadowed(module: ShardedHashCollection) -> bool:
    """Whether a shadow stands in a collection's lookup, which has room for one."""
    return "compute" in vars(module.lookup)


class ShadowCollection:
    """Stands in a lookup's ``compute`` and ``update``."""

    def __init__(self, module: ShardedHashCollection, result: Verification, steps: int | None) -> None:
        self._module, self._result, self._steps_left = module, result, steps
        self._lookup: PooledLookup = module.lookup
        self._rank = module.host_group.rank()
        self._pending: dict[BatchTransaction, _Pending] = {}
        self._is_on = False

    def begin(self) -> None:
        """Take over."""
        lookup = self._lookup
        with lookup.log.lock:
            lookup.log.settle()
            self._tables = [
                _ShadowTable(
                    lookup.log.group.entries(t)[0].copy(),
                    may_evict=table.spec.full_policy == FullPolicy.EVICT.value,
                )
                for t, table in enumerate(lookup.tables)
            ]
        self._kernels = [kernel.transient([_FIRST_SLOTS] * len(kernel.spec.tables)) for kernel in lookup.kernels]
        self._real_compute, self._real_update = lookup.compute, lookup.update
        lookup.compute, lookup.update = self._compute, self._update  # type: ignore[method-assign]  # until `end`
        self._is_on = True

    def end(self) -> None:
        """Let go."""
        if self._is_on:
            self._is_on = False
            del self._lookup.compute, self._lookup.update
            self._pending.clear()
            self._kernels.clear()

    # ---- in the lookup's place -----------------------------------------------------------------------------------

    def _compute(self, batch: MappedBatch) -> tuple[Tensor, Any]:
        pooled, saved = self._real_compute(batch)
        assert batch.transaction is not None
        self._pending = {t: p for t, p in self._pending.items() if not t.is_final}
        with self._fails(), torch.no_grad():
            self._look_before(batch, batch.transaction, pooled)
        return pooled, saved

    def _update(self, batch: MappedBatch, saved: Any, grad: Tensor) -> None:
        assert batch.transaction is not None
        kept = grad.detach().clone()
        with self._fails(), self._lookup.log.lock:  # until the rows were compared nothing may move them
            self._real_update(batch, saved, grad)
            with torch.no_grad():
                self._look_after(batch, batch.transaction, kept)

    @contextlib.contextmanager
    def _fails(self) -> Iterator[None]:
        """A difference ends the comparison, and is told with where the row is."""
        try:
            yield
        except VerifyError as e:
            found = e.difference
            if found.id is not None:
                found = dataclasses.replace(
                    found, where=where(self._module, found.table, found.id, column=found.column)
                )
            self._result.difference = found
            self.end()
            raise VerifyError(found) from None

    def _look_before(self, batch: MappedBatch, transaction: BatchTransaction, pooled: Tensor) -> None:
        """Compare a batch's rows and pools, and keep what its update will need."""
        lookup = self._lookup
        step = lookup.log.committed + 1
        shadow_index_N = torch.empty_like(batch.keys.values())
        uniques = []
        for t in range(len(lookup.tables)):
            unique, positions, inverse = self._uniques_of(t, batch, transaction)
            expected, actual = self._bring_in(t, unique, transaction)
            self._compare(t, unique, expected, actual, step, "before the lookup")
            shadow_index_N[positions] = unique.shadow_slots_U[inverse]
            uniques.append(unique)
        inputs = []
        for kernel, part in zip(self._kernels, lookup.table_kernels.occurrences(batch, shadow_index_N), strict=True):
            device, weights_N = kernel.spec.device, part.weights_N
            weights_N = None if weights_N is None else weights_N.to(device)
            inputs.append(KernelInput(part.index_N.to(device), part.offsets.to(device), weights_N))
        rates = [kernel.learning_rate for kernel in lookup.kernels]
        for kernel, one, expected in zip(self._kernels, inputs, lookup.split(batch, pooled), strict=True):
            if not _same(kernel.forward(*one)[0], expected):
                name = kernel.spec.tables[0].name
                raise VerifyError(
                    Difference(rank=self._rank, step=step, table=name, id=None, num_ids=0, moment="in the lookup")
                )
        self._pending[transaction] = _Pending(uniques=uniques, inputs=inputs, learning_rates=rates)

    def _look_after(self, batch: MappedBatch, transaction: BatchTransaction, grad: Tensor) -> None:
        """Step the shadow's rows, and compare."""
        lookup = self._lookup
        pending = self._pending.pop(transaction, None)
        if pending is None:
            self._result.unverified_steps += 1
            for t in range(len(lookup.tables)):
                self._tables[t].forget(np.unique(batch.keys.values()[_positions_of(lookup, batch, t)].numpy()))
            return
        step = lookup.log.committed
        grads = lookup.split(batch, grad)
        for kernel, one, rate, part in zip(self._kernels, pending.inputs, pending.learning_rates, grads, strict=True):
            kernel.learning_rate = rate
            _, saved = kernel.forward(*one)
            kernel.backward(saved, part, step=step)
        for t, unique in enumerate(pending.uniques):
            self._tables[t].used(unique.keys_U, transaction.ordinal)
            expected = read_records(self._arrays(t), unique.shadow_slots_U)
            self._compare(t, unique, expected, self._read(t, unique, transaction), step, "after the update")
            self._result.rows += len(unique.keys_U)
        self._result.steps += 1
        if self._steps_left is not None:
            self._steps_left -= 1
            if self._steps_left == 0:
                self.end()

    # ---- rows ----------------------------------------------------------------------------------------------------

    def _uniques_of(self, t: int, batch: MappedBatch, transaction: BatchTransaction) -> tuple[_Uniques, Tensor, Tensor]:
        """The rows of a table in a batch; positions int64 [n] of its ids, and each one's number among the rows."""
        positions = _positions_of(self._lookup, batch, t)
        keys = batch.keys.values()[positions].numpy()
        keys_U, first_U, inverse = np.unique(keys, return_index=True, return_inverse=True)
        places_U = transaction.slots_N[positions][torch.from_numpy(first_U)]
        if transaction.is_aside and len(keys_U):
            rows, _ = self._lookup.log.group.batch_rows(transaction.ordinal, t)
            places_U = torch.from_numpy(rows.astype(np.int64))[places_U]
        slots = self._slots_for(t, keys_U)
        return _Uniques(keys_U=keys_U, places_U=places_U, shadow_slots_U=slots), positions, torch.from_numpy(inverse)

    def _slots_for(self, t: int, keys_U: NDArray[np.int64]) -> Tensor:
        """Slots of the shadow; -1: it does not have the row."""
        known = self._tables[t].slot_of_key
        return torch.tensor([known.get(key, -1) for key in keys_U.tolist()], dtype=torch.int64)

    def _bring_in(self, t: int, unique: _Uniques, transaction: BatchTransaction) -> tuple[Tensor, Tensor]:
        """Give the shadow the rows that it does not have; what it has then, and what the collection has: [U, width]."""
        table = self._tables[t]
        actual = self._read(t, unique, transaction)
        initial = initial_records(self._lookup.tables[t].spec, torch.from_numpy(unique.keys_U))
        is_missing = (unique.shadow_slots_U < 0).numpy()
        new = is_missing.nonzero()[0]
        self._make_room(t, table.next_slot + len(new))
        for i in new.tolist():
            unique.shadow_slots_U[i] = table.slot_of_key[int(unique.keys_U[i])] = table.next_slot
            table.next_slot += 1
        comes_back = table.may_be_evicted(unique.keys_U, transaction.ordinal) & _rows_equal(actual, initial)
        is_copied = torch.from_numpy(is_missing & table.is_old(unique.keys_U))
        is_initial = torch.from_numpy(is_missing | comes_back) & ~is_copied
        for which, records in ((is_copied, actual), (is_initial, initial)):
            write_records(self._arrays(t), unique.shadow_slots_U[which], records[which])
        return read_records(self._arrays(t), unique.shadow_slots_U), actual

    def _read(self, t: int, unique: _Uniques, transaction: BatchTransaction) -> Tensor:
        """float32 [U, width]: what the collection has."""
        if transaction.is_aside:
            rows = unique.places_U.numpy().astype(np.uint32)
            return torch.from_numpy(self._lookup.log.group.read_records(t, rows))
        return read_slots(self._lookup, t, unique.places_U)

    def _arrays(self, t: int) -> Any:
        k, i = self._lookup.table_kernels.place_of_table[t]
        return self._kernels[k].slot_arrays(i)

    def _make_room(self, t: int, num_rows: int) -> None:
        if num_rows <= self._tables[t].num_slots:
            return
        self._tables[t].num_slots = 2 * num_rows
        of_kernels = self._lookup.table_kernels
        k, _ = of_kernels.place_of_table[t]
        self._kernels[k].resize([self._tables[other].num_slots for other in of_kernels.tables_of_kernel[k]])

    # ---- what differs --------------------------------------------------------------------------------------------

    def _compare(self, t: int, unique: _Uniques, expected: Tensor, actual: Tensor, step: int, moment: str) -> None:
        wrong = np.flatnonzero(~_rows_equal(expected, actual))
        if not wrong.size:
            return
        ids = unmix64(torch.from_numpy(unique.keys_U[wrong])).numpy()
        first = int(wrong[ids.argmin()])
        wanted, got = (split_record(self._lookup, t, record[first]) for record in (expected, actual))
        part = next(name for name in wanted if not _same(wanted[name], got[name]))
        column = next(i for i in range(len(wanted[part])) if not _same(wanted[part][i : i + 1], got[part][i : i + 1]))
        shard = self._module.parts[t]
        raise VerifyError(
            Difference(
                rank=self._rank,
                step=step,
                table=shard.table.name,
                id=int(ids.min()),
                num_ids=len(wrong),
                moment=moment,
                part=part,
                column=column + shard.first_column,
                expected=wanted[part][column].item(),
                got=got[part][column].item(),
            )
        )


def _positions_of(lookup: PooledLookup, batch: MappedBatch, t: int) -> Tensor:
    """int64 [n]: where the ids of a table are in a batch."""
    bounds, feature = batch.feature_offsets.tolist(), 0
    parts = []
    for table, shard in enumerate(lookup.tables):
        for _ in range(shard.num_features):
            if table == t:
                parts.append(torch.arange(bounds[feature], bounds[feature + 1]))
            feature += 1
    return torch.cat(parts)


def _same(first: Tensor, second: Tensor) -> bool:
    """Bit for bit, NaN included."""
    return torch.equal(first.contiguous().view(torch.uint8), second.contiguous().view(torch.uint8))


def _rows_equal(first: Tensor, second: Tensor) -> NDArray[np.bool_]:
    """Which rows are the same, bit for bit, NaN included: bool [U]."""
    equal: NDArray[np.bool_] = (
        (first.contiguous().view(torch.int32) == second.contiguous().view(torch.int32)).all(1).numpy()
    )
    return equal
