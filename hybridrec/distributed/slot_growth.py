"""Slots of tables whose rows are in slots only while batches are in flight (`fused_uvm`): as many as batches need."""

from __future__ import annotations

import logging
from collections.abc import Callable

import torch

from hybridrec.backend import DeviceBackend
from hybridrec.cache import TransactionLog
from hybridrec.distributed.placement import Placement
from hybridrec.distributed.table_kernels import TableKernels
from hybridrec.errors import CapacityError, StateError

logger = logging.getLogger("hybridrec")


class SlotGrowth:
    """How many slots each table of a lookup has, and wants. The thread that maps calls it."""

    def __init__(
        self,
        tables: TableKernels,
        log: TransactionLog,
        publish: Callable[[int], None],
        backend: DeviceBackend,
        device: torch.device,
        *,
        where: str,
    ) -> None:
        """
        Args:
            tables: Whose slots they are.
            log: Of the batches that use the slots.
            publish: Tells others where the slots of a table have moved.
            backend: Of the device.
            device: Where the slots are.
            where: The rank, for messages.
        """
        self._tables, self._log, self._publish = tables, log, publish
        self._backend, self._device, self._where = backend, device, where
        # Slots are of the stream that made them, wherever they grow: memory that another stream copies from could be
        # freed, and be given to the training thread, before the copy is over.
        self._stream = backend.current_stream(device)
        self.num_slots = [table.placed.num_slots for table in tables.tables]
        """[T], as they are."""
        self.batches_in_flight = 1
        """How many batches a pipeline wants to have slots at a time: what growing slots make room for."""
        self._grows = [table.placed.placement is Placement.HOST for table in tables.tables]
        self._wanted: dict[int, int] = {}

    def fits_without_pins(self, table: int, needed: int) -> bool:
        """Whether a batch fits the slots once no other is in flight; a table that keeps only those gets more."""
        now = self.num_slots[table]
        if not self._grows[table]:
            return needed <= now
        room = needed * self.batches_in_flight
        if room > now:
            self._wanted[table] = max(self._wanted.get(table, 0), room, now + now // 2)
        return True

    def grow_all(self) -> None:
        """`grow` for every table that wants slots."""
        for table in list(self._wanted):
            self.grow(table)

    def grow(self, table: int) -> bool:
        """As many slots as are wanted for a table; whether it got any.

        It does not while a batch is in flight in any table of its kernel, whose slots are about to move.

        Raises:
            CapacityError: The host budget is exhausted. Nothing changed; the table wants no more than it has.
        """
        if table not in self._wanted:
            return False
        k, index = self._tables.place_of_table[table]
        kernel = self._tables.kernels[k]
        if any(self._log.group.counters(t).pins for t in self._tables.tables_of_kernel[k]):
            return False
        wanted, name = self._wanted[table], self._tables.tables[table].name
        logger.info("table %r: slots for batches in flight grow to %s", name, f"{wanted:,}")
        sizes = [t.num_slots for t in kernel.spec.tables]
        sizes[index] = wanted
        with self._log.lock:
            try:
                self._log.group.resize_slots(table, wanted)
            except StateError as e:  # the host budget
                del self._wanted[table]
                raise CapacityError(
                    f"table {name!r} ({self._where}): {e} Raise host_memory_bytes, or make the batch smaller."
                ) from e
            self._backend.synchronize(self._device)  # other streams may still use what moves now; this is rare
            with self._backend.use_stream(self._stream):
                kernel.resize(sizes)
            self._backend.synchronize(self._device)
            self.num_slots[table] = wanted
            del self._wanted[table]
            for t in self._tables.tables_of_kernel[k]:
                self._publish(t)
        return True
