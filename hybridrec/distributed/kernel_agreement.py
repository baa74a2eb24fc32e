"""All ranks serve a table with the same kernel class: FBGEMM's where every rank can, plain operators elsewhere."""

from __future__ import annotations

import logging
import zlib
from collections.abc import Sequence

import torch
import torch.distributed as dist

from hybridrec._compat.torch_distributed import all_gather_single
from hybridrec.distributed.routing import TablePart
from hybridrec.errors import ConfigError
from hybridrec.kernels.factory import KernelChoice

logger = logging.getLogger("hybridrec")


def agree_on_kernels(
    parts: Sequence[TablePart], choices: Sequence[KernelChoice], host_group: dist.ProcessGroup
) -> list[KernelChoice]:
    """What this rank alone would choose -> what all ranks do. Collective over the host group.

    Args:
        parts: [T], of all tables.
        choices: [T], this rank's.
        host_group: gloo group of all ranks.

    Raises:
        ConfigError: The ranks' parts are not the same, so that ids would go astray; the same on all ranks.
    """
    world_size = host_group.size()
    if world_size == 1:
        return list(choices)
    description = repr([(p.name, p.table.feature_names, p.first_column, p.dim, p.owner) for p in parts])
    digests = torch.empty(world_size * 2, dtype=torch.int64)
    mine = torch.tensor([len(parts), zlib.crc32(description.encode())])
    all_gather_single(digests, mine, group=host_group)
    counts = digests[::2].tolist()
    if not torch.equal(digests, mine.repeat(world_size)):
        differ = (
            f"have {', '.join(map(str, counts))} of them" if len(set(counts)) > 1 else "name or place them otherwise"
        )
        raise ConfigError(
            f"the ranks do not shard the same tables, or parts of tables: they {differ}. Build the same model, and the "
            "same plan, on all ranks: EmbeddingShardingPlanner.collective_plan gives all ranks one plan."
        )
    mine = torch.tensor([choice.name == "tbe" for choice in choices], dtype=torch.uint8)
    everyone = torch.empty(world_size * len(parts), dtype=torch.uint8)
    all_gather_single(everyone, mine, group=host_group)
    lacking = 1 - everyone.view(world_size, len(parts))
    agreed = list(choices)
    for t in (lacking.any(0) & mine.bool()).nonzero().flatten().tolist():
        rank = int(lacking[:, t].argmax())
        agreed[t] = KernelChoice("torch", f"rank {rank} cannot use FBGEMM's kernel for it")
        logger.warning("table %r uses plain operators on all ranks: %s", parts[t].name, agreed[t].reason)
    return agreed
