"""Every operator of the simulated device: its CPU kernel, run over aliases of device memory.

One boxed fallback serves all operators that have a CPU kernel, FBGEMM's too. Operators that only make a view run the
CPU kernel on the device tensor itself, since that looks at sizes and strides alone.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from tests.simnpu import copies
from tests.simnpu.memory import (
    _CPU_KEYS,
    DEVICE_TYPE,
    adopt,
    allocate,
    block_of,
    host_alias,
    is_on_device,
    span_bytes,
    touch,
    view_of,
)
from tests.simnpu.missing import refuse_missing
from tests.simnpu.ordering import current_stream, timeline

aten = torch.ops.aten
_CPU = torch.device("cpu")
_CPU_SPARSE_KEYS = torch._C.DispatchKeySet(torch._C.DispatchKey.SparseCPU)
_KEYS_OF_TYPE = {
    "cpu": _CPU_KEYS,
    "meta": torch._C.DispatchKeySet(torch._C.DispatchKey.Meta),
    DEVICE_TYPE: torch._C.DispatchKeySet(torch._C.DispatchKey.PrivateUse1),
}
_AUTOCAST_KEYS = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastPrivateUse1)
_VIEWS = (
    aten.as_strided.default,
    aten.view.default,
    aten._reshape_alias.default,
    aten.unfold.default,
    aten.view.dtype,
    aten.set_.source_Tensor,
    aten.set_.source_Storage_storage_offset,
    aten.set_.source_Storage,
)


def run_on_cpu(op: Any, *args: Any, **kwargs: Any) -> Any:
    """The fallback: run an operator as one piece of work of the current stream.

    Raises:
        RuntimeError: Host tensors of more than one element are among its arguments.
        NotImplementedError: See `missing.refuse_missing`.
        SyncHazard: See `memory.touch`.
    """
    refuse_missing(op._schema.name, op._schema.overload_name)
    with timeline.lock:
        return _Call(op).run(args, kwargs)


class _Call:
    """One call of an operator."""

    def __init__(self, op: Any) -> None:
        self._op = op
        self._name = op._schema.name
        self._used: list[tuple[Tensor, Tensor, bool]] = []
        """Alias, device tensor, whether it is written."""
        self._adopted: dict[int, Tensor] = {}
        """Host address of a fresh storage -> the device's owner of it."""
        self._rows: dict[int, np.ndarray] = {}
        """Device address of a table -> the rows that the operator uses, int64."""

    def run(self, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        timeline.launch(current_stream())
        self._rows = _rows_by_number(self._name, args, kwargs)
        arguments = self._op._schema.arguments
        is_written = {a.name: bool(a.alias_info and a.alias_info.is_write) for a in arguments}
        host_args = [self._to_host(value, is_written[arguments[i].name]) for i, value in enumerate(args)]
        host_kwargs = {name: self._to_host(value, is_written[name]) for name, value in kwargs.items()}
        before = [(alias.size(), alias.untyped_storage().data_ptr()) for alias, _, _ in self._used]
        result = self._op(*host_args, **host_kwargs)
        for (alias, tensor, written), (size, address) in zip(self._used, before, strict=True):
            if written and (alias.size() != size or alias.untyped_storage().data_ptr() != address):
                tensor.resize_(alias.size())  # an ``out`` of another size
                host_alias(tensor).copy_(alias)
        return pytree.tree_map(self._to_device, result)

    def _to_host(self, value: Any, written: bool) -> Any:
        return pytree.tree_map(lambda leaf: self._leaf_to_host(leaf, written), value)

    def _leaf_to_host(self, value: Any, written: bool) -> Any:
        if isinstance(value, torch.device) and value.type == DEVICE_TYPE:
            return _CPU
        if not isinstance(value, Tensor):
            return value
        if is_on_device(value):
            touch(value, is_write=written, what=self._name, rows=self._rows.get(value.untyped_storage().data_ptr()))
            alias = host_alias(value)
            self._used.append((alias, value, written))
            return alias
        if value.device.type == "cpu" and value.dim() > 0 and value.numel():
            raise RuntimeError(
                f"Expected all tensors to be on the same device, but {self._name} got a cpu tensor of shape "
                f"{tuple(value.shape)} beside npu tensors"
            )
        return value

    def _to_device(self, result: Any) -> Any:
        if not isinstance(result, Tensor) or is_on_device(result):
            return result
        for alias, tensor, _ in self._used:
            if result is alias:
                return tensor
        storage = result.untyped_storage()
        if storage.nbytes() == 0:
            return allocate(result.size(), result.stride(), result.dtype, self._name)
        layout = (result.dtype, result.size(), result.stride(), result.storage_offset())
        for alias, tensor, _ in self._used:
            if alias.numel() and tensor.numel() and alias.untyped_storage().data_ptr() == storage.data_ptr():
                return view_of(tensor, *layout)
        owner = self._adopted.get(storage.data_ptr())
        if owner is None:
            owner = self._adopted[storage.data_ptr()] = adopt(result, self._name)
            touch(owner, is_write=True, what=self._name)
        return view_of(owner, *layout)


_TABLES = {
    "aten::index_select": (0, 1, 2),
    "aten::index_copy": (0, 1, 2),
    "aten::index_copy_": (0, 1, 2),
    "aten::index_add": (0, 1, 2),
    "aten::index_add_": (0, 1, 2),
    "aten::index": (0, None, 1),
    "aten::index_put_": (0, None, 1),
    "aten::_index_put_impl_": (0, None, 1),
    "aten::embedding": (0, None, 1),
    "aten::_embedding_bag": (0, None, 1),
    "aten::_embedding_bag_forward_only": (0, None, 1),
}
"""Operator -> positions of the table, of the dimension (None: 0) and of the rows' numbers among its arguments."""


def _rows_by_number(name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> dict[int, np.ndarray]:
    """Device address of a table -> the rows, int64, that an operator takes by their numbers; empty: not such a one."""
    if name not in _TABLES:
        return {}
    table_at, dim_at, rows_at = _TABLES[name]
    table, numbers = args[table_at], args[rows_at]
    if isinstance(numbers, (list, tuple)):
        numbers = numbers[0] if len(numbers) == 1 else None
    if not is_on_device(table) or not is_on_device(numbers) or numbers.dtype not in (torch.int64, torch.int32):
        return {}
    if dim_at is not None and args[dim_at] != 0 or table.numel() == 0 or table.stride(0) <= 0:
        return {}
    out = kwargs.get("out", table)
    if out.data_ptr() != table.data_ptr() or out.stride() != table.stride():
        return {}
    rows = np.unique(host_alias(numbers).numpy()).astype(np.int64)
    if rows.size and not -table.size(0) <= rows[0] <= rows[-1] < table.size(0):
        return {}  # the operator itself says so
    return {table.untyped_storage().data_ptr(): np.where(rows < 0, rows + table.size(0), rows)}


def _check_index(device: torch.device | None) -> None:
    if device is not None and device.index not in (None, 0):
        raise RuntimeError(f"invalid device ordinal: {device} (a process of the simulated machine sees npu:0 alone)")


def _empty(
    size: Sequence[int],
    *,
    dtype: torch.dtype | None = None,
    layout: Any = None,
    device: torch.device | None = None,
    pin_memory: bool | None = None,
    memory_format: torch.memory_format | None = None,
) -> Tensor:
    _check_index(device)
    dtype = dtype or torch.get_default_dtype()
    shape = torch.empty(size, dtype=dtype, device="meta", memory_format=memory_format or torch.contiguous_format)
    with timeline.lock:
        return allocate(shape.size(), shape.stride(), dtype, "empty")


def _before_device_is_chosen(factory: Any) -> Callable[..., Tensor]:
    """A kernel of a factory operator that sees all requests for pinned memory, those of C++ too.

    `DistributedDataParallel` makes such requests.
    """

    def make(
        *args: Any,
        layout: torch.layout | None = None,
        device: torch.device | None = None,
        pin_memory: bool | None = None,
        **kwargs: Any,
    ) -> Tensor:
        is_sparse = layout not in (None, torch.strided)
        keys = _CPU_SPARSE_KEYS if is_sparse else _KEYS_OF_TYPE[device.type if device is not None else "cpu"]
        made: Tensor = factory.redispatch(keys, *args, layout=layout, device=device, **kwargs)
        return copies.pin(made) if pin_memory else made

    return make


def _empty_strided(
    size: Sequence[int],
    stride: Sequence[int],
    *,
    dtype: torch.dtype | None = None,
    layout: Any = None,
    device: torch.device | None = None,
    pin_memory: bool | None = None,
) -> Tensor:
    _check_index(device)
    with timeline.lock:
        return allocate(size, stride, dtype or torch.get_default_dtype(), "empty_strided")


def _resize_(self: Tensor, size: Sequence[int], *, memory_format: torch.memory_format | None = None) -> Tensor:
    stride = torch.empty(size, device="meta").stride()
    end = self.storage_offset() * self.element_size() + span_bytes(size, stride, self.dtype)
    if end <= self.untyped_storage().nbytes():
        set_sizes = aten.set_.source_Storage_storage_offset
        set_sizes.redispatch(_CPU_KEYS, self, self.untyped_storage(), self.storage_offset(), list(size), list(stride))
        return self
    with timeline.lock:
        larger = allocate(size, stride, self.dtype, "resize_")
        if self.numel():
            kept = min(self.numel(), larger.numel())
            host_alias(larger).view(-1)[:kept].copy_(host_alias(self).reshape(-1)[:kept])
    aten.set_.source_Tensor.redispatch(_CPU_KEYS, self, larger)
    return self


def _record_stream(self: Tensor, stream: torch.Stream) -> None:
    if self.numel():
        with timeline.lock:
            block_of(self).recorded.add(stream.stream_id)


def _on_metadata(op: Any) -> Callable[..., Any]:
    return lambda *args, **kwargs: op.redispatch(_CPU_KEYS, *args, **kwargs)


_IN_HALF = (aten.linear.default, aten.matmul.default, aten.mm.default, aten.addmm.default, aten.bmm.default)
"""What autocast runs in its dtype; everything else keeps that of its arguments."""


def _in_half(op: Any) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        dtype = torch.get_autocast_dtype(DEVICE_TYPE)

        def cast(leaf: Any) -> Any:
            return leaf.to(dtype) if isinstance(leaf, Tensor) and leaf.dtype == torch.float32 else leaf

        with torch._C._ExcludeDispatchKeyGuard(_AUTOCAST_KEYS):
            return op(*(cast(a) for a in args), **{name: cast(a) for name, a in kwargs.items()})

    return run


def register_kernels() -> list[torch.library.Library]:
    """Register all operators. The libraries must be kept: kernels live as long as they."""
    every = torch.library.Library("_", "IMPL")
    every.fallback(run_on_cpu, "PrivateUse1")
    every.fallback(torch.library.fallthrough_kernel, "AutocastPrivateUse1")
    library = torch.library.Library("aten", "IMPL")
    own: dict[str, Callable[..., Any]] = {
        "empty.memory_format": _empty,
        "empty_strided": _empty_strided,
        "_copy_from": copies.copy_from,
        "_copy_from_and_resize": copies.copy_from_and_resize,
        "resize_": _resize_,
        "record_stream": _record_stream,
    }
    for view in _VIEWS:
        name, overload = view._schema.name.removeprefix("aten::"), view._overloadname
        own[name if overload == "default" else f"{name}.{overload}"] = _on_metadata(view)
    for name, kernel in own.items():
        library.impl(name, kernel, "PrivateUse1")
    for op in _IN_HALF:
        library.impl(op._schema.name.removeprefix("aten::"), _in_half(op), "AutocastPrivateUse1")
    library.impl("is_pinned", copies.is_pinned, "CPU")
    library.impl("_pin_memory", copies.pin_copy, "CPU")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="(?s).*Overriding a previously registered kernel")
        for factory, name in (
            (aten.empty.memory_format, "empty.memory_format"),
            (aten.empty_strided.default, "empty_strided"),
        ):
            library.impl(name, _before_device_is_chosen(factory), "BackendSelect")
    return [every, library]
