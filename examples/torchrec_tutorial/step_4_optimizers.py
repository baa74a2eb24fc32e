"""Step 4: both ways to give tables an optimizer, schedulers, accumulated gradients, frozen tables."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torch import nn
from torchrec.distributed import DistributedModelParallel
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper
from torchrec.optim.optimizers import in_backward_optimizer_filter
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad
from torchrec.optim.warmup import WarmupOptimizer, WarmupPolicy, WarmupStage

from examples.torchrec_tutorial import twins
from examples.torchrec_tutorial.model import Model, batches, optimizer_of, rows_of, shard, train
from examples.torchrec_tutorial.tell import close, holds, same, say, title
from hybridrec import HybridHashEmbeddingBagCollectionSharder, accumulate_gradients

STEPS = 8


def run() -> None:
    """From the sharder's ``fused_params`` to frozen tables."""
    title(4, "Optimizers")
    by_fused_params()
    by_apply()
    with_schedules()
    accumulated()
    frozen()


def both(attach: Callable[[Any], None], fused_params: dict[str, Any] | None = None) -> list[DistributedModelParallel]:
    """[ours, TorchRec's], sharded. ``attach`` gives the unsharded collections their optimizers."""
    ours, theirs = twins.hashed_bags(), twins.plain_bags()
    for collection in (ours, theirs):
        attach(collection)
    return [
        shard(Model(ours), HybridHashEmbeddingBagCollectionSharder(fused_params=fused_params)),
        shard(Model(theirs), EmbeddingBagCollectionSharder(fused_params=fused_params), "table_wise"),
    ]


def data(count: int) -> list[Any]:
    """[our batches, TorchRec's]."""
    return [batches(count), [twins.numbered(features) for features in batches(count)]]


def attach_one_each(collection: Any) -> None:
    """A table by row-wise Adagrad, the other by SGD."""
    bags = collection.embedding_bags
    apply_optimizer_in_backward(RowWiseAdagrad, bags["product_table"].parameters(), {"lr": 0.2, "eps": 1e-6})
    apply_optimizer_in_backward(torch.optim.SGD, bags["user_table"].parameters(), {"lr": 0.5})


def by_fused_params() -> None:
    """One optimizer for all tables of a sharder."""
    say("fused_params of the sharder: one optimizer for all of its tables.")
    fused_params = {"optimizer": EmbOptimType.EXACT_ADAGRAD, "learning_rate": 0.1, "eps": 1e-8}
    models = both(lambda collection: None, fused_params)
    say(models[0].fused_optimizer)
    ours, theirs = (train(m, optimizer_of(m), b) for m, b in zip(models, data(STEPS), strict=True))
    close(f"losses of {STEPS} steps, Adagrad by fused_params", ours, theirs)


def by_apply() -> None:
    """An optimizer for each table."""
    say("\napply_optimizer_in_backward before sharding: an optimizer for each table, if wanted.")
    models = both(attach_one_each)
    say(models[0].fused_optimizer)
    names = [sorted(dict(in_backward_optimizer_filter(model.named_parameters()))) for model in models]
    same("in_backward_optimizer_filter leaves the dense part", names[0], names[1])
    ours, theirs = (train(m, optimizer_of(m), b) for m, b in zip(models, data(STEPS), strict=True))
    close(f"losses of {STEPS} steps, row-wise Adagrad and SGD", ours, theirs)


def with_schedules() -> None:
    """Torch's schedulers and TorchRec's wrapper work on the fused optimizer."""
    say("\nLearning rates that change: torch's scheduler over all parameters, TorchRec's warm-up around the tables'.")
    losses = []
    for model, own in zip(both(attach_one_each), data(STEPS), strict=True):
        optimizer = optimizer_of(model)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.5)  # type: ignore[arg-type]  # keyed
        losses.append(train(model, optimizer, own, scheduler))
    close("losses under StepLR", *losses)
    losses = []
    stages = [WarmupStage(policy=WarmupPolicy.LINEAR, max_iters=6, value=0.1)]
    for model, own in zip(both(attach_one_each), data(STEPS), strict=True):
        fused = WarmupOptimizer(model.fused_optimizer, stages, lr=0.4)
        losses.append(train(model, optimizer_of(model, fused), own))
    close("losses under WarmupOptimizer", *losses)


def by_gradients(frozen_table: str = "") -> tuple[DistributedModelParallel, CombinedOptimizer]:
    """TorchRec's tables under the compute kernel ``dense``: gradients stay, and torch's own optimizer steps them."""
    model = Model(twins.plain_bags())
    sharded = shard(model, EmbeddingBagCollectionSharder(), "data_parallel", "dense")
    tables = {
        n: p for n, p in sharded.named_parameters() if n.startswith("tables.") and frozen_table not in n.split(".")
    }
    dense = {n: p for n, p in sharded.named_parameters() if not n.startswith("tables.")}
    optimizers = [KeyedOptimizerWrapper(dense, lambda parameters: torch.optim.SGD(parameters, lr=0.05))]
    if tables:  # of this rank
        optimizers.append(KeyedOptimizerWrapper(tables, lambda parameters: torch.optim.Adagrad(parameters, lr=0.1)))
    return sharded, CombinedOptimizer(optimizers)


def attach_adagrad(collection: nn.Module) -> None:
    """Torch's Adagrad with all of its defaults but the rate."""
    apply_optimizer_in_backward(torch.optim.Adagrad, collection.parameters(), {"lr": 0.1})


def accumulated() -> None:
    """One step for three batches; TorchRec's tables can do it where their gradients are kept."""
    say("\naccumulate_gradients(model): rows are stepped by optimizer.step(), once for all batches since zero_grad().")
    collection = twins.hashed_bags()
    attach_adagrad(collection)
    ours = shard(Model(collection), HybridHashEmbeddingBagCollectionSharder())
    accumulate_gradients(ours)
    theirs, their_optimizer = by_gradients()
    losses = []
    for model, optimizer, own in zip(
        (ours, theirs), (optimizer_of(ours), their_optimizer), data(3 * STEPS), strict=True
    ):
        of_model = []
        for step, features in enumerate(own):
            if step % 3 == 0:
                optimizer.zero_grad()
            loss, _ = model(features)
            (loss / 3).backward()
            if step % 3 == 2:
                optimizer.step()
            of_model.append(loss.item())
        losses.append(of_model)
    close("losses, three batches a step, beside TorchRec's compute kernel 'dense'", *losses)


def frozen() -> None:
    """``requires_grad_(False)`` of a table."""
    say("\nA frozen table: its parameter's requires_grad_(False). The other table learns.")
    collection = twins.hashed_bags()
    attach_adagrad(collection)
    collection.embedding_bags["user_table"].weight.requires_grad_(False)
    model = shard(Model(collection), HybridHashEmbeddingBagCollectionSharder())
    before = rows_of(model)
    theirs, their_optimizer = by_gradients(frozen_table="user_table")
    own, numbered = data(STEPS)
    close("losses", train(model, optimizer_of(model), own), train(theirs, their_optimizer, numbered))
    after = rows_of(model)
    same("rows of the frozen user_table", after[:, twins.DIM :], before[:, twins.DIM :])
    holds("rows of product_table changed", not torch.equal(after[:, : twins.DIM], before[:, : twins.DIM]))
