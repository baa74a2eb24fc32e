"""The oracle's scenarios through the train pipeline: batches, model, delays, and one rank's side of the comparison."""

from __future__ import annotations

import contextlib
import random
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torchrec.distributed import DistributedModelParallel
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor
from torchrec.streamable import Pipelineable

from hybridrec import HybridTrainPipelineSparseDist
from hybridrec.cache.swap import HostMemorySwapper, StagedSwapper
from hybridrec.distributed.lookup import PooledLookup
from hybridrec.distributed.sharded_collection import ShardedHashCollection
from tests.distributed.oracle import Batch, Oracle
from tests.distributed.scenario import (
    Model,
    Scenario,
    SequenceModel,
    build,
    compare_state,
    dense_of,
    device_rows,
    make_batch,
    make_oracle,
    raise_together,
    state_of,
    to_kjt,
)


@dataclass
class PipelineBatch(Pipelineable):
    """What a user's loader yields."""

    features: KeyedJaggedTensor
    labels: Tensor

    def to(self, device: torch.device, non_blocking: bool = False) -> PipelineBatch:
        return PipelineBatch(
            self.features.to(device, non_blocking=non_blocking), self.labels.to(device, non_blocking=non_blocking)
        )

    def record_stream(self, stream: torch.Stream) -> None:
        self.features.record_stream(stream)
        self.labels.record_stream(stream)

    def pin_memory(self) -> PipelineBatch:
        return PipelineBatch(self.features.pin_memory(), self.labels.pin_memory())


class PipelinedModel(Model):
    """``model(batch) -> (loss, output)``."""

    def forward(self, batch: PipelineBatch) -> tuple[Tensor, Tensor]:
        loss = super().forward(batch.features, batch.labels)
        return loss, loss.detach()


class PipelinedSequenceModel(SequenceModel):
    """``model(batch) -> (loss, output)``."""

    def forward(self, batch: PipelineBatch) -> tuple[Tensor, Tensor]:
        loss = super().forward(batch.features, batch.labels)
        return loss, loss.detach()


class Counted:
    """An iterator that counts how often it was asked."""

    def __init__(self, items: Iterable[Any]) -> None:
        self._items = iter(items)
        self.calls = 0

    def __iter__(self) -> Counted:
        return self

    def __next__(self) -> Any:
        self.calls += 1
        return next(self._items)


def all_batches(scenario: Scenario) -> list[list[Batch]]:
    """Step -> rank -> batch."""
    world_size = dist.get_world_size()
    return [[make_batch(scenario, s, r, world_size) for r in range(world_size)] for s in range(scenario.steps)]


def mine(scenario: Scenario, batches: Iterable[list[Batch]]) -> list[PipelineBatch]:
    """This rank's batches as its loader yields them."""
    return [PipelineBatch(to_kjt(scenario, b[dist.get_rank()]), b[dist.get_rank()].labels) for b in batches]


def build_pipelined(
    scenario: Scenario,
    batches: list[list[Batch]],
    depth: int,
    model_class: type[Model] | None = None,
    **kwargs: Any,
) -> tuple[DistributedModelParallel, HybridTrainPipelineSparseDist]:
    """The user's script, up to the pipeline."""
    slots = {t.name: device_rows(scenario, t, batches, dist.get_world_size()) for t in scenario.tables}
    model_class = model_class or (PipelinedSequenceModel if scenario.is_sequence else PipelinedModel)
    dmp, optimizer = build(scenario, slots, model_class)
    device = torch.device(scenario.device)
    return dmp, HybridTrainPipelineSparseDist(dmp, optimizer, device, pipe_n_batch=depth, **kwargs)


def build_oracle(scenario: Scenario) -> tuple[Oracle, torch.optim.Optimizer]:
    """The oracle with a dense part of its own, and that part's optimizer."""
    dense = DistributedDataParallel(
        dense_of(scenario), gradient_as_bucket_view=True, broadcast_buffers=False, static_graph=True
    )
    return make_oracle(scenario, dense), torch.optim.Adagrad(dense.parameters(), lr=0.1)


@contextlib.contextmanager
def delays(seed: int, seconds: float = 0.004) -> Iterator[None]:
    """Sleep at random in every stage, before and after, differently on every rank."""
    rng = random.Random(f"{seed} {dist.get_rank()}")

    def late(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            time.sleep(rng.random() * seconds if rng.random() < 0.5 else 0.0)
            result = function(*args, **kwargs)
            time.sleep(rng.random() * seconds if rng.random() < 0.5 else 0.0)
            return result

        return call

    with contextlib.ExitStack() as stack:
        for owner, name in (
            (ShardedHashCollection, "input_dist"),
            (ShardedHashCollection, "map_batch"),
            (ShardedHashCollection, "swap_batch"),
            (HostMemorySwapper, "swap"),
            (StagedSwapper, "swap"),
            (PooledLookup, "compute"),
            (PooledLookup, "update"),
        ):
            stack.enter_context(mock.patch.object(owner, name, late(getattr(owner, name))))
        yield


def settle(pipeline: HybridTrainPipelineSparseDist) -> None:
    """Let the host thread finish, so that rows can be looked at; takes back nothing but what waits for pins."""
    pipeline._thread.settle()


def check_pins(dmp: DistributedModelParallel) -> None:
    if any(s.pins for s in dmp.module.ebc.stats()):
        raise AssertionError(f"pins: {dmp.module.ebc.stats()}")


def run_pipeline_against_oracle(
    scenario: Scenario, depth: int, *, delay_seed: int | None = None, check_every: int = 10, **kwargs: Any
) -> dict[str, Any]:
    """Train both on this rank; every bit of losses, rows and states must be equal.

    Args:
        scenario: The run.
        depth: Of the pipeline.
        delay_seed: Of random delays in every stage; None: no delays.
        check_every: Steps between comparisons of all rows.
        kwargs: For `build_pipelined`.

    Returns:
        What a test asserts on besides: the report, table and pipeline statistics, and how often the iterator was asked.
    """
    batches = all_batches(scenario)
    dmp, pipeline = build_pipelined(scenario, batches, depth, **kwargs)
    oracle, dense_optimizer = build_oracle(scenario)
    iterator = Counted(mine(scenario, batches))
    with delays(delay_seed) if delay_seed is not None else contextlib.nullcontext():
        for step, everyone in enumerate(batches):
            loss = pipeline.progress(iterator)
            expected = oracle.step(everyone, dense_optimizer)
            asked = min(step + depth, scenario.steps + 1)
            difference = "" if loss.item() == expected.item() else f"loss {loss.item()!r}, not {expected.item()!r}"
            if not difference and iterator.calls != asked:
                difference = f"the iterator was asked {iterator.calls} times, not {asked}"
            if not difference and step % check_every == check_every - 1:
                settle(pipeline)
                difference = compare_state(scenario, oracle, state_of(dmp))
            raise_together(difference, step)
        try:
            pipeline.progress(iterator)
        except StopIteration:
            pass
        else:
            raise AssertionError("the drained pipeline computed another batch")
    raise_together(compare_state(scenario, oracle, state_of(dmp)), scenario.steps)
    check_pins(dmp)
    stats = pipeline.stats()
    if (stats.batches_taken, stats.batches_committed, stats.batches_in_flight) != (scenario.steps, scenario.steps, 0):
        raise AssertionError(f"{stats}")
    return {"stats": dmp.module.ebc.stats(), "pipeline": stats, "report": pipeline.report(), "asked": iterator.calls}
