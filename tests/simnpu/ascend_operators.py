"""A stand-in for fbgemm-ascend: FBGEMM's lookups with a fused update, on the simulated NPU, with its documented limits.

As the real one does, importing it replaces the autograd kernels of FBGEMM's operators for every device, so that tables
in host memory fail from then on. The arithmetic is `TorchKernel`'s, bit for bit. Faults can be planted.
"""

from __future__ import annotations

import itertools
import os
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hybridrec.kernels.optimizer import OptimizerSpec
from hybridrec.kernels.optimizer_rules import updated_rows
from hybridrec.kernels.row_gradients import group_by_row, sum_bags

SITE = Path(__file__).parent / "site"
KINDS = ("sgd", "adagrad", "rowwise_adagrad")

fault = ""
"""Planted: "raises", "wrong", "no_state", "unrepeatable", "slot_dependent", "no_mixed_dims", or none."""
chip_at_import: str | None = None
calls = 0
_count = itertools.count()
_libraries: list[torch.library.Library] = []


def install() -> None:
    """The simulated device, and a folder from which fbgemm_ascend can be imported. For a pool's ranks."""
    from tests.simnpu.install import install as install_device

    install_device()
    torch.npu.get_device_name = lambda device=None: "Ascend910B3"
    sys.path.append(str(SITE))


def register() -> None:
    """What the import does."""
    global chip_at_import
    import fbgemm_gpu  # noqa: F401  # defines the operators

    chip_at_import = os.environ.get("FBGEMM_ASCEND_FORCE_BUILD_VER")
    library = torch.library.Library("fbgemm", "IMPL")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="(?s).*Overriding a previously registered kernel")
        for kind in KINDS:
            library.impl(f"split_embedding_codegen_lookup_{kind}_function_pt2", _operator(kind), "Autograd")
    # fbgemm-ascend has none of this. torch_npu's fallback runs it on the host, which is harmless: FBGEMM calls it when
    # tables are made, with a tensor that it does not look at. Where that fallback is disabled, plain operators serve.
    library.impl("get_infos_metadata", _on_host, "PrivateUse1")
    _libraries.append(library)


def _on_host(unused: Tensor, num_bags: int, num_features: int) -> Any:
    return torch.ops.fbgemm.get_infos_metadata(torch.empty(0), num_bags, num_features)


def _operator(kind: str) -> Any:
    schema = getattr(torch.ops.fbgemm, f"split_embedding_codegen_lookup_{kind}_function_pt2").default._schema

    def run(*args: Any, **kwargs: Any) -> Tensor:
        named = dict(zip((a.name for a in schema.arguments), args, strict=False)) | kwargs
        if fault == "raises":
            raise RuntimeError("aclnnSplitEmbedding: EZ1009")
        weights = named["weights"]
        if len(weights) != 5:
            raise RuntimeError(f"size of param:weights must be 5, but got {len(weights)}")
        dims = named["D_offsets"].cpu().diff().tolist()
        if named["indice_weights"] is not None or any(d % 8 for d in dims) or named["indices"].numel() == 0:
            raise RuntimeError(
                "fbgemm_ascend: weights, dims that are no multiple of 8, and empty batches are not supported"
            )
        if fault == "no_mixed_dims" and len(set(dims)) > 1:
            raise RuntimeError("aclnnSplitEmbedding: tables of different dims")
        floats = named.get("optim_float") or [0.0]
        optimizer = OptimizerSpec(kind=kind, eps=floats[0])  # type: ignore[arg-type]
        state = named["momentum1"][0] if "momentum1" in named else None
        tables = _tables(named, dims, optimizer, state)
        rate = named["learning_rate_tensor"].item()
        global calls
        calls += 1
        output: Tensor = _Lookup.apply(
            named["placeholder_autograd_tensor"], tables, optimizer, rate, named["indices"], named["offsets"], dims
        )
        return output

    return run


def _tables(
    named: dict[str, Any], dims: list[int], optimizer: OptimizerSpec, state: Tensor | None
) -> list[tuple[Tensor, Tensor | None]]:
    """(rows, state) of every feature: views of FBGEMM's flat buffers."""
    starts = named["weights"][3].tolist()
    sizes = named["hash_size_cumsum"].tolist()
    found = []
    for f, dim in enumerate(dims):
        num_rows = next(s for s in sizes[f:] if s > sizes[f]) - sizes[f]
        rows = named["weights"][0].detach()[starts[f] : starts[f] + num_rows * dim].view(num_rows, dim)
        of_rows = None
        if state is not None:
            start = named["momentum1"][3].tolist()[f]
            is_row_wise = optimizer.row_states()[0].is_row_wise
            of_rows = state.detach()[start : start + num_rows * (1 if is_row_wise else dim)]
            of_rows = of_rows if is_row_wise else of_rows.view(num_rows, dim)
        found.append((rows, of_rows))
    return found


class _Lookup(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, placeholder: Tensor, tables: Any, optimizer: Any, rate: Any, *batch: Any) -> Tensor:
        ctx.given = tables, optimizer, rate, batch
        indices, offsets, dims = batch
        num_bags = (offsets.shape[0] - 1) // len(dims)
        pooled = []
        for f, (rows, _) in enumerate(tables):
            part = offsets[f * num_bags : (f + 1) * num_bags + 1]
            first, last = int(part[0]), int(part[-1])
            pooled.append(sum_bags(rows, indices[first:last], part - first, None))
        return torch.cat(pooled, 1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        tables, optimizer, rate, (indices, offsets, dims) = ctx.given
        num_bags = grad.shape[0]
        parts = grad.split(dims, 1)
        starts = [rows.data_ptr() for rows, _ in tables]
        for start in dict.fromkeys(starts):
            features = [f for f, other in enumerate(starts) if other == start]
            rows, state = tables[features[0]]
            bags = torch.cat([parts[f].contiguous() for f in features])
            slots, bag_N = [], []
            for i, f in enumerate(features):
                part = offsets[f * num_bags : (f + 1) * num_bags + 1]
                slots.append(indices[int(part[0]) : int(part[-1])])
                numbers = torch.arange(i * num_bags, (i + 1) * num_bags, device=grad.device)
                bag_N.append(numbers.repeat_interleave(part.diff()))
            _update(rows, state, torch.cat(slots), torch.cat(bag_N), bags, optimizer, rate)
        return (None,) * 7


def _update(
    rows: Tensor, state: Tensor | None, slots: Tensor, bag_N: Tensor, bags: Tensor, optimizer: Any, rate: float
) -> None:
    if slots.numel() == 0:
        return
    unique, starts, order = group_by_row(slots, spare_row=None)
    grads = sum_bags(bags, bag_N.index_select(0, order), starts, None)
    if fault == "wrong":
        grads = grads * 1.00001
    if fault == "unrepeatable":
        grads = grads * (1.0 + next(_count) * 2.0**-23)
    if fault == "slot_dependent":
        grads = grads * (1.0 + unique.gt(20).float().unsqueeze(1) * 2.0**-23)
    states = [] if state is None else [state.index_select(0, unique)]
    new, new_states = updated_rows(optimizer, rows.index_select(0, unique), states, grads, step=1, learning_rate=rate)
    rows.data.index_copy_(0, unique, new)
    if state is not None and fault != "no_state":
        state.data.index_copy_(0, unique, new_states[0])
