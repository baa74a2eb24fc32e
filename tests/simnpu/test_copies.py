"""Copies that do not block are as late as they may be."""

from __future__ import annotations

import gc

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from tests.ranks import RankPools
from tests.simnpu.memory import take_hazards
from tests.simnpu.ordering import SyncHazard

NPU = "npu"
POISON = torch.full((4,), 0xCB, dtype=torch.uint8).view(torch.float32).item()


def pinned(value: float) -> Tensor:
    return torch.full((4,), value).pin_memory()


def reuse_source(wait: bool, *, used_on_device: bool = False) -> tuple[list[float], list[str]]:
    """Copy, perhaps wait, overwrite the source, read what came over."""
    host = pinned(1.0)
    on_device = host.to(NPU, non_blocking=True)
    if used_on_device:
        on_device.add_(0)
    if wait:
        event = torch.npu.Event()
        event.record()
        event.synchronize()
    host.fill_(9.0)
    return on_device.tolist(), take_hazards()


def test_a_source_that_is_overwritten_too_early_changes_the_data_and_is_reported(npu_pools: RankPools) -> None:
    ((values, (hazard,)),) = npu_pools[1].run(reuse_source, False)
    assert values == [9.0] * 4
    assert "pinned memory of shape [4] was changed" in hazard


def test_device_work_after_the_copy_does_not_free_the_source(npu_pools: RankPools) -> None:
    ((values, (hazard,)),) = npu_pools[1].run(reuse_source, False, used_on_device=True)
    assert values == [1.0] * 4  # here the copy had to be done by then; on a device it need not be
    assert "pinned memory of shape [4] was changed" in hazard


def test_a_source_may_be_overwritten_after_a_wait(npu_pools: RankPools) -> None:
    assert npu_pools[1].run(reuse_source, True) == [([1.0] * 4, [])]


def reuse_for_next_copy(wait: bool) -> list[str]:
    host = pinned(1.0)
    first = host.to(NPU, non_blocking=True)
    if wait:
        torch.npu.current_stream().synchronize()
    host.fill_(2.0)
    second = host.to(NPU, non_blocking=True)
    torch.npu.synchronize()
    assert second.tolist() == [2.0] * 4
    del first
    return take_hazards()


def test_one_buffer_for_two_copies_needs_a_wait_between(npu_pools: RankPools) -> None:
    ((hazard,),) = npu_pools[1].run(reuse_for_next_copy, False)
    assert "was changed" in hazard
    assert npu_pools[1].run(reuse_for_next_copy, True) == [[]]


def reuse_part(part: slice) -> list[str]:
    host = torch.zeros(8).pin_memory()
    on_device = host[:4].to(NPU, non_blocking=True)
    host[part] = 1.0
    torch.npu.synchronize()
    del on_device
    return take_hazards()


def test_only_the_part_that_is_copied_must_stay(npu_pools: RankPools) -> None:
    assert npu_pools[1].run(reuse_part, slice(4, 8)) == [[]]
    assert [len(h) for h in npu_pools[1].run(reuse_part, slice(3, 5))] == [1]


def pageable_source() -> list[float]:
    host = torch.ones(4)
    on_device = host.to(NPU, non_blocking=True)
    host.fill_(9.0)
    return on_device.tolist()


def test_memory_that_is_not_pinned_is_copied_at_once(npu_pools: RankPools) -> None:
    assert npu_pools[1].run(pageable_source) == [[1.0] * 4]


def read_target() -> tuple[list[float], list[float], list[float]]:
    target = pinned(5.0)
    source = torch.full((4,), 3.0, device=NPU)
    target.copy_(source, non_blocking=True)
    before = target.tolist()
    other = torch.npu.Stream()
    other.synchronize()  # a stream that knows nothing of the copy
    after_other = target.tolist()
    source.zero_()  # ordered behind the copy
    torch.npu.current_stream().synchronize()
    return before, after_other, target.tolist()


def test_a_target_is_poison_until_the_host_waited(npu_pools: RankPools) -> None:
    assert npu_pools[1].run(read_target) == [([POISON] * 4, [POISON] * 4, [3.0] * 4)]


def there_and_back_again(is_ordered: bool) -> tuple[list[float], list[str]]:
    """Device to host to device through one buffer, without a wait of the host."""
    buffer, side = pinned(0.0), torch.npu.Stream()
    buffer.copy_(torch.full((4,), 3.0, device=NPU), non_blocking=True)
    if is_ordered:
        side.wait_stream(torch.npu.current_stream())
    with torch.npu.stream(side):
        back = buffer.to(NPU, non_blocking=True).tolist()
    return back, take_hazards()


def test_streams_order_copies_through_the_host(npu_pools: RankPools) -> None:
    assert npu_pools[1].run(there_and_back_again, True) == [([3.0] * 4, [])]
    ((values, (hazard,)),) = npu_pools[1].run(there_and_back_again, False)
    assert values == [POISON] * 4
    assert "may still be writing" in hazard


def overwrite_from_device(is_ordered: bool) -> list[str]:
    """One buffer: its old content goes to the device, then new content comes from there."""
    buffer, side = pinned(1.0), torch.npu.Stream()
    old = buffer.to(NPU, non_blocking=True)
    new = torch.full((4,), 2.0, device=NPU)
    side.wait_stream(torch.npu.current_stream()) if is_ordered else torch.npu.Stream()
    if not is_ordered:
        with torch.npu.stream(side):
            new = torch.full((4,), 2.0, device=NPU)
    with torch.npu.stream(side):
        buffer.copy_(new, non_blocking=True)
    torch.npu.synchronize()
    assert buffer.tolist() == [2.0] * 4
    assert not is_ordered or old.tolist() == [1.0] * 4
    return take_hazards()


def test_the_device_may_reuse_a_buffer_in_its_own_order(npu_pools: RankPools) -> None:
    assert npu_pools[1].run(overwrite_from_device, True) == [[]]
    hazards = npu_pools[1].run(overwrite_from_device, False)[0]
    assert any("overwrites pinned memory" in h for h in hazards)


def use_copy_on_another_stream(is_ordered: bool) -> list[float]:
    side = torch.npu.Stream()
    host = pinned(1.0)
    with torch.npu.stream(side):
        on_device = host.to(NPU, non_blocking=True)
    if not is_ordered:
        with pytest.raises(SyncHazard, match="wrote last"):
            on_device + 1
        assert len(take_hazards()) == 1
    torch.npu.current_stream().wait_stream(side)
    on_device.record_stream(torch.npu.current_stream())
    return (on_device + 1).tolist()


@pytest.mark.parametrize("is_ordered", [True, False])
def test_a_copy_is_work_of_its_stream(npu_pools: RankPools, is_ordered: bool) -> None:
    assert npu_pools[1].run(use_copy_on_another_stream, is_ordered) == [[2.0] * 4]


def ask_pinned() -> None:
    host = torch.ones(6)
    copy = host.pin_memory()
    assert copy.is_pinned() and not host.is_pinned()
    assert copy.pin_memory() is copy
    assert copy[2:].view(2, 2).is_pinned()
    made = torch.empty(3, pin_memory=True)
    view = made[1:]
    del made
    gc.collect()
    assert view.is_pinned()
    assert not torch.ones(3, device=NPU).is_pinned()
    loader = DataLoader(TensorDataset(torch.arange(4.0)), 2, pin_memory=True)
    assert [batch[0].is_pinned() for batch in loader] == [True, True]


def test_pinned_memory_is_known(npu_pools: RankPools) -> None:
    npu_pools[1].run(ask_pinned)
