"""Which kernel serves a table, and which tables share one."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import TypeVar

import torch

from hybridrec.backend import KernelRequest, resolve_backend
from hybridrec.errors import BackendError
from hybridrec.kernels.base import KernelSpec, LookupKernel
from hybridrec.kernels.optimizer import OptimizerSpec
from hybridrec.kernels.sequence_kernel import SequenceKernel
from hybridrec.kernels.torch_kernel import TorchKernel

TableT = TypeVar("TableT")


def kernel_name(optimizer: OptimizerSpec, *, dim: int, is_weighted: bool, device: torch.device) -> str:
    """``"tbe"`` or ``"torch"``. Depends on what a table is, never on its size.

    Weight decay always goes to ``"torch"``: FBGEMM's kernels ignore it.
    """
    if optimizer.weight_decay != 0.0:
        return "torch"
    backend = resolve_backend(device.type)
    name = backend.kernel_name(KernelRequest(optimizer=optimizer.kind, dim=dim, is_weighted=is_weighted))
    if name not in ("tbe", "torch"):
        raise BackendError(
            f"device {device.type!r}: its backend names kernel {name!r} for optimizer {optimizer.kind!r}, dim {dim}. "
            "Known: 'tbe', 'torch'. Correct the backend's kernel_name."
        )
    return name


def make_kernel(spec: KernelSpec) -> LookupKernel:
    """Build the kernel of tables that `group_tables` put together.

    Raises:
        ConfigError: The kernel cannot serve the spec.
        BackendError: The device, or the library that the kernel needs, is missing.
    """
    names = {
        kernel_name(spec.optimizer, dim=table.dim, is_weighted=spec.is_weighted, device=spec.device)
        for table in spec.tables
    }
    assert len(names) == 1, f"tables of one spec need different kernels: {names}"
    kernel_class: type[LookupKernel] = TorchKernel
    if names == {"tbe"}:
        # FBGEMM takes seconds to import and is not everywhere.
        from hybridrec.kernels.tbe_kernel import TbeKernel

        kernel_class = TbeKernel
    return kernel_class(spec) if spec.is_pooled else SequenceKernel(spec, kernel_class)


def group_tables(
    tables: Sequence[TableT],
    *,
    dim: Callable[[TableT], int],
    optimizer: Callable[[TableT], OptimizerSpec],
    is_weighted: bool,
    device: torch.device,
) -> list[list[TableT]]:
    """Put tables together that may share a kernel: same kernel class, equal optimizer (learning rate included).

    `TorchKernel` runs once for every dim that it holds, so there tables of different dims are kept apart too.

    Args:
        tables: Anything that stands for a table.
        dim: D of one.
        optimizer: That of one.
        is_weighted: Of all; the collection's.
        device: Where the slots are.

    Returns:
        Groups in order of their first table; tables of a group in the order given.
    """
    groups: dict[Hashable, list[TableT]] = {}
    for table in tables:
        d, o = dim(table), optimizer(table)
        name = kernel_name(o, dim=d, is_weighted=is_weighted, device=device)
        groups.setdefault((name, o, d if name == "torch" else None), []).append(table)
    return list(groups.values())
