"""Step 7: save, load, go on with the same bits."""

from __future__ import annotations

from pathlib import Path

import torch
from torchrec.distributed import DistributedModelParallel
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward

from examples.torchrec_tutorial import twins
from examples.torchrec_tutorial.model import Model, batches, optimizer_of, rows_of, shard, train
from examples.torchrec_tutorial.tell import same, say, title
from hybridrec import HybridHashEmbeddingBagCollectionSharder
from hybridrec.checkpoint import load, save

STEPS = 6


def run(folder: Path) -> None:
    """Train, save, load into a new model, train on with both.

    Args:
        folder: The same of all ranks.
    """
    title(7, "Snapshots")
    model, again = new_model(), new_model()
    optimizer, optimizer_again = optimizer_of(model), optimizer_of(again)
    train(model, optimizer, batches(STEPS))
    say("save(folder, model, optimizer)")
    save(folder, model, optimizer)
    say("load(folder, another_model, its_optimizer)")
    load(folder, again, optimizer_again)
    same("rows", rows_of(again), rows_of(model))
    more = batches(2 * STEPS)[STEPS:]
    same("losses from there on, bit for bit", train(again, optimizer_again, more), train(model, optimizer, more))
    say("An ordinary state_dict() has the rows too; docs/checkpoint.md has more: verified files, resuming, SIGTERM.")


def new_model() -> DistributedModelParallel:
    """Untrained."""
    collection = twins.hashed_bags()
    apply_optimizer_in_backward(torch.optim.Adagrad, collection.parameters(), {"lr": 0.1})
    return shard(Model(collection), HybridHashEmbeddingBagCollectionSharder())
