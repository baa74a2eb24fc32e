"""Train the little DLRM on hashed tables that are larger than their device tier.

What differs from a TorchRec script is marked (hybridrec). `run.sh` starts it.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor
from torchmetrics.classification import BinaryAUROC
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.planner import EmbeddingShardingPlanner, ParameterConstraints, Topology
from torchrec.distributed.types import ShardingEnv, ShardingPlan
from torchrec.modules.embedding_configs import PoolingType
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper
from torchrec.optim.optimizers import in_backward_optimizer_filter
from tqdm import tqdm  # type: ignore[import-untyped]

from examples.little_demo.dataset import (
    FEATURES,
    Batch,
    Ratings,
    expected_distinct,
    load_ratings,
    rank_batches,
    shuffled,
    split_rows,
)
from examples.little_demo.launch import Ranks, join_ranks, leave_ranks
from examples.little_demo.model import EMBEDDING_DIM, LittleDLRM
from examples.little_demo.report import gather_stats, hit_rate, plan_lines, stats_lines
from hybridrec import HashEmbeddingBagCollection, HashEmbeddingBagConfig, get_default_hybrid_sharders

AUC_GOAL = 0.77
"""What one epoch reaches with room to spare: 0.7795 is the worst of seeds 0 to 5 on two ranks."""
ROW_LEARNING_RATE = 0.2
DENSE_LEARNING_RATE = 2e-3
REPORT_EVERY = 10
"""Batches between two printed losses."""


def build_tables(ratings: Ratings, *, batch_size: int, world_size: int, seed: int) -> list[HashEmbeddingBagConfig]:
    """One hashed table a feature."""
    ids = {"user": ratings.users, "movie": ratings.movies, "genre": ratings.genres}
    return [
        HashEmbeddingBagConfig(
            name=feature,
            feature_names=[feature],
            embedding_dim=EMBEDDING_DIM,
            num_embeddings=10**12,  # nominal: nothing is allocated for it, and ids are not bounded by it
            pooling=PoolingType.MEAN if feature == "genre" else PoolingType.SUM,
            # (hybridrec) The rows that will really live, so that the planner accounts those.
            planned_rows=len(torch.unique(ids[feature])),
            # (hybridrec) The genres stay on the device, of the other tables only a part.
            device_rows=None if feature == "genre" else choose_device_rows(ids[feature], batch_size, world_size),
            seed=seed,
        )
        for feature in FEATURES
    ]


def choose_device_rows(ids: Tensor, batch_size: int, world_size: int) -> int:
    """Rows of one table that a rank keeps on its device: a quarter of its share, so that rows really have to move.

    But never fewer than one batch needs, since all its rows must be on the device together: a rank owns U / W of the
    batch's U distinct rows, give or take sqrt(U / W) by chance. Five times that is never exceeded in practice; if it
    were, hybridrec would refuse the batch, saying so, on all ranks.
    """
    quarter = math.ceil(len(torch.unique(ids)) / world_size / 4)
    expected = expected_distinct(ids, batch_size) / world_size
    return max(quarter, math.ceil(expected + 5 * math.sqrt(expected)))


def build_model(
    tables: list[HashEmbeddingBagConfig], ranks: Ranks
) -> tuple[DistributedModelParallel, CombinedOptimizer, ShardingPlan]:
    """The sharded model, its optimizer, and the plan that it was sharded by. Collective."""
    # (hybridrec) Instead of EmbeddingBagCollection.
    ebc = HashEmbeddingBagCollection(tables=tables, device=ranks.device)
    model = LittleDLRM(ebc, num_features=len(FEATURES), device=ranks.device)
    apply_optimizer_in_backward(torch.optim.Adagrad, model.ebc.parameters(), {"lr": ROW_LEARNING_RATE})

    # (hybridrec) Instead of get_default_sharders().
    host_env = ShardingEnv(world_size=ranks.world_size, rank=ranks.rank, pg=ranks.host_group)
    sharders = get_default_hybrid_sharders(host_env)
    planner = EmbeddingShardingPlanner(
        topology=Topology(
            world_size=ranks.world_size,
            local_world_size=ranks.local_world_size,
            compute_device=ranks.device.type,
        ),
        constraints={
            table.name: ParameterConstraints(
                sharding_types=["row_wise"],
                # All rows on the device, or a cache there over a table in host memory.
                compute_kernels=["fused" if table.device_rows is None else "fused_uvm_caching"],
            )
            for table in tables
        },
    )
    plan = planner.collective_plan(model, sharders, dist.GroupMember.WORLD)
    sharded = DistributedModelParallel(model, device=ranks.device, plan=plan, sharders=sharders)
    dense_optimizer = KeyedOptimizerWrapper(
        dict(in_backward_optimizer_filter(sharded.named_parameters())),
        lambda parameters: torch.optim.Adam(parameters, lr=DENSE_LEARNING_RATE),
    )
    return sharded, CombinedOptimizer([sharded.fused_optimizer, dense_optimizer]), plan


def train(
    model: DistributedModelParallel,
    optimizer: CombinedOptimizer,
    batches: Iterable[Batch],
    device: torch.device,
    bar: tqdm | None = None,
) -> list[Tensor]:
    """One pass over the batches.

    Args:
        model: From `build_model`.
        optimizer: From `build_model`.
        batches: Of this rank; every rank must bring the same number.
        device: Of the dense part.
        bar: Advanced by one a batch; shows loss and hit rate of this rank. None: nothing is shown.

    Returns:
        The loss of each batch, float32 [], on the device.
    """
    model.train()
    losses: list[Tensor] = []
    for batch in batches:
        optimizer.zero_grad()
        loss, _ = model(batch.to(device))
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
        if bar is not None:
            bar.update()
            if len(losses) % REPORT_EVERY == 0 or len(losses) == bar.total:
                show_progress(bar, losses, hit_rate(model.module.ebc.stats()))
    return losses


def show_progress(bar: tqdm, losses: list[Tensor], hits: float) -> None:
    """Print the mean of the last losses above the bar, and show it in the bar; without a terminal there is no bar."""
    loss = torch.stack(losses[-REPORT_EVERY:]).mean().item()
    bar.set_postfix(loss=f"{loss:.4f}", hits_of_rank_0=f"{hits:.1%}")
    bar.write(f"batch {len(losses):>6}  loss {loss:.7f}")


@torch.no_grad()
def evaluate(model: DistributedModelParallel, batches: Iterable[Batch], ranks: Ranks) -> float:
    """The AUC over the batches of all ranks. Reads only: unknown ids get no row. Collective."""
    model.eval()
    metric = BinaryAUROC(process_group=ranks.host_group)
    for batch in batches:
        _, logits = model(batch.to(ranks.device))
        metric.update(logits.cpu(), batch.labels.int())
    return float(metric.compute())


def judge(auc: float, *, num_batches: int, batches_per_epoch: int) -> tuple[int, str]:
    """Whether the model learned what it should have.

    Returns:
        Exit status and a sentence.
    """
    if num_batches < batches_per_epoch:
        return 0, f"AUC not judged: {num_batches:,} batches are less than an epoch of {batches_per_epoch:,}."
    if not auc >= AUC_GOAL:  # also if it is NaN
        return 1, f"FAILED: held-out AUC {auc:.4f} is below the {AUC_GOAL} that this model reaches in one epoch."
    return 0, f"OK: held-out AUC {auc:.4f} is at least {AUC_GOAL}."


def run(args: argparse.Namespace, ranks: Ranks) -> int:
    """Build, train, evaluate, report. Collective.

    Args:
        args: From `parse_args`.
        ranks: This process among the others.

    Returns:
        Exit status, the same on every rank.
    """

    def say(*lines: str) -> None:
        if ranks.rank == 0:
            print(*lines, sep="\n", flush=True)

    def batches_of(rows: Tensor) -> list[Tensor]:
        return rank_batches(rows, batch_size=args.batch_size, rank=ranks.rank, world_size=ranks.world_size)

    torch.manual_seed(args.seed)
    ratings = load_ratings()
    train_rows, test_rows = split_rows(len(ratings), args.seed)
    tables = build_tables(ratings, batch_size=args.batch_size, world_size=ranks.world_size, seed=args.seed)
    model, optimizer, plan = build_model(tables, ranks)
    say(f"ranks: {ranks.world_size} on {ranks.device.type}, seed: {args.seed}, ratings to learn: {len(train_rows):,}")
    say("", *plan_lines(plan, {table.name: table.device_rows for table in tables}), "")

    epochs = [batches_of(shuffled(train_rows, args.seed, epoch)) for epoch in range(args.epochs)]
    schedule = [rows for epoch in epochs for rows in epoch][: args.batches]
    with tqdm(total=len(schedule), unit="batch", disable=True if ranks.rank else None) as bar:  # None: on a terminal
        start = time.perf_counter()
        batches = (ratings.batch(rows) for rows in schedule)
        losses = train(model, optimizer, batches, ranks.device, bar if ranks.rank == 0 else None)
        losses[-1].item()  # wait for the device
        seconds = time.perf_counter() - start

    stats = gather_stats(model.module.ebc.stats(), ranks.host_group)
    auc = evaluate(model, (ratings.batch(rows) for rows in batches_of(test_rows)), ranks)
    status, sentence = judge(auc, num_batches=len(schedule), batches_per_epoch=len(epochs[0]))
    samples = sum(len(rows) for rows in schedule) * ranks.world_size  # of all ranks; to within one a batch
    base_rate = float(ratings.labels[test_rows].mean())
    say("", *stats_lines(stats), "")
    say(f"speed: {samples / seconds:,.0f} samples/s, all ranks together, over {len(schedule):,} batches")
    say(f"held-out AUC: {auc:.4f} on {len(test_rows):,} ratings (guessing: 0.5; base rate of likes: {base_rate:.3f})")
    say(sentence)
    return status


def main(args: argparse.Namespace) -> int:
    """The program, in one process of those that torchrun starts.

    Returns:
        Exit status.
    """
    ranks = join_ranks(args)
    status = run(args, ranks)
    leave_ranks(ranks)
    return status
