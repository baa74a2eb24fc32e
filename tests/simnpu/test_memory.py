"""Memory of the simulated device: out of the host's reach, finite, and freed when it may be."""

from __future__ import annotations

import ctypes
import gc

import pytest
import torch
from torch import nn

from tests.ranks import RankPools, RankTimeout
from tests.simnpu.memory import check_no_hazards, heap, host_alias, set_memory_bytes, take_hazards
from tests.simnpu.ordering import SyncHazard

NPU = "npu"


def read_by_address() -> int:
    tensor = torch.ones(4, device=NPU)
    return ctypes.c_int32.from_address(tensor.data_ptr()).value


def test_reading_device_memory_by_its_address_ends_the_process(npu_pools: RankPools) -> None:
    with pytest.raises(RankTimeout, match="exit code -11"):
        npu_pools[1].run(read_by_address)


def refuse_the_host() -> None:
    on_device, on_host = torch.ones(3, device=NPU), torch.ones(3)
    rows = torch.tensor([0, 2], device=NPU)
    with pytest.raises(TypeError, match="numpy"):
        on_device.numpy()
    for mixed in (
        lambda: on_device + on_host,
        lambda: on_host.index_select(0, rows),
        lambda: on_device.index_select(0, torch.tensor([0, 2])),
        lambda: nn.functional.embedding(torch.tensor([0]), torch.ones(3, 2, device=NPU)),
        lambda: torch.cat([on_device, on_host]),
    ):
        with pytest.raises(RuntimeError, match="same device"):
            mixed()
    assert (on_device * torch.tensor(2.0)).tolist() == [2, 2, 2]  # a number may come from the host


def test_host_and_device_tensors_do_not_mix(npu_pools: RankPools) -> None:
    npu_pools[1].run(refuse_the_host)


def look_at_poison() -> tuple[float, float]:
    fresh = torch.empty(2, device=NPU)
    value = fresh[0].item()
    alias = host_alias(fresh)
    del fresh
    torch.empty(1, device=NPU)  # the next allocation takes freed memory back
    return value, alias[1].item()


def test_fresh_and_freed_memory_is_poison(npu_pools: RankPools) -> None:
    poison = torch.full((4,), 0xCB, dtype=torch.uint8).view(torch.float32).item()
    assert npu_pools[1].run(look_at_poison) == [(poison, poison)]


def free_what_another_stream_reads(remedy: str) -> list[str]:
    main, side = torch.npu.current_stream(), torch.npu.Stream()
    tensor = torch.ones(4, device=NPU)
    side.wait_stream(main)
    with torch.npu.stream(side):
        result = tensor + 1
    if remedy == "record_stream":
        tensor.record_stream(side)
    elif remedy == "wait_stream":
        main.wait_stream(side)
    elif remedy == "synchronize":
        side.synchronize()
    del tensor
    hazards = take_hazards()
    del result
    return hazards


def test_freeing_what_another_stream_may_use_is_reported(npu_pools: RankPools) -> None:
    ((hazard,),) = npu_pools[1].run(free_what_another_stream_reads, "")
    assert "was freed while stream" in hazard


@pytest.mark.parametrize("remedy", ["record_stream", "wait_stream", "synchronize"])
def test_freeing_what_no_stream_may_use_any_more_is_silent(npu_pools: RankPools, remedy: str) -> None:
    assert npu_pools[1].run(free_what_another_stream_reads, remedy) == [[]]


def free_before_waiting() -> list[str]:
    main, side = torch.npu.current_stream(), torch.npu.Stream()
    tensor = torch.ones(4, device=NPU)
    side.wait_stream(main)
    with torch.npu.stream(side):
        result = tensor + 1
    del tensor
    main.wait_stream(side)  # too late: the memory was free to be used by then
    del result
    return take_hazards()


def test_a_wait_after_freeing_does_not_help(npu_pools: RankPools) -> None:
    ((hazard,),) = npu_pools[1].run(free_before_waiting)
    assert "was freed" in hazard


def leave_a_hazard() -> None:
    free_what = torch.ones(4, device=NPU)
    side = torch.npu.Stream()
    side.wait_stream(torch.npu.current_stream())
    with torch.npu.stream(side):
        free_what + 1


def check_hazards() -> None:
    leave_a_hazard()
    with pytest.raises(SyncHazard, match="1 hazards"):
        check_no_hazards()
    check_no_hazards()  # said once


def test_hazards_are_checked_on_demand_and_after_every_job(npu_pools: RankPools) -> None:
    npu_pools[1].run(check_hazards)
    with pytest.raises(Exception, match="was freed while stream"):
        npu_pools[1].run(leave_a_hazard)


def fill_the_device() -> tuple[int, int]:
    before, total = torch.npu.mem_get_info()
    set_memory_bytes(total - before + 4096)
    try:
        kept = torch.empty(512, device=NPU)
        free_then, _ = torch.npu.mem_get_info()
        with pytest.raises(torch.OutOfMemoryError, match="Tried to allocate 4096 bytes"):
            torch.empty(1024, device=NPU)
        del kept
        torch.empty(1024, device=NPU)
    finally:
        set_memory_bytes(total)
    return free_then, total


def test_memory_is_as_large_as_it_is_set(npu_pools: RankPools) -> None:
    assert npu_pools[1].run(fill_the_device) == [(2048, 64 << 30)]


def count_blocks() -> tuple[int, int]:
    gc.collect()
    before = torch.npu.memory_allocated()
    for _ in range(3000):
        result = torch.empty(100, device=NPU) + 1
    del result
    return torch.npu.memory_allocated() - before, len(heap.blocks)


def test_memory_comes_back(npu_pools: RankPools) -> None:
    ((leaked, blocks),) = npu_pools[1].run(count_blocks)
    assert leaked == 0
    assert blocks < 1000
