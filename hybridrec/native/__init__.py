"""The native core: id maps, slot indices and row stores of the table shards, without any knowledge of training.

`ShardGroup` and the functions take torch tensors in host memory and call the C++ core, or its numpy reference where
that was not built. The contract is `hybridrec.native.protocol`.
"""

from hybridrec.native.core import core_description, has_compiled_core
from hybridrec.native.functions import initial_rows, mix64, planned_host_bytes, table_seed, unmix64
from hybridrec.native.shard_group import ShardGroup

__all__ = [
    "ShardGroup",
    "core_description",
    "has_compiled_core",
    "initial_rows",
    "mix64",
    "planned_host_bytes",
    "table_seed",
    "unmix64",
]
