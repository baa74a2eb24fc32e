"""`TbeKernel`: lookup and row update with FBGEMM's table-batched embedding, its "TBE".

FBGEMM's backward updates the rows itself: the gradient of its output is all that it needs, and there is no step to
call. The graph that leads there stays inside: ``forward`` returns a detached output and keeps the other one.

Where rows are and whose operators are called, the device's backend says; `hybridrec.kernels.probe` tries them.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hybridrec._compat.fbgemm import (
    HAS_PREALLOCATED_HOST_BUFFERS,
    BoundsCheckMode,
    EmbOptimType,
    PoolingMode,
    SplitTableBatchedEmbeddingBagsCodegen,
    table_placement,
)
from hybridrec.backend import KernelRequest, TbePlacement, resolve_backend
from hybridrec.errors import ConfigError
from hybridrec.kernels.base import KernelSpec, LookupKernel, PendingUpdate, SlotArrays
from hybridrec.kernels.slot_memory import zeros

_OPTIMIZERS = {
    "none": EmbOptimType.EXACT_SGD,  # has no state; the forward is the same for all
    "sgd": EmbOptimType.EXACT_SGD,
    "adagrad": EmbOptimType.EXACT_ADAGRAD,
    "rowwise_adagrad": EmbOptimType.EXACT_ROWWISE_ADAGRAD,
}


class TbeKernel(LookupKernel):
    """FBGEMM's kernels: SGD, Adagrad and row-wise Adagrad on float32 rows, for what a device's backend offers.

    FBGEMM checks no index (bounds check NONE): slots come from the slot index, never from the user. It keeps the
    learning rate as float32 and reads it in the forward.
    """

    def __init__(self, spec: KernelSpec) -> None:
        """Build FBGEMM's module over slots of our own memory.

        Raises:
            ConfigError: FBGEMM cannot serve the spec on its device; says what it lacks.
        """
        self._placement = _check(spec)
        super().__init__(spec)
        self._learning_rate = spec.optimizer.learning_rate
        self._allocate()

    def _allocate(self) -> None:
        rate = self._learning_rate
        self._tbe = _build_tbe(self.spec, self._placement, rate)
        self._applied = self._tbe, rate
        self._apply_rate()  # slots grow on a thread of their own: it may have been set while FBGEMM's module was made
        weights = self._tbe.split_embedding_weights()
        states = self._tbe.split_optimizer_states()
        self._slot_arrays = []
        for t, table in enumerate(self.spec.tables):
            # .data: FBGEMM saves its buffers for the backward, and a write that autograd can see in between raises.
            of_table = [s.data[: table.num_slots] for s in states[t]] if states else []
            self._slot_arrays.append(
                SlotArrays(
                    weights=weights[t].data[: table.num_slots],
                    row_states=tuple(s for s in of_table if s.dim() == 2),
                    row_wise_states=tuple(s for s in of_table if s.dim() == 1),
                )
            )

    def slot_arrays(self, table: int) -> SlotArrays:
        """The memory of one table's slots; valid until ``resize``."""
        return self._slot_arrays[table]

    @property
    def learning_rate(self) -> float:
        """What lookups from now on will be stepped with."""
        return self._learning_rate

    @learning_rate.setter
    def learning_rate(self, value: float) -> None:
        self._learning_rate = float(value)
        self._apply_rate()

    def _apply_rate(self) -> None:
        """Tell FBGEMM's module, unless it has been told: it writes a tensor that pending lookups may have saved."""
        wanted = self._tbe, self._learning_rate
        if wanted != self._applied:
            self._applied = wanted
            self._tbe.set_learning_rate(self._learning_rate)

    def forward(self, slots_N: Tensor, offsets: Tensor, weights_N: Tensor | None) -> tuple[Tensor, object]:
        """See `LookupKernel.forward`."""
        if slots_N.shape[0] == 0:  # with B = 0 too
            num_bags = (offsets.shape[0] - 1) // len(self.spec.feature_table)
            return torch.zeros((num_bags, self.spec.total_dim), device=self.spec.device), None
        if self.spec.optimizer.kind == "none":
            with torch.no_grad():
                return self._tbe(slots_N, offsets, weights_N), None
        with torch.enable_grad():
            output: Tensor = self._tbe(slots_N, offsets, weights_N.detach() if weights_N is not None else None)
        return output.detach(), PendingUpdate(output)

    def backward(self, saved: object, grad: Tensor, *, step: int) -> None:
        """See `LookupKernel.backward`; ``step`` is of no use to these optimizers."""
        if saved is None:  # no occurrences
            return
        assert isinstance(saved, PendingUpdate)
        torch.autograd.backward(saved.take(), self.clipped(grad).contiguous())


def _check(spec: KernelSpec) -> TbePlacement:
    names = ", ".join(repr(t.name) for t in spec.tables)
    if spec.optimizer.weight_decay != 0.0:
        raise ConfigError(
            f"tables {names}: weight_decay={spec.optimizer.weight_decay:g} would be ignored by FBGEMM. Use TorchKernel."
        )
    if list(spec.feature_table) != sorted(spec.feature_table):
        raise ConfigError(
            f"tables {names}: feature_table={spec.feature_table} is not ascending. FBGEMM steps a row once for every "
            "run of features of its table. Feed features in the order of their tables."
        )
    backend, placements = resolve_backend(spec.device.type), []
    for table in spec.tables:
        offer = backend.tbe_placement(
            KernelRequest(optimizer=spec.optimizer.kind, dim=table.dim, is_weighted=spec.is_weighted)
        )
        if isinstance(offer, str):
            raise ConfigError(f"table {table.name!r}: {offer}. Use TorchKernel.")
        placements.append(offer)
    return placements[0]


def _build_tbe(
    spec: KernelSpec, placement: TbePlacement, learning_rate: float
) -> SplitTableBatchedEmbeddingBagsCodegen:
    # FBGEMM tells tables apart by where their rows start, so each needs a row of its own.
    rows = [max(1, table.num_slots) for table in spec.tables]
    dims = [table.dim for table in spec.tables]
    optimizer = _OPTIMIZERS[spec.optimizer.kind]
    where = table_placement(placement.location, placement.compute_device)
    more = {}
    if HAS_PREALLOCATED_HOST_BUFFERS and resolve_backend(spec.device.type).is_host_memory:
        floats = sum(r * d for r, d in zip(rows, dims, strict=True))
        buffers = {"weights": zeros((floats,), spec.device)}
        if spec.optimizer.row_states():
            is_row_wise = spec.optimizer.row_states()[0].is_row_wise
            buffers["momentum1"] = zeros((sum(rows) if is_row_wise else floats,), spec.device)
        more["preallocated_host_buffers"] = buffers
    return SplitTableBatchedEmbeddingBagsCodegen(
        embedding_specs=[(r, d, *where) for r, d in zip(rows, dims, strict=True)],
        feature_table_map=list(spec.feature_table),
        optimizer=optimizer,
        learning_rate=learning_rate,
        eps=spec.optimizer.eps,
        pooling_mode=PoolingMode.SUM,
        bounds_check_mode=BoundsCheckMode.NONE,
        device=spec.device,
        **more,
    )
