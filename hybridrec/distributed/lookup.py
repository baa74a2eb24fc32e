"""MAP, SWAP and COMPUTE of one collection on one rank: from the keys that it owns to partial pools.

Owns the shard group, the kernels with their slots, and the transaction log. Knows nothing of other ranks.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from hybridrec._compat.grad_scaler import refuse_scaled_losses
from hybridrec.backend import DeviceBackend
from hybridrec.cache import BatchTransaction, HostMemorySwapper, Lease, StagedSwapper, TransactionLog
from hybridrec.distributed.frozen_tables import FrozenPart, frozen_of, split_frozen
from hybridrec.distributed.gradient_group import SECOND_BACKWARD, GradientGroup
from hybridrec.distributed.mapped_batch import MappedBatch, offsets_of_features
from hybridrec.distributed.oversized import PassLookup
from hybridrec.distributed.refusal import refusal_error
from hybridrec.distributed.row_reader import RowReader
from hybridrec.distributed.shard_table import ShardTable
from hybridrec.distributed.shard_watch import ShardWatch
from hybridrec.distributed.slot_growth import SlotGrowth
from hybridrec.distributed.slot_parameter import SlotParameter, slot_parameter
from hybridrec.distributed.table_kernels import TableKernels
from hybridrec.errors import CapacityError, HybridRecError, StateError
from hybridrec.kernels.base import LookupKernel
from hybridrec.metrics import TableStats
from hybridrec.native import ShardGroup
from hybridrec.native.protocol import Plan, PlanStatus
from hybridrec.store.row_export import RowChunk, RowExport, ShardRows, export_shard

MAX_CORE_THREADS = 8
"""Threads of the native core: as many as torch has, but no more. They change no result."""


class PooledLookup(nn.Module):
    """Partial pools of the rows that this rank owns, and their update in the backward.

    Tables are ordered kernel after kernel; features are fed in the order of their tables.
    """

    is_pooled = True

    def __init__(
        self,
        kernels: Sequence[Sequence[ShardTable]],
        *,
        is_weighted: bool,
        device: torch.device,
        backend: DeviceBackend,
        rank: int,
        world_size: int,
        host_budget_bytes: int,
    ) -> None:
        """
        Args:
            kernels: The tables of every kernel.
            is_weighted: Whether ids carry weights.
            device: Where the slots are.
            backend: Of that device.
            rank: This rank, for messages and statistics.
            world_size: W.
            host_budget_bytes: Most host memory for shards; 0 = no limit.
        """
        super().__init__()
        refuse_scaled_losses()
        self._device, self._backend = device, backend
        self._rank, self._world_size = rank, world_size
        self.table_kernels = TableKernels(kernels, is_weighted=is_weighted, is_pooled=self.is_pooled, device=device)
        self._tables = self.table_kernels.tables
        self._group = ShardGroup(
            [table.spec for table in self._tables],
            host_budget_bytes=host_budget_bytes,
            num_threads=min(torch.get_num_threads(), MAX_CORE_THREADS),
        )
        self._params = [
            slot_parameter(self.table_kernels.weights(t), table.name) for t, table in enumerate(self._tables)
        ]
        if backend.is_host_memory:
            swapper: HostMemorySwapper | StagedSwapper = HostMemorySwapper(self._group)
        else:
            widths = [table.layout.record_floats for table in self._tables]
            swapper = StagedSwapper(self._group, self.table_kernels.slot_arrays, widths, backend, device)
        self.log = TransactionLog(self._group, swapper)
        self._exports: weakref.WeakSet[ShardRows] = weakref.WeakSet()
        self.num_imports = 0
        """How often rows came or went that no batch trained."""
        for t in range(len(self._tables)):
            self._publish_slots(t)
        where = f"rank {rank} of {world_size}"
        self.growth = SlotGrowth(self.table_kernels, self.log, self._publish_slots, backend, device, where=where)
        """Of the slots of tables that keep only batches in flight there."""
        self.gradients = GradientGroup(self)
        """Of batches whose rows are not stepped yet."""
        self._passes = PassLookup(self.table_kernels, self.log, backend, device)
        self._reader = RowReader(self.table_kernels, self.log, backend, device)
        if not backend.is_host_memory:  # what made the slots is still on its way
            self.log.read_until(backend.record_event(backend.current_stream(device)))
        self._watch = ShardWatch(self._group, self._tables, where=where, host_budget_bytes=host_budget_bytes)
        # What makes autograd record the lookup: the kernels update rows themselves, no parameter gets a gradient.
        self._anchor = torch.empty(0, device=device, requires_grad=True)
        self._num_retries = [0] * len(self._tables)
        self._num_oversized = [0] * len(self._tables)

    @property
    def device(self) -> torch.device:
        """Where the slots are."""
        return self._device

    @property
    def total_dim(self) -> int:
        """Columns of the output."""
        return sum(self.table_kernels.dims)

    @property
    def passes(self) -> PassLookup:
        """How batches without slots are computed."""
        return self._passes

    @property
    def kernels(self) -> list[LookupKernel]:
        return self.table_kernels.kernels

    @property
    def tables(self) -> list[ShardTable]:
        """[T], in the order of the kernels."""
        return self._tables

    @property
    def table_names(self) -> list[str]:
        """[T], in the order of the kernels."""
        return [table.name for table in self._tables]

    @property
    def slot_parameters(self) -> list[SlotParameter]:
        """[T] x [C, D] of the table's type: views of the slots, for those who list a model's parameters."""
        return self._params

    def map(
        self, keys: KeyedJaggedTensor, *, is_training: bool, may_wait: Callable[[], bool] | None = None
    ) -> MappedBatch | HybridRecError:
        """MAP: give every id of a training batch a slot, or say why that is not possible.

        Args:
            keys: Keys that this rank owns, F features, host memory.
            is_training: False: nothing is decided or changed; the batch will be read.
            may_wait: Whether to wait while batches in flight pin the slots that are needed; asked anew whenever
                `TransactionLog.wake` is called. None: never.

        Returns:
            The mapped batch, or the refusal as an error that nobody raised yet; nothing changed then.
        """
        self.require_whole()
        feature_offsets = offsets_of_features(keys)
        frozen_T = self.frozen_tables()
        if not is_training:
            return MappedBatch(transaction=None, lease=None, keys=keys, feature_offsets=feature_offsets)
        if not any(frozen_T):
            return self._map_training(keys, feature_offsets, may_wait)
        is_frozen_F = torch.tensor(frozen_T)[self.table_kernels.feature_table]
        trained, read = split_frozen(keys, is_frozen_F)
        mapped = self._map_training(trained, offsets_of_features(trained), may_wait)
        if isinstance(mapped, MappedBatch):
            frozen = MappedBatch(transaction=None, lease=None, keys=read, feature_offsets=offsets_of_features(read))
            is_frozen = is_frozen_F.repeat_interleave(self._widths(feature_offsets))
            at = (~is_frozen).nonzero().flatten(), is_frozen.nonzero().flatten()
            mapped.frozen = FrozenPart(batch=frozen, where=(is_frozen,) if self.is_pooled else at)
        return mapped

    def _widths(self, feature_offsets: Tensor) -> Tensor:
        """int64 [F]: places of each feature in the output of a batch, along what `FrozenPart.merge` merges."""
        return torch.tensor([self._tables[t].layout.dim for t in self.table_kernels.feature_table.tolist()])

    def frozen_tables(self) -> tuple[bool, ...]:
        """[T]: which tables do not train now; see `frozen_tables.frozen_of`."""
        return frozen_of(self._params, self._tables)

    def _map_training(
        self, keys: KeyedJaggedTensor, feature_offsets: Tensor, may_wait: Callable[[], bool] | None
    ) -> MappedBatch | HybridRecError:
        self._watch.warn()
        slots_N = torch.empty_like(keys.values())
        while True:
            self.require_whole()  # an update may have failed while this waited for its pins
            seen = self.log.num_releases
            self.log.settle()
            if self.log.is_any_aside and may_wait is not None and self.log.wait_for_release(seen, may_wait):
                continue  # it needs every row where it stays until it is done
            self.growth.grow_all()
            planned = self.log.plan(keys.values(), feature_offsets, self.table_kernels.feature_table, slots_N)
            if isinstance(planned, BatchTransaction):
                self._watch.planned(planned.plan)
                lease = Lease(planned)
                return MappedBatch(transaction=planned, lease=lease, keys=keys, feature_offsets=feature_offsets)
            if planned.status != PlanStatus.NO_SLOTS:
                return self._refusal(planned)
            has_grown = self.growth.fits_without_pins(planned.table, planned.needed) and self.growth.grow(planned.table)
            self._num_retries[planned.table] += 1
            if has_grown:
                continue
            if self.log.num_open and may_wait is not None and self.log.wait_for_release(seen, may_wait):
                continue
            return self._map_aside(keys, feature_offsets, planned)

    def _map_aside(
        self, keys: KeyedJaggedTensor, feature_offsets: Tensor, planned: Plan
    ) -> MappedBatch | CapacityError:
        """MAP a batch whose rows the slots cannot hold, those of batches in flight beside it: it gets none."""
        index_N = torch.empty_like(keys.values())
        try:
            result = self.log.plan_aside(keys.values(), feature_offsets, self.table_kernels.feature_table, index_N)
        except (CapacityError, StateError) as e:  # the host budget
            self._num_retries[planned.table] -= 1  # so it was refused for good
            return CapacityError(f"rank {self._rank} of {self._world_size}: {e} Raise host_memory_bytes.")
        if not isinstance(result, BatchTransaction):
            return self._refusal(result)
        self._watch.oversized(planned, slots=self.growth.num_slots[planned.table])
        mapped = MappedBatch(transaction=result, lease=Lease(result), keys=keys, feature_offsets=feature_offsets)
        mapped.oversized_table = planned.table
        return mapped

    def _refusal(self, planned: Plan) -> CapacityError:
        table = self._tables[planned.table] if planned.table >= 0 else None
        return refusal_error(planned, table, rank=self._rank, world_size=self._world_size)

    def swap(self, batch: MappedBatch) -> None:
        """SWAP: move a training batch's rows into their slots, and what the kernels look up to where they are.

        Idempotent for a batch. One that only reads is not moved: it is read when it is computed.
        """
        if batch.is_swapped:
            return
        if batch.transaction is not None:
            self._move_rows(batch.transaction)
            if not batch.transaction.is_aside:
                batch.inputs = self.table_kernels.inputs(batch, batch.transaction.slots_N, self.log.swapper.upload)
            if batch.frozen is not None:
                self._read_frozen(batch.frozen)
        batch.ready = self.log.swapper.ready()
        batch.is_swapped = True

    def _read_frozen(self, frozen: FrozenPart) -> None:
        """Look up what does not train, while no batch is planned and not moved. It is the same until it trains."""
        frozen.output = self._read(frozen.batch)
        frozen.where = tuple(self._reader.copies.upload(list(frozen.where)))
        if not self._backend.is_host_memory:
            frozen.ready = self._backend.record_event(self._backend.current_stream(self._device))

    def end_frozen_read(self, batch: MappedBatch) -> None:
        """A batch is over, or taken back: what its frozen rows were read from may be written after that."""
        if batch.frozen is None or batch.frozen.ready is None:
            return
        stream = self._backend.current_stream(self._device)
        for event in (self.log.fence, batch.frozen.ready):
            if event is not None:
                stream.wait_event(event)
        self.log.read_until(self._backend.record_event(stream))

    def _move_rows(self, transaction: BatchTransaction) -> None:
        try:
            transaction.swap()
        except BaseException as e:
            if self.log.swapper.is_half_moved:
                self.log.broken = f"SWAP of batch {transaction.ordinal} failed half-way: {type(e).__name__}: {e}"
            else:
                transaction.undo()
            raise

    def upload(self, tensor: Tensor) -> Tensor:
        """A small host tensor of a batch on the device, ordered before the batch's ``ready``; call it before `swap`."""
        return self.log.swapper.upload([tensor])[0]

    def use(self, tensors: Sequence[Tensor], ready: Any) -> None:
        """Order this thread's stream behind ``ready``, and keep what was uploaded alive until it was used there."""
        if ready is None:
            return
        stream = self._backend.current_stream(self._device)
        stream.wait_event(ready)
        for tensor in tensors:
            self._backend.record_stream(tensor, stream)

    def flush(self) -> None:
        """Write every row that is newer on the device back to the store. No batch may be in flight and not moved."""
        self.log.flush()

    def export_rows(self, table: str, *, chunk_rows: int | None = None) -> RowExport:
        """This rank's committed rows of a table as they are now; see `export_shard`. Flushes first."""
        self.require_whole()
        self.flush()
        t = self.table_names.index(table)
        rows = ShardRows(self._group, t, self._tables[t].layout)
        self._exports.add(rows)
        return export_shard(rows, chunk_rows=chunk_rows)

    def export_tables(self, *, above_score: int = 0) -> dict[str, ShardRows]:
        """This rank's committed rows of all tables as they are now; see `ShardRows`. Flushes first, once."""
        self.require_whole()
        self.flush()
        exports = {
            table.name: ShardRows(self._group, t, table.layout, above_score=above_score)
            for t, table in enumerate(self._tables)
        }
        self._exports.update(exports.values())
        return exports

    def forget_rows(self, *, ordinal: int, committed: int, num_batches: int) -> None:
        """Drop all rows, and go on as after a batch with this ordinal; see `import_rows`.

        Args:
            ordinal: The next batch gets the one after it.
            committed: Steps of the optimizer so far.
            num_batches: Training batches so far.

        Raises:
            StateError: A batch is in flight, or rows are being exported. Nothing changed.
        """
        self.require_replaceable()
        self.num_imports += 1
        for t in range(len(self._tables)):
            self._group.clear_rows(t)
        self._group.set_ordinal(ordinal)
        self.log.committed, self.log.num_batches = committed, num_batches

    def require_idle(self) -> None:
        """Raise `StateError` if a batch is in flight, or some rows are as before a batch and some are not."""
        self.require_whole()
        self.log.settle()
        if self.log.num_open:
            raise StateError(
                f"rows cannot be replaced while batches are in flight ({self.log.num_open}). Run their backward, let "
                "go of their losses, or reset() the pipeline first."
            )

    def require_replaceable(self) -> None:
        """As `require_idle`; and raise `StateError` if somebody still reads the rows as they were."""
        self.require_idle()
        if any(not rows.is_closed for rows in self._exports):
            raise StateError(
                f"rank {self._rank} of {self._world_size} still writes a snapshot of its rows; they cannot be replaced "
                "meanwhile. Let the Checkpointer finish first (close(), or the end of its with block), or read "
                "export_rows() to its end."
            )

    def import_rows(self, table: str, rows: RowChunk) -> None:
        """Insert rows of this rank's shard with their state and score; they go to the host's store."""
        t = self.table_names.index(table)
        self.num_imports += 1
        self._group.import_rows(t, rows.ids_N, rows.scores_N, rows.records(self._tables[t].layout))

    def forward(self, batch: MappedBatch) -> Tensor:
        """COMPUTE: float32 [bags of all ranks, columns of all kernels], on the device."""
        if batch.transaction is None:
            # Readers stay for batches to come, and FBGEMM's operator is known to autograd alone: no inference tensors.
            with torch.inference_mode(False), torch.no_grad():
                return self._read(batch)
        pooled: Tensor = _PooledLookup.apply(self._anchor, self, batch)
        return pooled

    def stats(self) -> tuple[TableStats, ...]:
        """One value a table, this rank's."""
        self.log.settle()
        return tuple(
            TableStats(
                table=table.name,
                rank=self._rank,
                kernel=table.kernel,
                slots=self.growth.num_slots[t],
                oversized=self._num_oversized[t],
                oversized_bytes=self._passes.moved_bytes[t],
                **self._counters(t),
            )
            for t, table in enumerate(self._tables)
        )

    def _counters(self, table: int) -> dict[str, int]:
        counters = self._group.counters(table)._asdict()
        counters["rejected"] -= self._num_retries[table]  # plans that were taken once slots had grown or pins had gone
        return counters

    # ---- compute -------------------------------------------------------------------------------------------------

    def compute(self, batch: MappedBatch) -> tuple[Tensor, Any]:
        """Run the kernels on a batch whose rows are in their slots; what `update` needs comes along."""
        assert batch.transaction is not None
        if batch.transaction.is_aside:
            occurrences = self.table_kernels.occurrences(batch, batch.transaction.slots_N)
            parts, kept = self._passes.forward(batch.transaction, occurrences)
            return self.join(parts), kept
        assert batch.inputs is not None
        self.use([t for one in batch.inputs for t in one if t is not None], batch.ready)
        pooled, saved = [], []
        for kernel, kernel_input in zip(self.kernels, batch.inputs, strict=True):
            part, kept = kernel.forward(*kernel_input)
            pooled.append(part)
            saved.append(kept)
        self.mark_use(batch.transaction)
        return self._joined(pooled, batch), saved

    def update(self, batch: MappedBatch, saved: Any, grad: Tensor) -> None:
        """Step every row of a batch once, then commit."""
        assert batch.transaction is not None
        step = self.log.committed + 1
        grads = self.split(batch, grad)
        if self.gradients.is_on:
            self.gradients.add(batch, grads)
            if batch.transaction.is_aside:
                self._num_oversized[batch.oversized_table] += 1
            return
        if batch.transaction.is_aside:
            self.log.flush()  # of batches that were trained since the forward
        try:
            if batch.transaction.is_aside:
                self._passes.backward(batch.transaction, saved, grads, step=step)
                self._num_oversized[batch.oversized_table] += 1
            else:
                for kernel, kept, part in zip(self.kernels, saved, grads, strict=True):
                    kernel.backward(kept, part, step=step)
        except Exception as e:
            self.log.broken = (
                f"the update of batch {batch.transaction.ordinal} failed half-way: {type(e).__name__}: {e}"
            )
            raise
        self.mark_use(batch.transaction)
        batch.transaction.commit()

    def mark_use(self, transaction: BatchTransaction) -> None:
        """The device was given work that uses a batch's slots."""
        if not self._backend.is_host_memory:
            transaction.used(self._backend.record_event(self._backend.current_stream(self._device)))

    def _read(self, batch: MappedBatch) -> Tensor:
        """Look rows up without a trace. Reads on several streams are ordered by the fence."""
        self.log.settle()
        if self.log.fence is not None:
            self._backend.current_stream(self._device).wait_event(self.log.fence)
        index_N, readers = self._reader.read(batch.keys.values(), batch.feature_offsets)
        inputs = self.table_kernels.inputs(batch, index_N, self._reader.copies.upload)
        pooled = [reader.forward(*one)[0] for reader, one in zip(readers, inputs, strict=True)]
        if not self._backend.is_host_memory:
            self.log.read_until(self._backend.record_event(self._backend.current_stream(self._device)))
        return self._joined(pooled, batch)

    def _joined(self, parts: Sequence[Tensor], batch: MappedBatch) -> Tensor:
        """As `join`; a rank that owns no table has no columns."""
        num_bags = batch.keys.stride() if self.is_pooled else 0
        return self.join(parts) if parts else torch.empty((num_bags, 0), device=self._device)

    def join(self, parts: Sequence[Tensor]) -> Tensor:
        """What the kernels gave, as one tensor."""
        return torch.cat(list(parts), 1) if len(parts) > 1 else parts[0]

    def split(self, batch: MappedBatch, output: Tensor) -> tuple[Tensor, ...]:
        """The parts of the kernels in something like the output of a batch."""
        parts: tuple[Tensor, ...] = output.split(self.table_kernels.dims, 1)
        return parts

    def _publish_slots(self, table: int) -> None:
        """Tell the group, and those who hold the parameter, where a table's slots are."""
        arrays = self.table_kernels.slot_arrays(table)
        self._params[table].data = self.table_kernels.weights(table)
        self.log.swapper.slots_are_at(arrays)
        if self._backend.is_host_memory:
            self._group.bind_slots(table, *arrays)

    def require_whole(self) -> None:
        """Raise `StateError` if an update of rows has failed half-way."""
        if self.log.broken:
            raise StateError(
                f"rank {self._rank} of {self._world_size}: {self.log.broken}. Some rows are as before and some are "
                "not, so this collection cannot be used any more. Start again from the last checkpoint."
            )


class _PooledLookup(torch.autograd.Function):
    """The autograd node of one batch. It holds the lease: backward commits, being freed without one abandons."""

    steps_rows_in_backward = True  # read by _compat.grad_scaler

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, lookup: PooledLookup, batch: MappedBatch) -> Tensor:
        assert batch.transaction is not None
        batch.transaction.start()
        ctx.lookup, ctx.transaction = lookup, batch.transaction
        pooled, saved = lookup.compute(batch)
        ctx.pending = batch, saved  # the batch brings its lease along
        if batch.frozen is None:
            return pooled
        lookup.use(batch.frozen.tensors, batch.frozen.ready)
        return batch.frozen.merge(pooled, is_pooled=lookup.is_pooled)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        ctx.transaction.require_computing()
        ctx.lookup.require_whole()
        if ctx.pending is None:
            raise StateError(SECOND_BACKWARD)
        batch, saved = ctx.pending
        ctx.pending = None  # a loss that is kept keeps no batch
        if batch.frozen is not None:
            grad = batch.frozen.trained_part(grad, is_pooled=ctx.lookup.is_pooled)
        ctx.lookup.update(batch, saved, grad)
        return None, None, None
