"""Do a device's collectives move what they are told to? Asked once, before the first rows are trained over them.

An all-to-all that returns success and zeros exists in the field. Training would go on, silently wrong.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from hybridrec._compat.torch_distributed import all_gather_single, reduce_scatter_single
from hybridrec.backend import HOST
from hybridrec.distributed.verdict import agree
from hybridrec.errors import BackendError

_BAGS = 1024
"""Of the smallest rank; ranks differ, as their batches may."""
_MAX_FLOATS = 1 << 22
"""Most that one rank sends: 16 MiB."""
_VALUES = 1 << 24
"""Whole numbers below are exact in float32."""

_REMEDY = (
    "Check driver, firmware and versions of the device's libraries (python -m hybridrec.doctor tests the collectives "
    "one by one), or train on another device."
)
_Test = Callable[[dist.ProcessGroup, torch.device, Sequence[int]], tuple[Tensor, Tensor]]

_tested: weakref.WeakKeyDictionary[dist.ProcessGroup, set[torch.device]] = weakref.WeakKeyDictionary()


def check_collectives(
    group: dist.ProcessGroup, device: torch.device, *, total_dim: int, host_group: dist.ProcessGroup
) -> None:
    """Send known values of a collection's size through a group; does nothing the second time.

    Collective over both groups: after each of the tests the ranks agree, so that none goes on alone.

    Args:
        group: Pools will travel over it.
        device: Where they are.
        total_dim: Columns of a pool.
        host_group: gloo group of the same ranks.

    Raises:
        BackendError: Other values arrived at some rank, or a collective raised there; the same on all ranks.
    """
    tested = _tested.setdefault(group, set())
    if group.size() == 1 or device in tested:
        return
    world_size = group.size()
    bags = max(1, min(_BAGS, _MAX_FLOATS // (world_size * 3 * total_dim)))
    sizes = [bags * (1 + r % 3) * total_dim for r in range(world_size)]
    for test in (_all_to_all, _all_gather, _reduce_scatter):
        agreed = agree(_problem(test, group, device, sizes), host_group)
        if agreed is not None:
            raise agreed
    tested.add(device)


def _problem(test: _Test, group: dist.ProcessGroup, device: torch.device, sizes: Sequence[int]) -> BackendError | None:
    """What is wrong with a collective at this rank."""
    where = (
        f"rank {group.rank()} of {group.size()}: self-test of {dist.get_backend(group)!r} on {str(device)!r}: "
        f"{test.__name__.removeprefix('_')}"
    )
    try:
        received, expected = test(group, device, sizes)
        received = received.to(HOST)
    except RuntimeError as e:
        return BackendError(f"{where} raised {type(e).__name__}: {e}. {_REMEDY}")
    wrong = (received != expected).nonzero().flatten()
    if not wrong.numel():
        return None
    first = int(wrong[0])
    return BackendError(
        f"{where} returned without an error, but {wrong.numel():,} of {expected.numel():,} values arrived wrong: value "
        f"{first} is {received[first].item():g}, not {expected[first].item():g}. Training over it would be silently "
        f"wrong. {_REMEDY}"
    )


def _block(source: int, target: int, size: int) -> Tensor:
    """float32 [size], never 0: what rank ``source`` sends to rank ``target``."""
    return ((torch.arange(size) * 7 + source * 65_537 + target * 1_009) % (_VALUES - 1) + 1).float()


def _all_to_all(group: dist.ProcessGroup, device: torch.device, sizes: Sequence[int]) -> tuple[Tensor, Tensor]:
    """As pools travel: to every rank the bags of its batch. What arrived, and what should have."""
    rank, world_size = group.rank(), group.size()
    sent = torch.cat([_block(rank, target, sizes[target]) for target in range(world_size)]).to(device)
    received = torch.full((world_size * sizes[rank],), -1.0, device=device)
    dist.all_to_all_single(received, sent, [sizes[rank]] * world_size, list(sizes), group=group)
    return received, torch.cat([_block(source, rank, sizes[rank]) for source in range(world_size)])


def _all_gather(group: dist.ProcessGroup, device: torch.device, sizes: Sequence[int]) -> tuple[Tensor, Tensor]:
    """As gradients travel: every rank's to everybody."""
    rank, world_size = group.rank(), group.size()
    received = torch.full((world_size * sizes[0],), -1.0, device=device)
    all_gather_single(received, _block(rank, 0, sizes[0]).to(device), group=group)
    return received, torch.cat([_block(source, 0, sizes[0]) for source in range(world_size)])


def _reduce_scatter(group: dist.ProcessGroup, device: torch.device, sizes: Sequence[int]) -> tuple[Tensor, Tensor]:
    """As the pools of TorchRec's own tables travel: sums that are exact in any order."""
    rank, world_size = group.rank(), group.size()
    count = world_size * sizes[0]
    values = torch.arange(count, dtype=torch.float32) % 1_000 + 1
    received = torch.full((sizes[0],), -1.0, device=device)
    reduce_scatter_single(received, (values * (rank + 1)).to(device), group=group)
    return received, values.view(world_size, -1)[rank] * (world_size * (world_size + 1) // 2)
