"""Process groups of backend "hccl" for the simulated device: gloo over copies in host memory.

Collectives run on a stream of their group. It waits for the caller's current stream; until `Work.wait` has let the
caller's stream wait for it, outputs are still being written and inputs still being read there, as with HCCL.

PyTorch's `Backend` cannot be subclassed in Python, so this is a `ProcessGroup`, which c10d then takes for the whole
group, for "cpu:gloo,npu:hccl" too: collectives of host tensors go to the gloo group inside.
"""

from __future__ import annotations

import datetime
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import ProcessGroup, ProcessGroupGloo, Work

from tests.simnpu.memory import DEVICE_TYPE, host_alias, is_on_device, touch
from tests.simnpu.ordering import current_stream, on_stream, timeline


class _DeviceWork(Work):
    """A collective whose outputs are still to be copied to the device."""

    def __init__(self, inner: Work | None, stream: int, tick: int, outputs: list[tuple[Tensor, Tensor]], keep: Any):
        super().__init__()
        self._inner, self._stream, self._tick = inner, stream, tick
        self._outputs = outputs
        self._keep = keep

    def wait(self, timeout: datetime.timedelta | None = None) -> bool:
        if self._inner is not None:
            self._inner.wait()
        with timeline.lock:
            if self._inner is not None:
                for tensor, value in self._outputs:
                    host_alias(tensor).copy_(value)
                self._inner = None
            timeline.wait(current_stream(), {self._stream: self._tick})
        self._keep = None
        return True

    def is_completed(self) -> bool:
        return self._inner is None or self._inner.is_completed()

    def synchronize(self) -> None:
        self.wait()

    def get_future(self) -> torch.futures.Future[list[Tensor]]:
        future: torch.futures.Future[list[Tensor]] = torch.futures.Future()
        self.wait()
        future.set_result([tensor for tensor, _ in self._outputs])
        return future


def _flatten(tensors: Any) -> list[Tensor]:
    if isinstance(tensors, Tensor):
        return [tensors]
    return [leaf for part in tensors or () for leaf in _flatten(part)]


def _map(tensors: Any, fn: Callable[[Tensor], Tensor]) -> Any:
    return fn(tensors) if isinstance(tensors, Tensor) else [_map(part, fn) for part in tensors]


class SimulatedHccl(ProcessGroup):
    """A group whose collectives take tensors of the simulated device, or of the host."""

    def __init__(self, store: dist.Store, rank: int, size: int, timeout: datetime.timedelta) -> None:
        super().__init__(rank, size)
        self._gloo = ProcessGroupGloo(store, rank, size, timeout)
        self._stream = timeline.new_stream()
        # C++ keeps the group's name on a registered backend; without one functional collectives fail.
        self._register_backend(torch.device(DEVICE_TYPE), ProcessGroup.BackendType.GLOO, self._gloo)

    def getBackendName(self) -> str:  # noqa: N802
        return "hccl"

    def getSize(self) -> int:  # noqa: N802
        return self._gloo.size()

    def shutdown(self) -> None:
        pass

    def abort(self) -> None:
        pass

    def _set_sequence_number_for_group(self) -> None:
        self._gloo._set_sequence_number_for_group()

    def _run(self, name: str, outputs: Any, inputs: Any, *rest: Any) -> Work:
        """Tensors may be nested in lists; a collective in place has ``inputs`` None."""
        fn = getattr(self._gloo, name)
        out, in_ = _flatten(outputs), _flatten(inputs)
        on_device = [is_on_device(t) for t in out + in_]
        if not any(on_device):
            return fn(outputs, *(() if inputs is None else (inputs,)), *rest)
        if not all(on_device):
            raise RuntimeError(f"{name}: npu and host tensors in one collective")
        with timeline.lock:
            timeline.wait(self._stream, timeline.snapshot(current_stream()))
            with on_stream(self._stream):
                tick = timeline.launch(self._stream)
                for tensor in in_:
                    touch(tensor, is_write=False, what=f"hccl {name}")
                for tensor in out:
                    touch(tensor, is_write=True, what=f"hccl {name}")
            values = {id(t): host_alias(t).clone() for t in out}
            host_inputs = () if inputs is None else (_map(inputs, lambda t: host_alias(t).clone()),)
            host_outputs = _map(outputs, lambda t: values[id(t)])
        work = fn(host_outputs, *host_inputs, *rest)
        return _DeviceWork(work, self._stream, tick, [(t, values[id(t)]) for t in out], (out, in_))

    # ---- in place ------------------------------------------------------------------------------------------------

    def allreduce(self, tensors: Any, opts: Any = None) -> Work:
        return self._run("allreduce", tensors, None, opts or dist.AllreduceOptions())

    def allreduce_coalesced(self, tensors: Any, opts: Any = None) -> Work:
        return self._run("allreduce_coalesced", tensors, None, *_given(opts))

    def broadcast(self, tensors: Any, opts: Any) -> Work:
        return self._run("broadcast", tensors, None, opts)

    def reduce(self, tensors: Any, opts: Any) -> Work:
        return self._run("reduce", tensors, None, opts)

    # ---- from inputs to outputs ----------------------------------------------------------------------------------

    def allgather(self, outputs: Any, inputs: Any, opts: Any = None) -> Work:
        return self._run("allgather", outputs, inputs, *_given(opts))

    def _allgather_base(self, output: Tensor, input: Tensor, opts: Any = None) -> Work:
        return self._run("_allgather_base", output, input, *_given(opts))

    all_gather_single = _allgather_base

    def allgather_into_tensor_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> Work:
        return self._run("allgather_into_tensor_coalesced", outputs, inputs)

    def reduce_scatter(self, outputs: Any, inputs: Any, opts: Any = None) -> Work:
        return self._run("reduce_scatter", outputs, inputs, *_given(opts))

    def _reduce_scatter_base(self, output: Tensor, input: Tensor, opts: Any = None) -> Work:
        return self._run("_reduce_scatter_base", output, input, *_given(opts))

    reduce_scatter_single = _reduce_scatter_base

    def gather(self, outputs: Any, inputs: Any, opts: Any) -> Work:
        return self._run("gather", outputs, inputs, opts)

    def scatter(self, outputs: Any, inputs: Any, opts: Any) -> Work:
        return self._run("scatter", outputs, inputs, opts)

    def alltoall_base(self, output: Tensor, input: Tensor, out_splits: Any, in_splits: Any, opts: Any = None) -> Work:
        return self._run("alltoall_base", output, input, out_splits, in_splits, *_given(opts))

    all_to_all_single = alltoall_base

    def alltoall(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None) -> Work:
        """Gloo has none for lists of tensors."""
        out_sizes, in_sizes = [t.numel() for t in outputs], [t.numel() for t in inputs]
        sent = torch.cat([t.reshape(-1) for t in inputs])
        received = sent.new_empty(sum(out_sizes))
        self.alltoall_base(received, sent, out_sizes, in_sizes).wait()
        for tensor, part in zip(outputs, received.split(out_sizes), strict=True):
            tensor.copy_(part.view_as(tensor))
        return _DeviceWork(None, current_stream(), 0, [(t, t) for t in outputs], None)

    # ---- between two ranks, and of all ---------------------------------------------------------------------------

    def send(self, tensors: Any, dst: int, tag: int) -> Work:
        return self._run("send", tensors, None, dst, tag)

    def recv(self, tensors: Any, src: int, tag: int) -> Work:
        return self._run("recv", tensors, None, src, tag)

    def barrier(self, opts: Any = None) -> Work:
        return self._gloo.barrier(*_given(opts))


def _given(opts: Any) -> tuple[Any, ...]:
    """Gloo has defaults of its own for options that are not given."""
    return () if opts is None else (opts,)


def register_hccl() -> None:
    """Make "hccl" a backend of `init_process_group` and `new_group`."""
    dist.Backend.register_backend("hccl", SimulatedHccl, devices=[DEVICE_TYPE])
