"""Lookups that leave no trace: the batch's unique rows are copied to where a kernel of the same class looks."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from hybridrec.backend import DeviceBackend
from hybridrec.cache import TransactionLog
from hybridrec.cache.staging import StreamCopies
from hybridrec.distributed.table_kernels import TableKernels
from hybridrec.kernels.base import LookupKernel


class RowReader:
    """Copies rows of one collection, wherever they are (slot, store, or computed), into kernels of its own.

    No batch may be planned and not moved. One caller at a time.
    """

    def __init__(
        self,
        tables: TableKernels,
        log: TransactionLog,
        backend: DeviceBackend,
        device: torch.device,
    ) -> None:
        """
        Args:
            tables: Whose slots hold the resident rows.
            log: Of the shards.
            backend: Of the device.
            device: Where the kernels are.
        """
        self._tables = tables
        self._log, self._backend, self._device = log, backend, device
        self._readers: list[LookupKernel] = []
        self.copies = StreamCopies(backend, device)
        """For what is looked up in the rows that were read."""

    def read(self, keys_N: Tensor, feature_offsets: Tensor) -> tuple[Tensor, list[LookupKernel]]:
        """
        Args:
            keys_N: int64 [N], host memory.
            feature_offsets: int64 [F + 1], host memory.

        Returns:
            int64 [N], host memory: where each key's row is; and the kernels that have them, one for each given.
        """
        group = self._log.group
        index_N, counts = torch.empty_like(keys_N), torch.empty(len(self._tables.tables), dtype=torch.int64)
        handle = group.read_plan(keys_N, feature_offsets, self._tables.feature_table, index_N, counts)
        try:
            readers = self._readers_for(counts.tolist())
            buffers = [readers[k].slot_arrays(t).weights for k, t in self._tables.place_of_table]
            if self._backend.is_host_memory:
                group.read_rows(handle, buffers, host_only=False)
            else:
                self._read_to_device(handle, buffers, counts.tolist())
        finally:
            group.end_read(handle)
        return index_N, readers

    def _read_to_device(self, handle: int, buffers: Sequence[Tensor], counts: Sequence[int]) -> None:
        group = self._log.group
        host = [torch.empty((n, b.shape[1])) for n, b in zip(counts, buffers, strict=True)]
        group.read_rows(handle, host, host_only=True)
        stream = self._backend.current_stream(self._device)
        stream.wait_event(self._log.swapper.ready())  # rows of batches in flight may still be on their way in
        resident = [tensor for t in range(len(buffers)) for tensor in group.read_resident(handle, t)]
        placed = self.copies.upload([*host, *resident])
        for t, (rows, buffer) in enumerate(zip(placed, buffers, strict=False)):
            buffer[: rows.shape[0]].copy_(rows)
            positions, slots = placed[len(buffers) + 2 * t : len(buffers) + 2 * t + 2]
            buffer.index_copy_(0, positions, self._tables.slot_arrays(t).weights.index_select(0, slots))
        self._log.read_until(self._backend.record_event(stream))

    def _readers_for(self, counts: Sequence[int]) -> list[LookupKernel]:
        """Kernels with room for so many rows of each table."""
        sizes: list[list[int]] = [[] for _ in self._tables.kernels]
        for (kernel, _), count in zip(self._tables.place_of_table, counts, strict=True):
            sizes[kernel].append(count)
        if not self._readers:
            self._readers = [
                kernel.reader([max(1, n) for n in s]) for kernel, s in zip(self._tables.kernels, sizes, strict=True)
            ]
        for reader, wanted in zip(self._readers, sizes, strict=True):
            have = [t.num_slots for t in reader.spec.tables]
            self._use_here(reader)
            if any(n > h for n, h in zip(wanted, have, strict=True)):
                reader.resize([max(h, n + n // 2) if n > h else h for n, h in zip(wanted, have, strict=True)])
        return self._readers

    def _use_here(self, reader: LookupKernel) -> None:
        """Evaluation reads on one stream, what is frozen on another: memory waits for both before others get it."""
        if self._backend.is_host_memory:
            return
        stream = self._backend.current_stream(self._device)
        for table in range(len(reader.spec.tables)):
            arrays = reader.slot_arrays(table)
            for tensor in (arrays.weights, *arrays.row_states, *arrays.row_wise_states):
                self._backend.record_stream(tensor, stream)
