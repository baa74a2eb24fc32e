"""The native core in plain Python and numpy: the readable specification, and what serves where no compiler is.

It decides exactly as the C++ core does, call by call and bit by bit; docs/design/transaction.md says what, these files
say how. Same names as in C++: `mix64`, `initial_rows`, `id_map`, `slot_index`, `row_store`, `journal`, `shard_group`.
"""

from hybridrec.native.reference.host_bytes import planned_host_bytes
from hybridrec.native.reference.initial_rows import initial_rows
from hybridrec.native.reference.mix64 import mix64, table_seed, unmix64
from hybridrec.native.reference.shard_group import ShardGroup

__all__ = ["ShardGroup", "initial_rows", "mix64", "planned_host_bytes", "table_seed", "unmix64"]
