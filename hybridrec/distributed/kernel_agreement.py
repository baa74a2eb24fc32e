"""All ranks serve a table with the same kernel class: FBGEMM's where every rank can, plain operators elsewhere."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch
import torch.distributed as dist

from hybridrec._compat.torch_distributed import all_gather_single
from hybridrec.errors import ConfigError
from hybridrec.kernels.factory import KernelChoice

logger = logging.getLogger("hybridrec")


def agree_on_kernels(
    tables: Sequence[str], choices: Sequence[KernelChoice], host_group: dist.ProcessGroup
) -> list[KernelChoice]:
    """What this rank alone would choose -> what all ranks do. Collective over the host group.

    Args:
        tables: [T], names.
        choices: [T], this rank's.
        host_group: gloo group of all ranks.

    Raises:
        ConfigError: The ranks shard different numbers of tables; the same on all ranks.
    """
    world_size = host_group.size()
    if world_size == 1:
        return list(choices)
    counts = torch.empty(world_size, dtype=torch.int64)
    all_gather_single(counts, torch.tensor([len(tables)]), group=host_group)
    if len(set(counts.tolist())) > 1:
        raise ConfigError(
            f"the ranks shard collections of {', '.join(map(str, counts.tolist()))} tables. Build the same model, and "
            "the same plan, on all ranks."
        )
    mine = torch.tensor([choice.name == "tbe" for choice in choices], dtype=torch.uint8)
    everyone = torch.empty(world_size * len(tables), dtype=torch.uint8)
    all_gather_single(everyone, mine, group=host_group)
    lacking = 1 - everyone.view(world_size, len(tables))
    agreed = list(choices)
    for t in (lacking.any(0) & mine.bool()).nonzero().flatten().tolist():
        rank = int(lacking[:, t].argmax())
        agreed[t] = KernelChoice("torch", f"rank {rank} cannot use FBGEMM's kernel for it")
        logger.warning("table %r uses plain operators on all ranks: %s", tables[t], agreed[t].reason)
    return agreed
