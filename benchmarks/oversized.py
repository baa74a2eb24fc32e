"""What a batch costs that goes in passes, against the same batch in the slots, moving or staying.

One rank, one collection, the same batches on all sides; only the device tier differs:

    in slots    all rows of all batches (nothing moves)
    moving      exactly the largest batch (every step swaps nearly all of its rows)
    in passes   one slot a table: nothing fits, every batch goes through transient slots

Repeats are interleaved; figures are medians and their ratios.

    python -m benchmarks.oversized --dim 64
"""

from __future__ import annotations

import argparse
import os
import statistics
import time

import numpy as np
import torch
import torch.distributed as dist
from torchrec.distributed.planner import EmbeddingShardingPlanner, ParameterConstraints, Topology
from torchrec.distributed.types import ShardingEnv
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from hybridrec import HashEmbeddingBagCollection, HashEmbeddingBagConfig, get_default_hybrid_sharders

OPTIMIZERS = {"sgd": torch.optim.SGD, "adagrad": torch.optim.Adagrad, "adam": torch.optim.Adam}


def collection(args: argparse.Namespace, device_rows: int) -> torch.nn.Module:
    """Sharded over the ranks there are, with so many slots a table."""
    configs = [
        HashEmbeddingBagConfig(
            name=f"t{t}",
            num_embeddings=args.rows,
            embedding_dim=args.dim,
            feature_names=[f"f{t}"],
            device_rows=device_rows,
        )
        for t in range(args.tables)
    ]
    model = HashEmbeddingBagCollection(configs)
    apply_optimizer_in_backward(OPTIMIZERS[args.optimizer], model.parameters(), {"lr": 0.01})
    env = ShardingEnv.from_process_group(dist.group.WORLD)
    sharders = get_default_hybrid_sharders(env)
    constraints = {c.name: ParameterConstraints(compute_kernels=["fused_uvm_caching"]) for c in configs}
    topology = Topology(world_size=dist.get_world_size(), compute_device="cpu", ddr_cap=2**40)
    plan = EmbeddingShardingPlanner(topology=topology, constraints=constraints).plan(model, sharders)
    return sharders[0].shard(model, plan.plan[""], env, torch.device("cpu"))


def main() -> None:
    """Print the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tables", type=int, default=4)
    parser.add_argument("--rows", type=int, default=200_000, help="ids of each table (default 200000)")
    parser.add_argument("--dim", type=int, default=64)
    parser.add_argument("--batch", type=int, default=4096)
    parser.add_argument("--pooling", type=int, default=4)
    parser.add_argument("--optimizer", choices=sorted(OPTIMIZERS), default="adagrad")
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--warmup", type=int, default=3)
    args = parser.parse_args()
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)

    rng = np.random.default_rng(1)
    ids_per_batch = args.batch * args.pooling
    batches = [rng.integers(0, args.rows, (args.tables, ids_per_batch)) for _ in range(5)]
    largest = max(len(np.unique(table)) for batch in batches for table in batch)
    keys = [f"f{t}" for t in range(args.tables)]
    lengths = torch.full((args.tables * args.batch,), args.pooling, dtype=torch.int64)
    kjts = [KeyedJaggedTensor(keys=keys, values=torch.from_numpy(b.reshape(-1)), lengths=lengths) for b in batches]
    sides = {
        "in slots": collection(args, args.rows),
        "moving": collection(args, largest),
        "in passes": collection(args, 1),
    }
    times: dict[str, list[float]] = {name: [] for name in sides}
    for repeat in range(args.warmup + args.repeats):
        for name, ours in sides.items():
            start = time.perf_counter()
            out = ours(kjts[repeat % len(kjts)]).wait().values()
            out.backward(torch.ones_like(out))
            if repeat >= args.warmup:
                times[name].append(time.perf_counter() - start)
    median = {name: statistics.median(t) * 1e3 for name, t in times.items()}
    print(f"{args.tables} tables x {ids_per_batch:,} ids, dim {args.dim}, {args.optimizer}; {args.repeats} repeats")
    for name, ms in median.items():
        passes = f", {sides[name].lookup._passes.num_passes} passes" if name == "in passes" else ""
        print(f"  {name:10} {ms:8.1f} ms a step, {ms / median['moving']:5.2f} of moving{passes}")
    if not all(s.oversized == args.warmup + args.repeats for s in sides["in passes"].stats()[:1]):
        raise SystemExit("some batches did not go in passes: this run does not measure what it should")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
