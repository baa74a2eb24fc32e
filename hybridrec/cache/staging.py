"""Staging buffers: who owns one when.

A buffer is lent by `take` and given back by `give_back` with the event behind which nobody looks at it. `take` lends
the buffer that was given back longest ago and waits for its event first; so no copy is overtaken by the next data.
"""

from __future__ import annotations

import collections
from typing import Any

import torch
from torch import Tensor

from hybridrec.backend import DeviceBackend
from hybridrec.errors import StateError

NUM_BUFFERS = 2
"""One is filled while the device still reads the other."""


class StagingRing:
    """Host buffers of one dtype that take turns. Not thread safe: one thread uses a ring."""

    def __init__(self, backend: DeviceBackend, dtype: torch.dtype, num_buffers: int = NUM_BUFFERS) -> None:
        self._backend, self._dtype = backend, dtype
        self._free: collections.deque[tuple[Tensor, Any]] = collections.deque(
            (backend.empty_staging(0, dtype), None) for _ in range(num_buffers)
        )
        self._lent: Tensor | None = None

    def take(self, num: int) -> Tensor:
        """Lend a buffer; uninitialised [num]. The one before must have been given back.

        Raises:
            StateError: It was not.
        """
        if self._lent is not None:
            raise StateError("a staging buffer is taken while the one before is still lent. Call give_back() first.")
        buffer, event = self._free.popleft()
        if event is not None:
            event.synchronize()
        if buffer.numel() < num:
            buffer = self._backend.empty_staging(max(num, 2 * buffer.numel()), self._dtype)
        self._lent = buffer
        return buffer[:num]

    def give_back(self, event: Any) -> None:
        """The lent buffer is free once ``event`` (None: now) has passed."""
        if self._lent is None:
            raise StateError("a staging buffer is given back that nobody took.")
        self._free.append((self._lent, event))
        self._lent = None

    def reclaim(self) -> None:
        """After an error, when the device is idle: whatever is lent is free."""
        if self._lent is not None:
            self.give_back(None)


class Uploader:
    """Copies small host arrays of a batch to the device, through pinned memory, without waiting."""

    def __init__(self, backend: DeviceBackend, device: torch.device, stream: Any) -> None:
        """
        Args:
            backend: Of the device.
            device: Where to.
            stream: On which, unless `upload` is told; ordered with what else it does.
        """
        self._backend, self._device, self._stream = backend, device, stream
        self._rings: dict[torch.dtype, StagingRing] = {}

    def upload(self, tensors: list[Tensor], stream: Any = None) -> list[Tensor]:
        """Device copies of host tensors, on the stream. Whoever uses them on another one records that stream.

        Args:
            tensors: In host memory.
            stream: Instead of the uploader's own.
        """
        stream = self._stream if stream is None else stream
        sizes: dict[torch.dtype, int] = {}
        for tensor in tensors:
            sizes[tensor.dtype] = sizes.get(tensor.dtype, 0) + tensor.numel()
        buffers = {dtype: self._ring(dtype).take(num) for dtype, num in sizes.items()}
        position = dict.fromkeys(sizes, 0)
        copies = []
        with self._backend.use_stream(stream):
            for tensor in tensors:
                start = position[tensor.dtype]
                position[tensor.dtype] = start + tensor.numel()
                pinned = buffers[tensor.dtype][start : start + tensor.numel()].view(tensor.shape)
                pinned.copy_(tensor)
                copies.append(pinned.to(self._device, non_blocking=True, copy=True))
            event = self._backend.record_event(stream)
        for dtype in sizes:
            self._ring(dtype).give_back(event)
        return copies

    def reclaim(self) -> None:
        """After an error, when the device is idle: whatever is lent is free."""
        for ring in self._rings.values():
            ring.reclaim()

    def _ring(self, dtype: torch.dtype) -> StagingRing:
        if dtype not in self._rings:
            self._rings[dtype] = StagingRing(self._backend, dtype)
        return self._rings[dtype]


class StreamCopies:
    """Copies between host memory and a device on the caller's stream, through pinned memory. One caller at a time.

    Nothing waits for the device but `fetch`, for what it brings, and whoever needs a buffer that is still read.
    """

    def __init__(self, backend: DeviceBackend, device: torch.device) -> None:
        self._backend, self._device = backend, device
        self._uploader = Uploader(backend, device, None)
        self._fetched = StagingRing(backend, torch.float32, num_buffers=1)

    def upload(self, tensors: list[Tensor]) -> list[Tensor]:
        """Host tensors where the device reads them; themselves where that is host memory."""
        if self._backend.is_host_memory:
            return tensors
        try:
            return self._uploader.upload(tensors, self._backend.current_stream(self._device))
        except BaseException:
            self._backend.synchronize(self._device)
            self._uploader.reclaim()
            raise

    def fetch(self, tensor: Tensor) -> Tensor:
        """float32 in host memory, waited for; valid until the next call."""
        if self._backend.is_host_memory:
            return tensor
        staged = self._fetched.take(tensor.numel()).view(tensor.shape)
        try:
            staged.copy_(tensor, non_blocking=True)
            self._backend.record_event(self._backend.current_stream(self._device)).synchronize()
        finally:
            self._fetched.give_back(None)
        return staged
