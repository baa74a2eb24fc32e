"""What hashing and the transaction cost: MAP + SWAP + kernel, against a bare table whose row numbers are known.

Both sides look up and update the same rows of the same batches with the same FBGEMM kernel (row-wise Adagrad, sum).
Ours starts from 64-bit ids and keeps all rows in the device tier: it maps ids to slots, opens and commits a
transaction, and moves rows that miss (none, after warm-up). The bare side is FBGEMM's TBE with the row numbers given.
No exchange on either side. Repeats are interleaved; the figure is the ratio of the medians.

    python -m benchmarks.step --pooling 1 20
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable

import numpy as np
import torch
import torch.distributed as dist
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from fbgemm_gpu.split_table_batched_embeddings_ops_common import BoundsCheckMode, EmbeddingLocation, PoolingMode
from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
    ComputeDevice,
    SplitTableBatchedEmbeddingBagsCodegen,
)
from torch import Tensor
from torchrec.distributed.planner import EmbeddingShardingPlanner, ParameterConstraints, Topology
from torchrec.distributed.types import ShardingEnv
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from hybridrec import HashEmbeddingBagCollection, HashEmbeddingBagConfig, get_default_hybrid_sharders
from hybridrec.native import core_description

LEARNING_RATE, EPS = 0.01, 1e-8


def power_law_ranks(rng: np.random.Generator, num_rows: int, count: int, alpha: float) -> np.ndarray:
    """int64 [count] in [0, num_rows), 0 the most frequent, density proportional to (rank + 1)^-alpha."""
    u = rng.random(count)
    x = (1 - u * (1 - float(num_rows) ** (1 - alpha))) ** (1 / (1 - alpha))
    return np.minimum(x.astype(np.int64), num_rows) - 1


def make_batches(args: argparse.Namespace, pooling: int) -> tuple[list[Tensor], Tensor]:
    """(row numbers int64 [T * B * L] of each batch, ids int64 [T, rows])."""
    rng = np.random.default_rng(args.seed)
    ids = rng.integers(-(2**63), 2**63, size=(args.tables, args.rows), dtype=np.int64)
    row_of_rank = [rng.permutation(args.rows) for _ in range(args.tables)]  # hot rows lie scattered over a table
    batches = []
    for _ in range(args.distinct_batches):
        rows = [order[power_law_ranks(rng, args.rows, args.batch * pooling, args.alpha)] for order in row_of_rank]
        batches.append(torch.from_numpy(np.concatenate(rows)))
    return batches, torch.from_numpy(ids)


def bare_table(args: argparse.Namespace) -> SplitTableBatchedEmbeddingBagsCodegen:
    """FBGEMM's tables, all in one object, as TorchRec builds them."""
    tbe = SplitTableBatchedEmbeddingBagsCodegen(
        [(args.rows, args.dim, EmbeddingLocation.HOST, ComputeDevice.CPU)] * args.tables,
        optimizer=EmbOptimType.EXACT_ROWWISE_ADAGRAD,
        learning_rate=LEARNING_RATE,
        eps=EPS,
        pooling_mode=PoolingMode.SUM,
        bounds_check_mode=BoundsCheckMode.NONE,
    )
    tbe.init_embedding_weights_uniform(-0.01, 0.01)
    return tbe


def hashed_collection(args: argparse.Namespace) -> torch.nn.Module:
    """Sharded over this one rank, all rows in the device tier."""
    configs = [
        HashEmbeddingBagConfig(name=f"t{t}", num_embeddings=args.rows, embedding_dim=args.dim, feature_names=[f"f{t}"])
        for t in range(args.tables)
    ]
    model = HashEmbeddingBagCollection(configs)
    apply_optimizer_in_backward(RowWiseAdagrad, model.parameters(), {"lr": LEARNING_RATE, "eps": EPS})
    env = ShardingEnv.from_process_group(dist.group.WORLD)
    sharders = get_default_hybrid_sharders(env)
    constraints = {c.name: ParameterConstraints(compute_kernels=["fused"]) for c in configs}
    topology = Topology(world_size=1, compute_device="cpu", ddr_cap=2**40)
    plan = EmbeddingShardingPlanner(topology=topology, constraints=constraints).plan(model, sharders)
    return sharders[0].shard(model, plan.plan[""], env, torch.device("cpu"))


def run(args: argparse.Namespace, pooling: int) -> float:
    """Print one line of figures; returns the ratio."""
    batches, ids = make_batches(args, pooling)
    offsets = torch.arange(0, args.tables * args.batch * pooling + 1, pooling)
    lengths = torch.full((args.tables * args.batch,), pooling, dtype=torch.int64)
    grad = torch.randn(args.batch, args.tables * args.dim) * 1e-3
    table_of = torch.arange(args.tables).repeat_interleave(args.batch * pooling)
    keys = [f"f{t}" for t in range(args.tables)]

    bare, ours = bare_table(args), hashed_collection(args)

    def distributed(values: Tensor, bag_lengths: Tensor) -> tuple[object, object]:
        context = ours.create_context()
        kjt = KeyedJaggedTensor(keys=keys, values=values, lengths=bag_lengths)
        return context, ours.input_dist(context, kjt).wait().wait()

    # Every row is trained once, so that the timed steps neither insert nor load.
    chunk = args.batch * pooling
    for start in range(0, args.rows, chunk):
        part = ids[:, start : start + chunk]
        ones = torch.ones(part.numel(), dtype=torch.int64)
        context, received = distributed(part.reshape(-1), ones)
        ours.compute(context, received)[0].sum().backward()

    hashed = [ids[table_of, rows] for rows in batches]

    def step_bare(i: int) -> dict[str, float]:
        start = time.perf_counter()
        bare(batches[i], offsets).backward(grad)
        return {"total": time.perf_counter() - start}

    def step_ours(i: int) -> dict[str, float]:
        context, received = distributed(hashed[i], lengths)
        start = time.perf_counter()
        ours.map_batch(context, received)
        mapped = time.perf_counter()
        out = ours.compute(context, received)[0]
        looked_up = time.perf_counter()
        out.backward(grad)
        end = time.perf_counter()
        return {
            "total": end - start,
            "map + swap": mapped - start,
            "forward": looked_up - mapped,
            "backward": end - looked_up,
        }

    times: dict[str, list[dict[str, float]]] = {"bare": [], "ours": []}
    sides: list[tuple[str, Callable[[int], dict[str, float]]]] = [("bare", step_bare), ("ours", step_ours)]
    for repeat in range(args.warmup + args.repeats):
        for name, step in sides if repeat % 2 else reversed(sides):
            measured = step(repeat % len(batches))
            if repeat >= args.warmup:
                times[name].append(measured)
    stats = ours.stats()
    if any(s.write_backs or s.loads for s in stats):
        raise SystemExit("rows moved between the tiers: this run does not measure what it should")
    median = {k: statistics.median(t["total"] for t in v) * 1e3 for k, v in times.items()}
    spread = {k: (min(t["total"] for t in v) * 1e3, max(t["total"] for t in v) * 1e3) for k, v in times.items()}
    stages = ", ".join(
        f"{stage} {statistics.median(t[stage] for t in times['ours']) * 1e3:.2f}"
        for stage in ("map + swap", "forward", "backward")
    )
    ratio = median["ours"] / median["bare"]
    print(
        f"pooling {pooling:2d}: bare {median['bare']:7.2f} ms [{spread['bare'][0]:.2f}-{spread['bare'][1]:.2f}]  "
        f"ours {median['ours']:7.2f} ms [{spread['ours'][0]:.2f}-{spread['ours'][1]:.2f}]  "
        f"ratio {ratio:.3f}  ({stages})",
        flush=True,
    )
    return ratio


def main() -> None:
    """Parse the command line and print one line a pooling factor."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tables", type=int, default=26)
    parser.add_argument("--rows", type=int, default=100_000, help="rows of each table")
    parser.add_argument("--dim", type=int, default=64)
    parser.add_argument("--batch", type=int, default=2048)
    parser.add_argument("--pooling", type=int, nargs="+", default=[1, 20], help="ids of each bag")
    parser.add_argument("--alpha", type=float, default=1.05, help="exponent of the power law")
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--warmup", type=int, default=3)
    parser.add_argument("--distinct-batches", type=int, default=4)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="torch's threads, both sides")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--limit", type=float, help="exit with status 1 if a ratio is above")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    print(
        f"{args.tables} tables x {args.rows:,} rows x {args.dim}, batch {args.batch}, power law {args.alpha}, row-wise "
        f"Adagrad, {args.threads} threads, {core_description()}, load {os.getloadavg()[0]:.1f}",
        flush=True,
    )
    ratios = [run(args, pooling) for pooling in args.pooling]
    dist.destroy_process_group()
    if args.limit is not None and max(ratios) > args.limit:
        raise SystemExit(f"ratio {max(ratios):.3f} is above the limit of {args.limit}")


if __name__ == "__main__":
    main()
