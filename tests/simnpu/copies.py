"""Copies between host and device, and pinned host memory.

A copy that does not block is done as late as it may be, so that a program that relies on its being early fails always
and not once in a thousand runs:

- host to device reads its pinned source just before work that is ordered after the copy. The source must stay as it
  is until the host has waited for the copy; what changed meanwhile is reported.
- device to host leaves poison in its pinned target until the host has waited.

Memory that is not pinned is copied at once, as a driver does through a buffer of its own.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass

import torch
from torch import Tensor

from tests.simnpu.memory import DEVICE_TYPE, POISON, host_alias, span_bytes, touch
from tests.simnpu.ordering import current_stream, timeline

_pinned: dict[int, int] = {}
"""Address -> bytes of pinned storages."""


@dataclass(eq=False)
class _Transfer:
    """One copy that the host has not waited for."""

    stream: int
    tick: int
    host: Tensor
    """Its side in pinned memory."""
    value: Tensor
    """To the device: what the source must go on to hold; empty: anything. To the host: what will arrive."""


_to_device: list[_Transfer] = []
_to_host: list[_Transfer] = []


def copy_from(source: Tensor, target: Tensor, non_blocking: bool = False) -> Tensor:
    """``aten::_copy_from``, of which one side at least is on the device."""
    with timeline.lock:
        stream = current_stream()
        tick = timeline.launch(stream)
        if source.device.type == target.device.type:
            touch(source, is_write=False, what="copy_")
            touch(target, is_write=True, what="copy_")
            host_alias(target).copy_(host_alias(source))
        elif target.device.type == DEVICE_TYPE:
            touch(target, is_write=True, what="copy_ from the host")
            _copy_to_device(source, target, stream, tick, non_blocking)
        else:
            touch(source, is_write=False, what="copy_ to the host")
            _copy_to_host(source, target, stream, tick, non_blocking)
    return target


def copy_from_and_resize(source: Tensor, target: Tensor) -> Tensor:
    """``aten::_copy_from_and_resize``."""
    if target.size() != source.size():
        target.resize_(source.size())
    return copy_from(source, target)


def _copy_to_device(source: Tensor, target: Tensor, stream: int, tick: int, non_blocking: bool) -> None:
    alias = host_alias(target)
    for transfer in _overlapping(_to_device, source):
        _check_unchanged(transfer)
    if not (non_blocking and is_pinned(source)) or source.numel() == 0:
        alias.copy_(source)
        if not non_blocking:
            timeline.host_wait(timeline.clocks[stream])
        return
    transfer = _Transfer(stream, tick, source.detach(), source.detach().clone())
    arriving = _overlapping(_to_host, source)
    for other in arriving:
        transfer.value = torch.empty(0)  # the device itself changes it
        if not timeline.is_ordered(stream, other.stream, other.tick):
            timeline.report(
                f"a copy to the device on stream {stream} reads pinned memory that a copy to the host on stream "
                f"{other.stream} may still be writing"
            )
            arriving = []
    _to_device.append(transfer)

    def read_source() -> None:
        for earlier in arriving:
            _deliver(earlier)
        alias.copy_(transfer.host)  # the alias keeps the bytes, even if the target is freed by now

    def source_is_free() -> None:
        _check_unchanged(transfer)
        _to_device.remove(transfer)

    timeline.defer_until_used(stream, tick, read_source)
    timeline.defer_until_host(stream, tick, source_is_free)


def _copy_to_host(source: Tensor, target: Tensor, stream: int, tick: int, non_blocking: bool) -> None:
    value = host_alias(source).to(target.dtype, copy=True)
    for transfer in _overlapping(_to_device, target):
        if timeline.is_ordered(stream, transfer.stream, transfer.tick):
            _check_unchanged(transfer)
            transfer.value = torch.empty(0)  # from now on the device itself may change it
        else:
            timeline.report(
                f"a copy to the host on stream {stream} overwrites pinned memory that a copy to the device on stream "
                f"{transfer.stream} may still be reading"
            )
    if not (non_blocking and is_pinned(target)) or target.numel() == 0:
        timeline.host_wait(timeline.clocks[stream])
        target.copy_(value)
        return
    _bytes_of(target).fill_(POISON)
    transfer = _Transfer(stream, tick, target.detach(), value)
    _to_host.append(transfer)
    timeline.defer_until_host(stream, tick, lambda: _deliver(transfer))


def _deliver(transfer: _Transfer) -> None:
    if transfer in _to_host:
        _to_host.remove(transfer)
        transfer.host.copy_(transfer.value)


def _check_unchanged(transfer: _Transfer) -> None:
    if transfer.value.numel() == 0:
        return
    now, then = (t.contiguous().view(-1).view(torch.uint8) for t in (transfer.host, transfer.value))
    if not torch.equal(now, then):
        timeline.report(
            f"pinned memory of shape {list(transfer.host.shape)} was changed while a copy to the device on stream "
            f"{transfer.stream} may still be reading it: wait for the copy on the host first"
        )
        transfer.value = torch.empty(0)  # said once


def _bytes_of(tensor: Tensor) -> Tensor:
    """uint8: all bytes from the first element to the last."""
    num_bytes = span_bytes(tensor.size(), tensor.stride(), tensor.dtype)
    start = tensor.storage_offset() * tensor.element_size()
    return torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage(), start, (num_bytes,), (1,))


def _overlapping(transfers: list[_Transfer], tensor: Tensor) -> list[_Transfer]:
    if not transfers or tensor.numel() == 0:
        return []
    first, end = _interval(tensor)
    return [t for t in transfers if _interval(t.host)[0] < end and first < _interval(t.host)[1]]


def _interval(tensor: Tensor) -> tuple[int, int]:
    return tensor.data_ptr(), tensor.data_ptr() + span_bytes(tensor.size(), tensor.stride(), tensor.dtype)


# ---- pinned memory ---------------------------------------------------------------------------------------------------


def is_pinned(tensor: Tensor, device: torch.device | None = None) -> bool:
    """``aten::is_pinned``: whether a host tensor lies in pinned memory."""
    return tensor.device.type == "cpu" and tensor.untyped_storage().data_ptr() in _pinned


def pin(tensor: Tensor) -> Tensor:
    """Declare the memory of a host tensor pinned, as long as it lives."""
    storage = tensor.untyped_storage()
    if storage.nbytes():
        _pinned[storage.data_ptr()] = storage.nbytes()
        weakref.finalize(storage, _pinned.pop, storage.data_ptr(), None)
    return tensor


def pin_copy(tensor: Tensor, device: torch.device | None = None) -> Tensor:
    """``aten::_pin_memory``: a copy in pinned memory."""
    return pin(tensor.clone())
