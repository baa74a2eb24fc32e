"""How much of the host traffic the train pipeline hides behind compute.

Host traffic of a batch is DIST, MAP and SWAP: all that stands between its ids and its rows in their slots, MAP's
processor time included. The device is the host behind an emulated link: rows go through the staging buffers of a real
device, and each copy between "host" and "device" also takes latency + bytes / bandwidth, while the thread sleeps.
Compute (lookup, head, backward, update, and a loop that fills up) keeps one core busy for a multiple of that time.

The same model and data are trained serially (depth 1) and pipelined, in turns, in one run::

    hidden = (serial step - pipelined step) / host traffic of a serial step

1 is all of it. At a compute/copy ratio r below 1 no more than r can be hidden. Whatever the pipeline itself costs, and
what the two threads take from each other, counts against it. "Stall" is how long the training thread only waited.

    python -m benchmarks.overlap --ratios 0.5 1 2 4
"""

from __future__ import annotations

import argparse
import itertools
import os
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.planner import EmbeddingShardingPlanner, ParameterConstraints, Topology
from torchrec.distributed.types import ShardingEnv
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper
from torchrec.optim.optimizers import in_backward_optimizer_filter
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor
from torchrec.streamable import Pipelineable

from benchmarks.step import power_law_ranks
from hybridrec import (
    HashEmbeddingBagCollection,
    HashEmbeddingBagConfig,
    HybridTrainPipelineSparseDist,
    get_default_hybrid_sharders,
)
from hybridrec.backend import resolve_backend
from hybridrec.cache.swap import StagedSwapper
from hybridrec.distributed import lookup, sharder
from hybridrec.native import core_description

HOST_STAGES = ("dist", "wait", "map", "swap")
COMPUTE_STAGES = ("forward", "backward", "optimizer")
WARM_UP = 4


@dataclass
class Batch(Pipelineable):  # type: ignore[misc]  # TorchRec is untyped
    """Ids and labels."""

    features: KeyedJaggedTensor
    labels: Tensor

    def to(self, device: torch.device, non_blocking: bool = False) -> Batch:
        """It is there."""
        return self

    def record_stream(self, stream: torch.Stream) -> None:
        """Nothing to record."""

    def pin_memory(self) -> Batch:
        """Nothing to pin."""
        return self


class BehindALink:
    """The host's backend, whose slots can be reached through staging buffers alone."""

    is_host_memory = False

    def __init__(self) -> None:
        self._host = resolve_backend("cpu")

    def __getattr__(self, name: str) -> Any:
        return getattr(self._host, name)


class Compute(nn.Module):
    """Keeps one core busy for some time."""

    def __init__(self) -> None:
        super().__init__()
        self.seconds = 0.0
        self.register_buffer("matrix", torch.rand(160, 160), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """``x``, later."""
        end = time.thread_time() + self.seconds  # of this thread: waiting for a core does not count as work
        with torch.no_grad():
            while time.thread_time() < end:
                torch.mm(self.matrix, self.matrix)
        return x


class Model(nn.Module):
    """Hashed tables, compute, a linear head."""

    def __init__(self, collection: HashEmbeddingBagCollection, width: int) -> None:
        super().__init__()
        self.collection, self.compute, self.head = collection, Compute(), nn.Linear(width, 1)

    def forward(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """(loss, loss)."""
        pooled = self.compute(self.collection(batch.features).values())
        loss = (self.head(pooled).squeeze(1) - batch.labels).square().mean()
        return loss, loss.detach()


def linked_swapper(args: argparse.Namespace) -> type[StagedSwapper]:
    """A swapper whose copies take as long as on the link."""

    def pay(num_bytes: int) -> None:
        time.sleep(args.latency_us * 1e-6 + num_bytes / (args.gigabytes_per_second * 1e9))

    class LinkedSwapper(StagedSwapper):
        def _read_slots(self, slots: Tensor, rows_per_table: Any, staging: Tensor) -> None:
            super()._read_slots(slots, rows_per_table, staging)
            pay(staging.numel() * 4)

        def _write_slots(self, slots: Tensor, rows_per_table: Any, staging: Tensor) -> None:
            pay(staging.numel() * 4)
            super()._write_slots(slots, rows_per_table, staging)

        def upload(self, tensors: list[Tensor]) -> list[Tensor]:
            pay(sum(t.numel() * t.element_size() for t in tensors))
            return super().upload(tensors)

    return LinkedSwapper


def build(args: argparse.Namespace) -> tuple[DistributedModelParallel, CombinedOptimizer]:
    """The model, sharded over this one rank."""
    configs = [
        HashEmbeddingBagConfig(
            name=f"t{t}",
            num_embeddings=args.rows,
            embedding_dim=args.dim,
            feature_names=[f"f{t}"],
            device_rows=int(args.rows * args.cache),
        )
        for t in range(args.tables)
    ]
    model = Model(HashEmbeddingBagCollection(configs), args.tables * args.dim)
    apply_optimizer_in_backward(RowWiseAdagrad, model.collection.parameters(), {"lr": 0.01})
    env = ShardingEnv(world_size=1, rank=0, pg=dist.new_group(backend="gloo"))
    sharders = get_default_hybrid_sharders(env)
    planner = EmbeddingShardingPlanner(
        topology=Topology(world_size=1, compute_device="cpu", ddr_cap=2**40),
        constraints={c.name: ParameterConstraints(compute_kernels=["fused_uvm_caching"]) for c in configs},
    )
    plan = planner.plan(model, sharders)
    with (
        mock.patch.object(sharder, "resolve_backend", lambda device_type: BehindALink()),
        mock.patch.object(lookup, "StagedSwapper", linked_swapper(args)),
    ):
        dmp = DistributedModelParallel(model, device=torch.device("cpu"), plan=plan, sharders=sharders)
    dense = KeyedOptimizerWrapper(
        dict(in_backward_optimizer_filter(dmp.named_parameters())), lambda p: torch.optim.SGD(p, lr=0.01)
    )
    return dmp, CombinedOptimizer([dmp.fused_optimizer, dense])


def make_batches(args: argparse.Namespace) -> list[Batch]:
    """Power-law batches over tables whose ids are arbitrary int64 values."""
    rng = np.random.default_rng(args.seed)
    ids = rng.integers(-(2**63), 2**63 - 1, size=(args.tables, args.rows), dtype=np.int64)
    batches = []
    for _ in range(args.distinct_batches):
        values = [
            ids[t][power_law_ranks(rng, args.rows, args.batch * args.pooling, args.alpha)] for t in range(args.tables)
        ]
        kjt = KeyedJaggedTensor(
            keys=[f"f{t}" for t in range(args.tables)],
            values=torch.from_numpy(np.concatenate(values)),
            lengths=torch.full((args.tables * args.batch,), args.pooling, dtype=torch.int64),
        )
        batches.append(Batch(kjt, torch.from_numpy(rng.random(args.batch, dtype=np.float32))))
    return batches


@dataclass(frozen=True)
class Segment:
    """Seconds a step."""

    step: float
    host: float
    compute: float
    stall: float


def segment(pipeline: HybridTrainPipelineSparseDist, data: Iterator[Batch], steps: int) -> Segment:
    """Some steps after a warm-up; what is in flight afterwards is dropped."""
    for _ in range(WARM_UP):
        pipeline.progress(data)
    before = pipeline.stats()
    start = time.perf_counter()
    for _ in range(steps):
        pipeline.progress(data)
    step = (time.perf_counter() - start) / steps
    after = pipeline.stats()
    pipeline.reset()

    def spent(kind: str, names: tuple[str, ...]) -> float:
        now, then = getattr(after, kind), getattr(before, kind)
        return sum(now.get(n, 0.0) - then.get(n, 0.0) for n in names) / steps

    return Segment(
        step,
        spent("stage_seconds", HOST_STAGES),
        spent("stage_seconds", COMPUTE_STAGES),
        spent("stall_seconds", (*HOST_STAGES, "queue")),
    )


def main() -> None:
    """Parse the command line and print one line a ratio."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ratios", type=float, nargs="+", default=[0.5, 1.0, 2.0, 4.0], help="compute / host traffic")
    parser.add_argument("--depth", type=int, default=3)
    parser.add_argument("--tables", type=int, default=26)
    parser.add_argument("--rows", type=int, default=100_000, help="rows of each table")
    parser.add_argument("--dim", type=int, default=16)
    parser.add_argument("--batch", type=int, default=2048)
    parser.add_argument("--pooling", type=int, default=1, help="ids of each bag")
    parser.add_argument("--alpha", type=float, default=1.05, help="exponent of the power law")
    parser.add_argument("--cache", type=float, default=0.05, help="share of the rows that the device holds")
    parser.add_argument("--gigabytes-per-second", type=float, default=0.07, help="of the link")
    parser.add_argument("--latency-us", type=float, default=20.0, help="of one copy over the link")
    parser.add_argument("--steps", type=int, default=12, help="of a segment")
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--distinct-batches", type=int, default=40)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--least", type=float, help="exit with status 1 if less is hidden at ratio 1")
    args = parser.parse_args()
    torch.set_num_threads(1)  # one core computes, the other does the host's work
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    dmp, optimizer = build(args)
    data = itertools.cycle(make_batches(args))
    serial, deep = (
        HybridTrainPipelineSparseDist(dmp, optimizer, torch.device("cpu"), pipe_n_batch=depth)
        for depth in (1, args.depth)
    )
    for _ in range(args.distinct_batches):  # the cache fills, every row exists
        serial.progress(data)
    alone = [segment(serial, data, args.steps) for _ in range(5)]
    host, compute = (statistics.median(getattr(s, name) for s in alone) for name in ("host", "compute"))
    stats = dmp.module.collection.stats()
    print(
        f"{args.tables} tables x {args.rows:,} rows x {args.dim}, batch {args.batch} x {args.pooling}, cache "
        f"{args.cache:.0%}, hit rate {statistics.fmean(s.unique_hit_rate for s in stats):.2f}, link "
        f"{args.gigabytes_per_second} GB/s + {args.latency_us} us, depth {args.depth}, {core_description()}, "
        f"load {os.getloadavg()[0]:.1f}\n"
        f"a step alone: host traffic {host * 1e3:.1f} ms, compute {compute * 1e3:.1f} ms",
        flush=True,
    )
    hidden_at_one = None
    for ratio in args.ratios:
        if ratio * host < compute:
            print(
                f"ratio {ratio:3.1f}: not possible, compute alone is {compute / host:.1f} of the host traffic",
                flush=True,
            )
            continue
        dmp.module.compute.seconds = ratio * host - compute
        pairs = []
        for repeat in range(args.repeats):
            order = [("serial", serial), ("deep", deep)]
            measured = {name: segment(p, data, args.steps) for name, p in (order if repeat % 2 else reversed(order))}
            pairs.append((measured["serial"], measured["deep"]))
        hidden = [(s.step - d.step) / s.host for s, d in pairs]
        middle = statistics.median(hidden)
        print(
            f"ratio {ratio:3.1f}: serial {statistics.median(s.step for s, _ in pairs) * 1e3:6.1f} ms, pipelined "
            f"{statistics.median(d.step for _, d in pairs) * 1e3:6.1f} ms, stall "
            f"{statistics.median(d.stall for _, d in pairs) * 1e3:5.1f} ms a step, hidden {middle:4.0%} "
            f"[{min(hidden):.0%}-{max(hidden):.0%}] of at most {min(1.0, ratio):.0%}",
            flush=True,
        )
        hidden_at_one = middle if ratio == 1.0 else hidden_at_one
    dist.destroy_process_group()
    if args.least is not None and hidden_at_one is not None and hidden_at_one < args.least:
        raise SystemExit(f"{hidden_at_one:.0%} hidden at ratio 1, less than {args.least:.0%}")


if __name__ == "__main__":
    main()
