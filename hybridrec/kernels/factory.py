"""Which kernel serves a table, and which tables share one."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Hashable, Sequence
from typing import NamedTuple, TypeVar

import torch

from hybridrec.backend import KernelRequest, TbePlacement, resolve_backend
from hybridrec.errors import BackendError
from hybridrec.kernels.base import KernelSpec, LookupKernel
from hybridrec.kernels.optimizer import OptimizerSpec
from hybridrec.kernels.probe import why_tbe_fails
from hybridrec.kernels.sequence_kernel import SequenceKernel
from hybridrec.kernels.torch_kernel import TorchKernel
from hybridrec.row_type import RowType

logger = logging.getLogger("hybridrec")

TableT = TypeVar("TableT")


class KernelChoice(NamedTuple):
    """Which kernel serves a table."""

    name: str
    """``"tbe"`` or ``"torch"``."""
    reason: str = ""
    """Why not ``"tbe"``; empty if it is."""


def kernel_choice(
    optimizer: OptimizerSpec,
    *,
    dim: int,
    is_weighted: bool,
    device: torch.device,
    row_type: RowType = RowType.FLOAT32,
) -> KernelChoice:
    """The kernel of a table on this rank. Depends on what the table is, never on its size.

    Where slots are not in host memory FBGEMM's kernel is tried first, once a process; see `probe`. Weight decay always
    goes to ``"torch"``: FBGEMM's kernels ignore it. So do rows of 16 bits, which they round by chance or otherwise.

    Raises:
        BackendError: The device, or what its backend should answer, is missing.
    """
    if optimizer.weight_decay != 0.0:
        return KernelChoice("torch", "FBGEMM's kernels ignore weight_decay")
    if row_type is not RowType.FLOAT32:
        return KernelChoice("torch", f"FBGEMM's kernels serve float32 rows here, not {row_type.dtype}")
    backend = resolve_backend(device.type)
    offer = backend.tbe_placement(KernelRequest(optimizer=optimizer.kind, dim=dim, is_weighted=is_weighted))
    if not isinstance(offer, (str, TbePlacement)):
        raise BackendError(
            f"device {device.type!r}: its backend answers {offer!r} for optimizer {optimizer.kind!r}, dim {dim}, where "
            "a TbePlacement or a reason is wanted. Correct the backend's tbe_placement."
        )
    if backend.is_host_memory:
        return KernelChoice("torch", offer) if isinstance(offer, str) else KernelChoice("tbe")
    reason = (
        offer
        if isinstance(offer, str)
        else why_tbe_fails(optimizer.kind, dim=dim, is_weighted=is_weighted, device=backend.indexed(device))
    )
    if reason:
        _log_once(logging.INFO if isinstance(offer, str) else logging.WARNING, device.type, optimizer.kind, reason)
    return KernelChoice("torch", reason) if reason else KernelChoice("tbe")


@functools.cache
def _log_once(level: int, device_type: str, optimizer: str, reason: str) -> None:
    logger.log(level, "device %r: tables with optimizer %r use plain operators: %s", device_type, optimizer, reason)


def make_kernel(spec: KernelSpec, name: str | None = None) -> LookupKernel:
    """Build the kernel of tables that `group_tables` put together.

    Args:
        spec: The tables.
        name: Of the kernel, as the ranks agreed; None: this rank's own choice.

    Raises:
        ConfigError: The kernel cannot serve the spec.
        BackendError: The device, or the library that the kernel needs, is missing.
    """
    if name is None:
        names = {
            kernel_choice(
                spec.optimizer,
                dim=table.dim,
                is_weighted=spec.is_weighted,
                device=spec.device,
                row_type=spec.row_type,
            ).name
            for table in spec.tables
        }
        assert len(names) == 1, f"tables of one spec need different kernels: {names}"
        (name,) = names
    kernel_class: type[LookupKernel] = TorchKernel
    if name == "tbe":
        # FBGEMM takes seconds to import and is not everywhere.
        from hybridrec.kernels.tbe_kernel import TbeKernel

        kernel_class = TbeKernel
    return kernel_class(spec) if spec.is_pooled else SequenceKernel(spec, kernel_class)


def group_tables(
    tables: Sequence[TableT],
    *,
    dim: Callable[[TableT], int],
    optimizer: Callable[[TableT], OptimizerSpec],
    name: Callable[[TableT], str],
    row_type: Callable[[TableT], RowType] = lambda _: RowType.FLOAT32,
    is_pooled: bool = True,
) -> list[list[TableT]]:
    """Put tables together that may share a kernel: same class, row type and optimizer (learning rate included).

    `TorchKernel` runs once for every dim that it holds, so there tables of different dims are kept apart too; and
    where nothing is pooled, since the rows of a kernel are one tensor.

    Args:
        tables: Anything that stands for a table.
        dim: D of one.
        optimizer: That of one.
        name: The kernel that serves one.
        row_type: Of one's weights.
        is_pooled: Whether the kernels pool.

    Returns:
        Groups in order of their first table; tables of a group in the order given.
    """
    groups: dict[Hashable, list[TableT]] = {}
    for table in tables:
        d, o = dim(table), optimizer(table)
        kernel = name(table)
        is_apart = kernel == "torch" or not is_pooled
        groups.setdefault((kernel, o, row_type(table), d if is_apart else None), []).append(table)
    return list(groups.values())
