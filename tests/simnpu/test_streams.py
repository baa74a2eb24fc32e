"""Streams, events and threads: each hazard is caught, and silent once it is ordered."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from tests.ranks import RankPools
from tests.simnpu.memory import take_hazards
from tests.simnpu.ordering import SyncHazard

NPU = "npu"


def main_and_side() -> tuple[torch.Stream, torch.Stream]:
    return torch.npu.current_stream(), torch.npu.Stream()


ORDERS: dict[str, Callable[[torch.Stream, torch.Stream], None]] = {
    "wait_stream": lambda later, earlier: later.wait_stream(earlier),
    "event": lambda later, earlier: later.wait_event(earlier.record_event()),
    "event of the module": lambda later, earlier: _record(earlier).wait(later),
    "host waits for the stream": lambda later, earlier: earlier.synchronize(),
    "host waits for an event": lambda later, earlier: _record(earlier).synchronize(),
    "host waits for all": lambda later, earlier: torch.npu.synchronize(),
    "host asks an event twice": lambda later, earlier: _ask(_record(earlier)),
}


def _record(stream: torch.Stream) -> torch.npu.Event:
    event = torch.npu.Event()
    event.record(stream)
    return event


def _ask(event: torch.npu.Event) -> None:
    assert not event.query()
    assert event.query()


def touch_after(kind: str, order: str) -> None:
    """One stream touches what the other touched before; silent if ``order`` is given."""
    main, side = main_and_side()
    tensor = torch.ones(4, device=NPU)
    side.wait_stream(main)
    with torch.npu.stream(side):
        kept = tensor + 1 if kind == "write after read" else tensor.add_(1)
    if order:
        ORDERS[order](main, side)
        touch(kind, tensor)
        return
    with pytest.raises(SyncHazard, match="still be reading" if kind == "write after read" else "wrote last"):
        touch(kind, tensor)
    main.wait_stream(side)
    del kept
    assert len(take_hazards()) == 1


def touch(kind: str, tensor: Tensor) -> None:
    if kind == "read after write":
        tensor.sum()
    else:
        tensor.zero_()


KINDS = ["read after write", "write after read", "write after write"]


@pytest.mark.parametrize("kind", KINDS)
def test_unordered_streams_raise(npu_pools: RankPools, kind: str) -> None:
    npu_pools[1].run(touch_after, kind, "")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("order", ORDERS)
def test_ordered_streams_are_silent(npu_pools: RankPools, kind: str, order: str) -> None:
    npu_pools[1].run(touch_after, kind, order)


def read_after_read() -> None:
    main, side = main_and_side()
    tensor = torch.ones(4, device=NPU)
    side.wait_stream(main)
    with torch.npu.stream(side):
        kept = tensor + 1
    tensor.sum()
    tensor.record_stream(side)
    del tensor, kept


def test_two_streams_may_read(npu_pools: RankPools) -> None:
    npu_pools[1].run(read_after_read)


def event_covers_what_came_before() -> list[str]:
    main, side = main_and_side()
    with torch.npu.stream(side):
        early = torch.ones(4, device=NPU)
        event = _record(side)
        late = torch.ones(4, device=NPU)
    event.wait(main)
    early.sum()
    with pytest.raises(SyncHazard):
        late.sum()
    main.wait_stream(side)
    early.record_stream(main)
    return take_hazards()


def test_an_event_covers_what_its_stream_was_given_before(npu_pools: RankPools) -> None:
    assert [len(h) for h in npu_pools[1].run(event_covers_what_came_before)] == [1]


def waits_are_transitive() -> None:
    main, first = main_and_side()
    second = torch.npu.Stream()
    with torch.npu.stream(first):
        tensor = torch.ones(4, device=NPU)
    second.wait_stream(first)
    main.wait_stream(second)
    tensor.sum()
    tensor.record_stream(main)


def test_waits_are_transitive(npu_pools: RankPools) -> None:
    npu_pools[1].run(waits_are_transitive)


# ---- threads ---------------------------------------------------------------------------------------------------------


def prefetch(wait: str) -> float:
    """A worker copies batches on a stream of its own, the main thread sums them."""
    batches: queue.Queue[tuple[Tensor, Tensor, torch.npu.Event] | None] = queue.Queue(2)
    stream = torch.npu.Stream()

    def copy_batches() -> None:
        for k in range(20):
            host = torch.full((100,), float(k)).pin_memory()
            with torch.npu.stream(stream):
                on_device = host.to(NPU, non_blocking=True)
            event = _record(stream)
            if wait == "worker waits":
                event.synchronize()
            batches.put((host, on_device, event))
        batches.put(None)

    worker = threading.Thread(target=copy_batches)
    worker.start()
    total = 0.0
    try:
        while (batch := batches.get()) is not None:
            _, on_device, event = batch
            if wait == "event":
                event.wait()
            on_device.record_stream(torch.npu.current_stream())
            total += float(on_device.sum())
    finally:
        while batch is not None:
            batch = batches.get()
        worker.join()
    return total


def test_a_worker_thread_has_streams_of_its_own(npu_pools: RankPools) -> None:
    assert npu_pools[1].run(prefetch, "event") == [19000.0]


def refuse_prefetch(wait: str) -> int:
    with pytest.raises(SyncHazard, match="wrote last"):
        prefetch(wait)
    return len(take_hazards())


# The host's wait in the worker might come in time, but nothing shows that the main thread relies on it.
@pytest.mark.parametrize("wait", ["", "worker waits"])
def test_streams_of_two_threads_need_an_event(npu_pools: RankPools, wait: str) -> None:
    assert npu_pools[1].run(refuse_prefetch, wait) == [1]


class Where(torch.autograd.Function):
    """Notes the stream and the thread of its backward."""

    seen: list[tuple[int, int]] = []

    @staticmethod
    def forward(ctx: object, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: object, grad: Tensor) -> Tensor:
        Where.seen.append((torch.npu.current_stream().stream_id, threading.get_ident()))
        return grad * 2


def backward_on(stream: torch.Stream) -> int:
    stream.wait_stream(torch.npu.default_stream())
    with torch.npu.stream(stream):
        x = torch.ones(3, device=NPU, requires_grad=True)
        Where.apply(x).sum().backward()
        assert x.grad is not None and x.grad.tolist() == [2, 2, 2]
    stream.synchronize()
    return stream.stream_id


def streams_of_backwards() -> None:
    Where.seen.clear()
    streams = [torch.npu.default_stream(), torch.npu.Stream(), torch.npu.default_stream()]
    expected = [backward_on(stream) for stream in streams]
    assert [stream for stream, _ in Where.seen] == expected
    assert threading.get_ident() not in {thread for _, thread in Where.seen}
    assert torch.npu.current_stream() == torch.npu.default_stream()
    # several threads at once, each on a stream of its own
    Where.seen.clear()
    streams = [torch.npu.Stream() for _ in range(4)]
    threads = [threading.Thread(target=lambda s=s: [backward_on(s) for _ in range(20)]) for s in streams]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(s for s, _ in Where.seen) == sorted(s.stream_id for s in streams for _ in range(20))


def test_backward_sees_the_stream_that_it_was_called_on(npu_pools: RankPools) -> None:
    npu_pools[1].run(streams_of_backwards)


# ---- the module ------------------------------------------------------------------------------------------------------


def ask_module() -> None:
    module = torch.get_device_module("npu")
    assert module.is_available() and module.device_count() == 1
    device = torch.device("npu", 0)
    module.set_device(device)
    assert module.current_device() == 0
    with pytest.raises(RuntimeError, match="invalid device ordinal"):
        module.set_device(1)
    with pytest.raises(RuntimeError, match="invalid device ordinal"):
        torch.empty(1, device="npu:1")
    free, total = module.mem_get_info(device)
    assert 0 < free <= total
    stream = module.Stream(device=device)
    assert stream.query()
    with module.stream(stream):
        assert module.current_stream(device) == stream
        kept = torch.ones(1, device=NPU)
        assert not stream.query()
    with stream:
        assert module.current_stream() == stream
        with module.stream(None):
            assert module.current_stream() == stream
    assert module.current_stream() == module.default_stream() != stream
    start, end = module.Event(enable_timing=True), module.Event(enable_timing=True)
    start.record()
    end.record()
    module.synchronize(device)
    assert end.query() and start.elapsed_time(end) > 0
    assert torch.accelerator.current_accelerator() == torch.device("npu")
    del kept


def test_the_module_has_torch_npu_s_names(npu_pools: RankPools) -> None:
    npu_pools[1].run(ask_module)


# ---- rows of a table -------------------------------------------------------------------------------------------------


def use_rows(mine: list[int], theirs: list[int]) -> None:
    """Two streams write rows of one table at the same time."""
    main, side = main_and_side()
    table, state = torch.zeros(10, 3, device=NPU)[1:], torch.zeros(10, device=NPU)
    side.wait_stream(main)
    with torch.npu.stream(side):
        numbers = torch.tensor(theirs, device=NPU)
        table.index_copy_(0, numbers, torch.ones(len(theirs), 3, device=NPU))
        state[numbers] = 1.0
        kept = table.index_select(0, numbers)
    numbers = torch.tensor(mine, device=NPU)
    table.index_copy_(0, numbers, torch.full((len(mine), 3), 2.0, device=NPU))
    state.index_add_(0, numbers, torch.full((len(mine),), 2.0, device=NPU))
    torch.embedding_bag(table, numbers, torch.tensor([0, 1], device=NPU))
    main.wait_stream(side)
    assert table.sum(1).tolist() == [6.0 if r in mine else 3.0 if r in theirs else 0.0 for r in range(9)]
    assert state[:9].tolist() == [2.0 if r in mine else 1.0 if r in theirs else 0.0 for r in range(9)]
    del kept


def test_streams_may_use_different_rows(npu_pools: RankPools) -> None:
    npu_pools[1].run(use_rows, [0, 3, 8], [1, 2])


def share_a_row() -> int:
    with pytest.raises(SyncHazard, match="aten::index_copy"):
        use_rows([0, 3], [1, 3])
    return len(take_hazards())


def test_streams_that_share_a_row_need_an_order(npu_pools: RankPools) -> None:
    npu_pools[1].run(share_a_row)


def use_row_and_all() -> int:
    main, side = main_and_side()
    table = torch.zeros(10, 3, device=NPU)
    side.wait_stream(main)
    with torch.npu.stream(side):
        table.index_copy_(0, torch.tensor([4], device=NPU), torch.ones(1, 3, device=NPU))
    table[:4].sum()
    with pytest.raises(SyncHazard, match="wrote last"):
        table[2:5].sum()
    main.wait_stream(side)
    assert table[2:5].sum().item() == 3.0
    return len(take_hazards())


def test_a_view_touches_its_part(npu_pools: RankPools) -> None:
    assert npu_pools[1].run(use_row_and_all) == [1]
