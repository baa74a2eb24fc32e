"""What a device's tests do, for any device: train cached and all-resident, train warm without waits, read.

How a wait of the host is seen depends on the device: torch's sync debug mode on GPUs, copies and scalar reads of the
simulated NPU. The steps themselves, and what is asked of them, are the same.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch

from tests.distributed.oracle import Batch, Table
from tests.distributed.pipelines import all_batches, build_pipelined, check_pins, mine
from tests.distributed.scenario import Scenario, make_batch, state_of
from tests.distributed.test_hazards import batches_of

STEPS, WARM = 60, 30
TABLES = (
    Table(name="user", dim=8, features=("user",)),
    Table(name="item", dim=16, features=("clicked", "bought"), is_mean=True, seed=3),
    Table(name="word", dim=5, features=("word",)),
)


def prepare() -> None:
    """What a rank does before anything else: the mode in which a device repeats its bits."""
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
    torch.use_deterministic_algorithms(True, warn_only=True)


# ---- the same bits ---------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Trained:
    """What came of a run."""

    losses: list[float]
    tables: list[dict[int, bytes]]
    """Of each table id -> weights and states."""
    loads: int
    oversized: int


def trained(scenario: Scenario, depth: int, batches: list[list[Batch]] | None = None) -> Trained:
    """Train a scenario on its device through the pipeline; with depth 0 in a plain loop."""
    batches = batches or all_batches(scenario)
    dmp, pipeline = build_pipelined(scenario, batches, max(1, depth))
    mine_ = mine(scenario, batches)
    losses = []
    if depth:
        iterator = iter(mine_)
        losses = [pipeline.progress(iterator).item() for _ in batches]
    else:
        for batch in mine_:
            pipeline._optimizer.zero_grad()
            loss, _ = dmp(batch.to(torch.device(scenario.device)))
            loss.backward()
            pipeline._optimizer.step()
            losses.append(loss.item())
    tables = [{id_: record.tobytes() for id_, record in table.items()} for table in state_of(dmp)]
    check_pins(dmp)
    stats = dmp.module.ebc.stats()
    return Trained(losses, tables, sum(s.loads for s in stats), sum(s.oversized for s in stats))


def hazard(numbers: list[list[int]], depth: int, scenario: Scenario) -> tuple[Trained, Trained]:
    """Hand-made batches with all rows on the device, and through a cache that they make trouble in."""
    batches = batches_of(numbers, scenario)
    whole = dataclasses.replace(scenario, kernel="fused", cache="all")
    return trained(whole, 0, batches), trained(scenario, depth, batches)


# ---- no waits --------------------------------------------------------------------------------------------------------


class Synchronised(AssertionError):
    """The host waited for the device where it must not."""


@contextlib.contextmanager
def no_waits(device_type: str) -> Iterator[None]:
    """Inside, any wait of the host for the device raises, but those for events (the stages' own)."""
    if device_type == "cuda":
        before = torch.cuda.get_sync_debug_mode()
        torch.cuda.set_sync_debug_mode("error")
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode(before)
        return
    assert device_type == "npu"
    with _simulated_waits():
        yield


@contextlib.contextmanager
def _simulated_waits() -> Iterator[None]:
    """The simulated NPU's copies that block, and operators whose result the host needs, raise."""
    from tests.simnpu import copies, kernels

    to_device, to_host, run = copies._copy_to_device, copies._copy_to_host, kernels._Call.run

    def copy_in(source: Any, target: Any, stream: int, tick: int, non_blocking: bool) -> None:
        if not non_blocking and source.numel():
            raise Synchronised(f"a blocking copy of {list(source.shape)} to the device")
        to_device(source, target, stream, tick, non_blocking)

    def copy_out(source: Any, target: Any, stream: int, tick: int, non_blocking: bool) -> None:
        if not (non_blocking and copies.is_pinned(target)) and source.numel():
            raise Synchronised(f"a blocking copy of {list(source.shape)} to the host")
        to_host(source, target, stream, tick, non_blocking)

    def call(self: Any, args: Any, kwargs: Any) -> Any:
        if self._name in ("aten::_local_scalar_dense", "aten::nonzero", "aten::_unique2", "aten::unique_consecutive"):
            raise Synchronised(f"{self._name}: the host needs its result")
        return run(self, args, kwargs)

    with (
        mock.patch.object(copies, "_copy_to_device", copy_in),
        mock.patch.object(copies, "_copy_to_host", copy_out),
        mock.patch.object(kernels._Call, "run", call),
    ):
        yield


def reserved_bytes(device_type: str) -> tuple[int, int]:
    """(bytes that torch's allocator has from the device, how often it asked): both must stay once warm."""
    stats = torch.get_device_module(device_type).memory_stats()
    return stats["reserved_bytes.all.current"], stats["segment.all.allocated"]


@dataclasses.dataclass(frozen=True)
class Steady:
    """What some steps did once warm."""

    memory: tuple[tuple[int, int], tuple[int, int]] | None
    """`reserved_bytes` before and after; None where the device does not count."""
    loads: int
    write_backs: int


def steady_steps(device_type: str, *, optimizer: str = "adagrad", depth: int = 3, counts_memory: bool = True) -> Steady:
    """Train until warm, then on, with no wait allowed. Batches repeat, so that sizes do not grow any more."""
    scenario = Scenario(optimizer=optimizer, cache="tenth", steps=STEPS, device=device_type, tables=TABLES)
    batches = [[make_batch(scenario, step % 10, 0, 1)] for step in range(STEPS)]
    dmp, pipeline = build_pipelined(scenario, batches, depth)
    stream = iter([batch.pin_memory() for batch in mine(scenario, batches)])
    for _ in range(WARM):
        pipeline.progress(stream)
    pipeline._thread.settle()
    first = dmp.module.ebc.stats()
    before = reserved_bytes(device_type) if counts_memory else None
    with no_waits(device_type):
        for _ in range(STEPS - WARM - depth):
            pipeline.progress(stream)
    after = reserved_bytes(device_type) if counts_memory else None
    last = dmp.module.ebc.stats()
    pipeline.reset()
    return Steady(
        memory=None if before is None or after is None else (before, after),
        loads=sum(b.loads - a.loads for a, b in zip(first, last, strict=True)),
        write_backs=sum(b.write_backs - a.write_backs for a, b in zip(first, last, strict=True)),
    )


def steady_reads(device_type: str) -> int:
    """Forwards in eval mode once warm, with no wait allowed; how many."""
    scenario = Scenario(optimizer="sgd", cache="tenth", steps=STEPS, device=device_type, tables=TABLES)
    batches = [[make_batch(scenario, step % 10, 0, 1)] for step in range(STEPS)]
    dmp, pipeline = build_pipelined(scenario, batches, 1)
    stream = iter([batch.pin_memory() for batch in mine(scenario, batches)])
    for _ in range(10):
        pipeline.progress(stream)
    dmp.eval()
    num = 0
    with torch.no_grad():
        for _ in range(15):
            pipeline.progress(stream)
        with no_waits(device_type):
            for _ in range(10):
                pipeline.progress(stream)
                num += 1
    pipeline.reset()
    return num
