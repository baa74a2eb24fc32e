"""The self-test of a device that copies, orders and moves as it should, and of devices that do not."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any
from unittest import mock

import pytest
import torch

from device_backends import npu
from hybridrec.errors import BackendError
from tests.ranks import RankPools
from tests.simnpu import copies
from tests.simnpu.memory import take_hazards

NPU = "npu:0"  # torch knows the name in the ranks alone


def is_silent() -> None:
    npu.backend.self_test(torch.device(NPU))


def test_a_sound_device_passes(npu_pools: RankPools) -> None:
    npu_pools[1].run(is_silent)


def copies_nothing() -> AbstractContextManager[Any]:
    """A copy to the device that returns and leaves what was there."""
    return mock.patch.object(copies, "_copy_to_device", lambda *args: None)


def forgets_events() -> AbstractContextManager[Any]:
    """An event that is over before what it was recorded behind."""
    event = torch.get_device_module("npu").Event
    return mock.patch.object(event, "synchronize", lambda self: None)


def fails(name: str) -> str:
    with globals()[name](), pytest.raises(BackendError) as caught:
        npu.backend.self_test(torch.device(NPU))
    torch.get_device_module("npu").synchronize()
    take_hazards()
    return str(caught.value)


@pytest.mark.parametrize("fault", ["copies_nothing", "forgets_events"])
def test_a_device_that_lies_is_refused(npu_pools: RankPools, fault: str) -> None:
    (text,) = npu_pools[1].run(fails, fault)
    assert text.startswith("device 'npu:0': self-test of copies, streams and events: ")
    assert "of 262,144 values came back wrong; value 0 is" in text
    assert "Do not train on this device" in text
