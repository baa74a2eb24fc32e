"""``torch.npu``: the part of torch_npu's surface that programs written for `torch.get_device_module` use."""

from __future__ import annotations

import contextlib
import time
import types
from collections.abc import Iterator
from typing import Any

import torch

from tests.simnpu.memory import free_dead_blocks, heap
from tests.simnpu.ordering import DEFAULT_STREAM, Clock, current_stream, on_stream, set_current_stream, timeline

_PRIVATE_USE_1 = 20
"""c10::DeviceType::PrivateUse1."""


class Stream(torch.Stream):
    """A queue of work of the device."""

    def __new__(cls, device: Any = None, priority: int = 0, *, stream_id: int | None = None, **_: Any) -> Stream:
        """A new stream; with ``stream_id``, another handle of that one."""
        number = timeline.new_stream() if stream_id is None else stream_id
        made: Stream = super().__new__(cls, stream_id=number, device_index=0, device_type=_PRIVATE_USE_1)
        return made

    def wait_stream(self, stream: torch.Stream) -> None:
        timeline.wait(self.stream_id, timeline.snapshot(stream.stream_id))

    def wait_event(self, event: Event) -> None:
        event.wait(self)

    def record_event(self, event: Event | None = None) -> Event:
        event = event or Event()
        event.record(self)
        return event

    def synchronize(self) -> None:
        timeline.host_wait(timeline.snapshot(self.stream_id))

    def query(self) -> bool:
        return timeline.is_over(timeline.snapshot(self.stream_id))

    def __enter__(self) -> Stream:
        self._outer = [*getattr(self, "_outer", []), set_current_stream(self.stream_id)]
        return self

    def __exit__(self, *_: Any) -> None:
        set_current_stream(self._outer.pop())

    def __eq__(self, other: object) -> bool:
        return isinstance(other, torch.Stream) and other.stream_id == self.stream_id

    def __hash__(self) -> int:
        return hash(("npu", self.stream_id))


class Event:
    """A point in a stream's work. One that was never recorded is over."""

    def __init__(
        self, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False, **_: Any
    ) -> None:
        self._clock: Clock | None = None
        self._time = 0.0
        self._was_asked = False

    def record(self, stream: torch.Stream | None = None) -> None:
        number = current_stream() if stream is None else stream.stream_id
        with timeline.lock:
            timeline.launch(number)
            self._clock = timeline.snapshot(number)
        self._time, self._was_asked = time.perf_counter(), False

    def wait(self, stream: torch.Stream | None = None) -> None:
        if self._clock is not None:
            timeline.wait(current_stream() if stream is None else stream.stream_id, self._clock)

    def synchronize(self) -> None:
        if self._clock is not None:
            timeline.host_wait(self._clock)

    def query(self) -> bool:
        """Whether the host may count on it. False the first time, so that nobody counts on more; asking again waits."""
        if self._clock is None:
            return True
        if self._was_asked or timeline.is_over(self._clock):
            self.synchronize()
            return True
        self._was_asked = True
        return False

    def elapsed_time(self, end_event: Event) -> float:
        """Milliseconds of the host's clock between two records; of no meaning but for being positive."""
        return (end_event._time - self._time) * 1e3


def synchronize(device: Any = None) -> None:
    """Wait for all streams."""
    timeline.synchronize()


@contextlib.contextmanager
def stream(stream: Stream | None) -> Iterator[None]:
    """Work of the block goes to ``stream``; None changes nothing."""
    with on_stream(stream.stream_id) if stream is not None else contextlib.nullcontext():
        yield


@contextlib.contextmanager
def device(device: Any) -> Iterator[None]:
    """There is one device: nothing to choose."""
    yield


def set_device(device: Any) -> None:
    """Accepts 0 and "npu:0".

    Raises:
        ValueError: No index, as torch's own refuses it.
        RuntimeError: Another ordinal.
    """
    index = device if isinstance(device, int) else torch.device(device).index
    if index is None:
        raise ValueError(f"expected a device with an index, got {device}")
    if index != 0:
        raise RuntimeError(f"invalid device ordinal: {device} (a process of the simulated machine sees npu:0 alone)")


def memory_allocated(device: Any = None) -> int:
    free_dead_blocks()
    return heap.used_bytes


def reset_peak_memory_stats(device: Any = None) -> None:
    heap.peak_bytes = memory_allocated()


def mem_get_info(device: Any = None) -> tuple[int, int]:
    """(free, total) bytes."""
    return heap.total_bytes - memory_allocated(), heap.total_bytes


def make_module() -> types.ModuleType:
    """The module ``torch.npu``."""
    module = types.ModuleType("torch.npu")
    public: dict[str, Any] = {
        "Stream": Stream,
        "Event": Event,
        "stream": stream,
        "StreamContext": stream,
        "device": device,
        "synchronize": synchronize,
        "set_device": set_device,
        "current_device": lambda: 0,
        "device_count": lambda: 1,
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "init": lambda: None,
        "_lazy_init": lambda: None,
        "_is_in_bad_fork": lambda: False,
        "get_device_name": lambda device=None: "simulated NPU",
        "current_stream": lambda device=None: Stream(stream_id=current_stream()),
        "default_stream": lambda device=None: Stream(stream_id=DEFAULT_STREAM),
        "set_stream": lambda stream: set_current_stream(stream.stream_id),
        "manual_seed": lambda seed: None,  # kernels draw from the CPU's generator
        "manual_seed_all": lambda seed: None,
        "get_rng_state": lambda device=None: torch.get_rng_state(),
        "set_rng_state": lambda state, device=None: torch.set_rng_state(state),
        "memory_allocated": memory_allocated,
        "memory_reserved": memory_allocated,
        "max_memory_allocated": lambda device=None: heap.peak_bytes,
        "reset_peak_memory_stats": reset_peak_memory_stats,
        "mem_get_info": mem_get_info,
        "empty_cache": lambda: None,
        "get_amp_supported_dtype": lambda: [torch.float16, torch.bfloat16],
    }
    for name, value in public.items():
        setattr(module, name, value)
    return module
