"""Steps with part of the rows on the device, against tables that are all there, and against TorchRec's own caching.

One model, one stream of batches, in one process on one device; each side trains them through its own pipeline::

    all device            TorchRec's EmbeddingBagCollection, kernel "fused": FBGEMM's tables in device memory
    hybrid 10 %, ...      hashed tables whose device tier has room for that share of the rows, the others in host memory
    fused_uvm_caching     TorchRec's, with a cache for the same share of the rows
    fused_uvm             TorchRec's, all rows in host memory that the device reads

Repeats are interleaved; figures are medians of a step's time and their ratio to "all device". What a device or its
libraries do not have is skipped by name. Where TorchRec does not know the device, hashed tables with all rows on it
take the place of "all device".

    python -m benchmarks.device_ratio --device cuda
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

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.planner import EmbeddingShardingPlanner, ParameterConstraints, Topology
from torchrec.distributed.train_pipeline import TrainPipelineSparseDist
from torchrec.distributed.types import CacheParams, ShardingEnv
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection
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
from hybridrec.backend import DeviceBackend, resolve_backend

TORCHREC_DEVICES = ("cpu", "cuda")
UVM_DEVICES = ("cuda",)
ALL_DEVICE = "all device"


@dataclass
class Batch(Pipelineable):  # type: ignore[misc]  # TorchRec is untyped
    """Ids and labels."""

    features: KeyedJaggedTensor
    labels: Tensor

    def to(self, device: torch.device, non_blocking: bool = False) -> Batch:
        """A copy on the device."""
        return Batch(self.features.to(device, non_blocking=non_blocking), self.labels.to(device, non_blocking=True))

    def record_stream(self, stream: torch.Stream) -> None:
        """Both parts are used there."""
        self.features.record_stream(stream)
        self.labels.record_stream(stream)

    def pin_memory(self) -> Batch:
        """A copy from which copies need not block."""
        return Batch(self.features.pin_memory(), self.labels.pin_memory())


class Model(nn.Module):
    """Tables and a small dense part."""

    def __init__(self, tables: nn.Module, width: int, device: torch.device) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.tables = tables
        self.dense = nn.Sequential(nn.Linear(width, 256), nn.ReLU(), nn.Linear(256, 1)).to(device)

    def forward(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """(loss, loss)."""
        logits = self.dense(self.tables(batch.features).values()).squeeze(1)
        loss = nn.functional.binary_cross_entropy_with_logits(logits, batch.labels)
        return loss, loss.detach()


def make_batches(args: argparse.Namespace, *, is_hashed: bool, pins: bool) -> list[Batch]:
    """The stream: row numbers, or the 64-bit ids that stand for them."""
    rng = np.random.default_rng(args.seed)
    ids = rng.integers(-(2**63), 2**63, size=(args.tables, args.rows), dtype=np.int64)
    order = [rng.permutation(args.rows) for _ in range(args.tables)]  # hot rows lie scattered over a table
    lengths = torch.full((args.tables * args.batch,), args.pooling, dtype=torch.int64)
    batches = []
    for _ in range(args.distinct_batches):
        rows = [o[power_law_ranks(rng, args.rows, args.batch * args.pooling, args.alpha)] for o in order]
        values = np.concatenate([ids[t][r] if is_hashed else r for t, r in enumerate(rows)])
        features = KeyedJaggedTensor(
            keys=[f"f{t}" for t in range(args.tables)], values=torch.from_numpy(values), lengths=lengths
        )
        batch = Batch(features, torch.from_numpy(rng.random(args.batch) < 0.5).float())
        batches.append(batch.pin_memory() if pins else batch)
    return batches


class Side:
    """A model, its pipeline and its endless stream of batches."""

    def __init__(self, args: argparse.Namespace, device: torch.device, kernel: str, share: float, hashed: bool) -> None:
        """
        Args:
            args: Sizes.
            device: Where it trains.
            kernel: TorchRec's name of the placement.
            share: Of the rows, in the device's cache.
            hashed: Ours, else TorchRec's.
        """
        backend = resolve_backend(device.type)
        batches = make_batches(args, is_hashed=hashed, pins=not backend.is_host_memory)
        self.batches: Iterator[Batch] = itertools.cycle(batches)
        common = [
            {"name": f"t{t}", "num_embeddings": args.rows, "embedding_dim": args.dim, "feature_names": [f"f{t}"]}
            for t in range(args.tables)
        ]
        tables: nn.Module
        if hashed:
            rows = None if kernel == "fused" else max(1, int(args.rows * share))
            tables = HashEmbeddingBagCollection(
                [HashEmbeddingBagConfig(**c, device_rows=rows) for c in common], device=device
            )
        else:
            tables = EmbeddingBagCollection([EmbeddingBagConfig(**c) for c in common], device=torch.device("meta"))
        self.model = shard(Model(tables, args.tables * args.dim, device), device, kernel, share, hashed)
        dense = KeyedOptimizerWrapper(
            dict(in_backward_optimizer_filter(self.model.named_parameters())), lambda p: torch.optim.Adagrad(p, lr=0.01)
        )
        optimizer = CombinedOptimizer([self.model.fused_optimizer, dense])
        self.pipeline: Any = (
            HybridTrainPipelineSparseDist(self.model, optimizer, device, pipe_n_batch=args.depth)
            if hashed
            else TrainPipelineSparseDist(self.model, optimizer, device)
        )
        self._device, self._backend = device, backend
        self.loss = torch.empty(0)

    def segment(self, steps: int) -> float:
        """Seconds of a step."""
        self._backend.synchronize(self._device)
        start = time.perf_counter()
        for _ in range(steps):
            self.loss = self.pipeline.progress(self.batches)
        self._backend.synchronize(self._device)
        return (time.perf_counter() - start) / steps

    def traffic(self) -> str:
        """What moved so far, of hashed tables."""
        if not isinstance(self.model.module.tables, nn.Module) or not hasattr(self.model.module.tables, "stats"):
            return ""
        stats = self.model.module.tables.stats()
        uniques = sum(s.uniques for s in stats)
        kernels = "/".join(sorted({s.kernel for s in stats}))
        return f"  {sum(s.unique_hits for s in stats) / uniques:4.0%} of rows found there, {kernels} kernel"


def shard(model: Model, device: torch.device, kernel: str, share: float, hashed: bool) -> DistributedModelParallel:
    """The user's script: optimizer in the backward, planner, model."""
    apply_optimizer_in_backward(RowWiseAdagrad, model.tables.parameters(), {"lr": 0.01, "eps": 1e-8})
    sharders = get_default_hybrid_sharders(
        ShardingEnv(world_size=1, rank=0, pg=dist.new_group(backend="gloo")), host_memory_bytes=1 << 40
    )
    cache = CacheParams(load_factor=share) if kernel == "fused_uvm_caching" and not hashed else None
    constraint = ParameterConstraints(
        sharding_types=["row_wise" if hashed else "table_wise"], compute_kernels=[kernel], cache_params=cache
    )
    configs = model.tables.embedding_bag_configs()
    planner = EmbeddingShardingPlanner(
        topology=Topology(world_size=1, compute_device=device.type, ddr_cap=1 << 42),
        constraints={config.name: constraint for config in configs},
    )
    plan = planner.plan(model, sharders)
    return DistributedModelParallel(model, device=device, plan=plan, sharders=sharders)


def sides(args: argparse.Namespace, device: torch.device) -> dict[str, tuple[str, float, bool]]:
    """Name -> (kernel, share, whether it is ours) of all sides that the device has; the others are told."""
    chosen: dict[str, tuple[str, float, bool]] = {}
    if device.type in TORCHREC_DEVICES:
        chosen[ALL_DEVICE] = ("fused", 1.0, False)
    else:
        print(f"TorchRec's tables: skipped: it knows no {device.type!r}; hashed tables, all there, instead")
        chosen[ALL_DEVICE] = ("fused", 1.0, True)
    for share in args.shares:
        chosen[f"hybrid {share:.0%}"] = ("fused_uvm_caching", share, True)
    uvm = {f"fused_uvm_caching {share:.0%}": ("fused_uvm_caching", share, False) for share in args.shares if share < 1}
    uvm["fused_uvm"] = ("fused_uvm", 0.0, False)
    if device.type in UVM_DEVICES:
        return chosen | uvm
    for name in uvm:
        print(f"{name}: skipped: FBGEMM has unified memory on {', '.join(UVM_DEVICES)} alone")
    return chosen


def run(args: argparse.Namespace, device: torch.device, backend: DeviceBackend) -> dict[str, float]:
    """Print one line a side; returns each one's ratio to "all device"."""
    made = {name: Side(args, device, *how) for name, how in sides(args, device).items()}
    for side in made.values():
        side.segment(args.warmup + args.distinct_batches)
    times: dict[str, list[float]] = {name: [] for name in made}
    for repeat in range(args.repeats):
        for name in sorted(made, reverse=bool(repeat % 2)):
            times[name].append(made[name].segment(args.steps))
    base = statistics.median(times[ALL_DEVICE])
    ratios = {}
    for name, seconds in times.items():
        ratios[name] = statistics.median(seconds) / base
        print(
            f"{name:24} {statistics.median(seconds) * 1e3:8.2f} ms [{min(seconds) * 1e3:.2f}-{max(seconds) * 1e3:.2f}] "
            f" {ratios[name]:6.3f}x{made[name].traffic()}",
            flush=True,
        )
    losses = {made[name].loss.item() for name in made if name.startswith("hybrid")}
    print(f"the hybrids' last losses are {'the same, bit for bit' if len(losses) == 1 else f'not the same: {losses}'}")
    return ratios


def main() -> None:
    """Parse the command line and measure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--shares", type=float, nargs="+", default=[0.1, 0.4, 1.0], help="of the rows on the device")
    parser.add_argument("--tables", type=int, default=8)
    parser.add_argument("--rows", type=int, default=100_000, help="rows of each table")
    parser.add_argument("--dim", type=int, default=64)
    parser.add_argument("--batch", type=int, default=1024)
    parser.add_argument("--pooling", type=int, default=4, help="ids of each bag")
    parser.add_argument("--alpha", type=float, default=1.05, help="exponent of the power law")
    parser.add_argument("--depth", type=int, default=3, help="batches in flight of the hybrids")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--steps", type=int, default=16, help="of a repeat")
    parser.add_argument("--warmup", type=int, default=4)
    parser.add_argument("--distinct-batches", type=int, default=16)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    backend = resolve_backend(args.device)
    device = backend.indexed(torch.device(args.device))
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    groups = "gloo" if backend.is_host_memory else f"cpu:gloo,{args.device}:{backend.collective_backend}"
    dist.init_process_group(groups, store=dist.HashStore(), rank=0, world_size=1)
    print(
        f"{device}, {args.tables} tables x {args.rows:,} rows x {args.dim}, batch {args.batch} x {args.pooling} ids, "
        f"power law {args.alpha}, row-wise Adagrad, {torch.get_num_threads()} threads, load {os.getloadavg()[0]:.1f}",
        flush=True,
    )
    run(args, device, backend)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
