"""Train the little DLRM on hashed tables that are larger than their device tier.

What differs from a TorchRec script is marked (hybridrec). `run.sh` starts it.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice

import torch
import torch.distributed as dist
from torchmetrics.classification import BinaryAUROC
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.planner import EmbeddingShardingPlanner, ParameterConstraints, Topology
from torchrec.distributed.types import ShardingEnv, ShardingPlan
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper
from torchrec.optim.optimizers import in_backward_optimizer_filter
from tqdm import tqdm  # type: ignore[import-untyped]  # it has no types

from examples.little_demo.batch import Batch, DataError, DataSet, Share, choose_num_workers, load
from examples.little_demo.criteo import Criteo
from examples.little_demo.history import Board, History, Recorder
from examples.little_demo.launch import Ranks, join_ranks, leave_ranks
from examples.little_demo.model import LittleDLRM
from examples.little_demo.movielens import MovieLens, load_ratings
from examples.little_demo.options import PICTURE, SNAPSHOTS
from examples.little_demo.pictures import draw, is_usable
from examples.little_demo.powerlaw import PowerLaw, PowerLawSizes
from examples.little_demo.report import gather_stats, plan_lines, stage_lines, stats_lines
from examples.little_demo.tables import build_tables
from hybridrec import (
    HashEmbeddingBagCollection,
    HashEmbeddingBagConfig,
    HybridTrainPipelineSparseDist,
    get_default_hybrid_sharders,
)
from hybridrec.checkpoint import Checkpointer

AUC_GOAL = 0.77
"""What one epoch of MovieLens reaches with room to spare: 0.7795 is the worst of seeds 0 to 5 on two ranks."""
ROW_LEARNING_RATE = 0.2
DENSE_LEARNING_RATE = 2e-3


def open_data(args: argparse.Namespace) -> DataSet:
    """The data set that the command line names.

    Raises:
        DataError: Its file cannot be used.
    """
    if args.data == "criteo":
        return Criteo(args.path)
    if args.data == "powerlaw":
        given = {name: getattr(args, name) for name in ("rows", "ids", "features", "exponent")}
        sizes = PowerLawSizes(**{name: value for name, value in given.items() if value is not None})
        return PowerLaw(sizes, seed=args.seed)
    return MovieLens(load_ratings(), seed=args.seed)


def build_model(
    data: DataSet, tables: list[HashEmbeddingBagConfig], ranks: Ranks
) -> tuple[DistributedModelParallel, CombinedOptimizer, ShardingPlan]:
    """The sharded model, its optimizer, and the plan that it was sharded by. Collective."""
    # (hybridrec) Instead of EmbeddingBagCollection.
    ebc = HashEmbeddingBagCollection(tables=tables, device=ranks.device)
    model = LittleDLRM(ebc, num_features=len(data.features), num_dense=data.num_dense, device=ranks.device)
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
    pipeline: HybridTrainPipelineSparseDist,
    model: DistributedModelParallel,
    batches: Iterator[Batch],
    recorder: Recorder,
    checkpointer: Checkpointer | None = None,
) -> History:
    """Train on all batches, or until the job is asked to end.

    Args:
        pipeline: Of the model.
        model: From `build_model`.
        batches: Of this rank; every rank must bring the same number.
        recorder: Told of every batch.
        checkpointer: Writes snapshots; None: nobody does.

    Returns:
        What the recorder recorded.
    """
    model.train()
    while True:
        try:
            loss, _, labels = pipeline.progress(batches)
        except StopIteration:
            return recorder.finish()
        recorder.add(loss, len(labels))
        if checkpointer is not None:
            checkpointer.after_batch()
            if checkpointer.is_stopping:
                return recorder.finish()


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """How well rows were ranked, over all ranks."""

    auc: float
    num_rows: int
    num_positive: int
    """Of them, with the label 1."""


@torch.no_grad()
def evaluate(
    pipeline: HybridTrainPipelineSparseDist, model: DistributedModelParallel, batches: Iterator[Batch], ranks: Ranks
) -> Evaluation:
    """Score the batches of all ranks. Reads only: unknown ids get no row. Collective."""
    model.eval()
    metric = BinaryAUROC(process_group=ranks.host_group)
    num_rows = num_positive = 0
    while True:
        try:
            _, logits, labels = pipeline.progress(batches)
        except StopIteration:
            break
        metric.update(logits.cpu(), labels.cpu().int())
        num_rows += len(labels)
        num_positive += int(labels.sum())
    return Evaluation(
        auc=float(metric.compute()), num_rows=total(num_rows, ranks), num_positive=total(num_positive, ranks)
    )


def best_auc(data: PowerLaw, batches: Iterator[Batch], ranks: Ranks) -> float:
    """The AUC of the logits that the labels of the batches were drawn with. Collective."""
    metric = BinaryAUROC(process_group=ranks.host_group)
    for batch in batches:
        metric.update(data.planted_logits(batch), batch.labels.int())
    return float(metric.compute())


def judge(auc: float, best: float | None, *, data: DataSet, num_batches: int, per_epoch: int | None) -> tuple[int, str]:
    """Whether the model learned what it should have.

    Args:
        auc: That it reached on the rows held out.
        best: That nobody can exceed there, up to chance; None: not known.
        data: What it learned from.
        num_batches: That it was trained on.
        per_epoch: Batches of an epoch, None: not known.

    Returns:
        Exit status and a sentence.
    """
    if best is not None:
        share = (auc - 0.5) / (best - 0.5)
        return 0, f"best possible AUC there: {best:.4f}; the model has come {share:.0%} of the way from guessing to it."
    if not isinstance(data, MovieLens) or per_epoch is None:
        return 0, "AUC not judged: what this data allows is not known."
    if num_batches < per_epoch:
        return 0, f"AUC not judged: {num_batches:,} batches are less than an epoch of {per_epoch:,}."
    if not auc >= AUC_GOAL:  # also if it is NaN
        return 1, f"FAILED: held-out AUC {auc:.4f} is below the {AUC_GOAL} that this model reaches in one epoch."
    return 0, f"OK: held-out AUC {auc:.4f} is at least {AUC_GOAL}."


@contextmanager
def open_checkpointer(
    args: argparse.Namespace,
    model: DistributedModelParallel,
    optimizer: CombinedOptimizer,
    pipeline: HybridTrainPipelineSparseDist,
) -> Iterator[Checkpointer | None]:
    """What the command line asks for; None: neither to save nor to resume. Collective."""
    if args.save_every is None and not args.resume:
        yield None
        return
    with Checkpointer(args.snapshots or SNAPSHOTS, model, optimizer, pipeline, every=args.save_every) as checkpointer:
        yield checkpointer


def total(number: int, ranks: Ranks) -> int:
    """The sum over all ranks. Collective."""
    result = torch.tensor(number)
    dist.all_reduce(result, group=ranks.host_group)
    return int(result)


def run(args: argparse.Namespace, ranks: Ranks) -> int:
    """Build, train, evaluate, report. Collective.

    Args:
        args: From `parse_args`.
        ranks: This process among the others.

    Returns:
        Exit status, the same on every rank.

    Raises:
        DataError: The data is not what it should be.
    """

    def say(*lines: str) -> None:
        if ranks.rank == 0:
            print(*lines, sep="\n", flush=True)

    def batches(epochs: range | None) -> Iterator[Batch]:
        share = Share(batch_size=args.batch_size, rank=ranks.rank, world_size=ranks.world_size)
        return load(data, share, epochs=epochs, num_workers=workers, pin_memory=ranks.device.type != "cpu")

    torch.manual_seed(args.seed)
    data = open_data(args)
    workers = choose_num_workers(data, ranks.local_world_size) if args.workers is None else args.workers
    tables = build_tables(
        data.tables(), batch_size=args.batch_size, world_size=ranks.world_size, depth=args.depth, seed=args.seed
    )
    model, optimizer, plan = build_model(data, tables, ranks)
    # (hybridrec) Instead of TrainPipelineSparseDist: rows are fetched for batches to come while one computes.
    pipeline = HybridTrainPipelineSparseDist(model, optimizer, ranks.device, pipe_n_batch=args.depth)
    say(f"ranks: {ranks.world_size} on {ranks.device.type}, seed: {args.seed}, data: {data.describe()}")
    say("", *plan_lines(plan, {table.name: table.device_rows for table in tables}), "")

    per_epoch = data.num_batches(args.batch_size)
    lengths = [n for n in (args.batches, per_epoch and per_epoch * args.epochs) if n is not None]
    picture = (args.picture or PICTURE) if ranks.rank == 0 and is_usable("matplotlib", "picture") else None
    wants_board = ranks.rank == 0 and args.tensorboard is not None
    board = Board(args.tensorboard) if wants_board and is_usable("tensorboard", "TensorBoard log") else None
    with tqdm(  # None: on a terminal
        total=min(lengths, default=None), unit="batch", disable=True if ranks.rank else None
    ) as bar:
        recorder = Recorder(model.module.ebc.stats, bar=bar if ranks.rank == 0 else None, board=board)
        with open_checkpointer(args, model, optimizer, pipeline) as checkpointer:
            done = checkpointer.resume() if checkpointer is not None and args.resume else 0
            if done:
                say(f"resumed after {done:,} batches")
            if min(lengths, default=done + 1) <= done:
                say("all batches were trained before: raise --batches or --epochs, or leave --resume out.")
                return 0
            start = time.perf_counter()
            remaining = islice(batches(range(args.epochs)), done, args.batches)
            history = train(pipeline, model, remaining, recorder, checkpointer)
            history.losses[-1].item()  # wait for the device
            seconds = time.perf_counter() - start
            if checkpointer is not None and checkpointer.is_stopping:
                say(f"asked to end: saved after {pipeline.batches_committed:,} batches; --resume goes on from there.")
                return 0
    stages = pipeline.stats()  # of training alone

    stats = gather_stats(model.module.ebc.stats(), ranks.host_group)
    result = evaluate(pipeline, model, batches(None), ranks)
    best = best_auc(data, batches(None), ranks) if isinstance(data, PowerLaw) else None
    status, sentence = judge(result.auc, best, data=data, num_batches=stages.batches_committed, per_epoch=per_epoch)
    say("", *stats_lines(stats), "", *stage_lines(stages), "")
    num_rows = total(history.num_rows, ranks)
    say(f"speed: {num_rows / seconds:,.0f} {data.unit}/s, all ranks together, over {len(history.losses):,} batches")
    say(
        f"held-out AUC: {result.auc:.4f} on {result.num_rows:,} {data.unit} "
        f"(guessing: 0.5; share of the label 1: {result.num_positive / result.num_rows:.3f})",
        sentence,
    )
    if board is not None:
        board.add("auc", result.auc, len(history.losses))
        board.close()
        say(f"TensorBoard log: tensorboard --logdir {args.tensorboard}")
    if picture is not None:
        draw(history, picture, f"Little Demo: {data.name}, held-out AUC {result.auc:.4f}")
        say(f"picture: {picture}")
    return status


def main(args: argparse.Namespace) -> int:
    """The program, in one process of those that torchrun starts.

    Returns:
        Exit status.

    Raises:
        SystemExit: The options do not fit, or the data is not what it should be, which stderr says by then.
    """
    ranks = join_ranks(args)
    try:
        status = run(args, ranks)
    except DataError as error:
        # Text and newline in one write, so that ranks that fail together do not share a line: SystemExit takes two.
        sys.stderr.write(f"rank {ranks.rank}: {error}\n")
        raise SystemExit(1) from None
    leave_ranks(ranks)
    return status
