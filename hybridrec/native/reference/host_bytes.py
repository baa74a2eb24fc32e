"""What a shard of this implementation accounts for, as a function of its shape."""

from __future__ import annotations

from hybridrec.native.reference.row_store import RowStore
from hybridrec.native.reference.table_shard import ROW_INDEX_BYTES, SLOT_INDEX_BYTES


def planned_host_bytes(
    *, wide_floats: int, num_row_wise_states: int, num_rows: int, num_slots: int, store_rows: int
) -> int:
    """``Counters.host_bytes`` once ``num_rows`` rows live, the first ``store_rows`` of which were written back."""
    store = RowStore(wide_floats + num_row_wise_states)
    num_chunks = -(-store_rows // store.rows_per_chunk)
    return num_rows * ROW_INDEX_BYTES + num_slots * SLOT_INDEX_BYTES + store.chunk_bytes(num_chunks)
