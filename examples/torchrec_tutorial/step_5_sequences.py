"""Step 5: an embedding for every id, without pooling; duplicates that travel once; the train pipeline."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torchrec.distributed import DistributedModelParallel
from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward

from examples.torchrec_tutorial import twins
from examples.torchrec_tutorial.model import SequenceModel, batches, optimizer_of, shard, train
from examples.torchrec_tutorial.step_3_sharded import CPU
from examples.torchrec_tutorial.tell import close, same, say, title
from hybridrec import HybridHashEmbeddingCollectionSharder, HybridTrainPipelineSparseDist

STEPS = 8
LEARNING_RATE = 0.5


def run() -> None:
    """Unsharded, sharded, pipelined."""
    title(5, "Sequences")
    unsharded()
    model = sharded_model(dedups=True)
    losses = train(model, optimizer_of(model), batches(STEPS))
    theirs = twins.plain_sequences()
    apply_optimizer_in_backward(torch.optim.SGD, theirs.parameters(), {"lr": LEARNING_RATE})
    reference = shard(SequenceModel(theirs), EmbeddingCollectionSharder(), "table_wise")
    numbered = [twins.numbered(features) for features in batches(STEPS)]
    close(
        f"losses of {STEPS} steps on {dist.get_world_size()} ranks",
        losses,
        train(reference, optimizer_of(reference), numbered),
    )
    say("\nThat was use_index_dedup=True: an id that a batch repeats travels once (TorchRec's own needs a GPU for it).")
    model = sharded_model(dedups=False)
    same("losses without it", train(model, optimizer_of(model), batches(STEPS)), losses)
    say("\nThe pipeline prepares the next batches while one computes. It changes no bit either:")
    same("losses of the pipeline", pipelined(sharded_model(dedups=True)), losses)


def unsharded() -> None:
    """A JaggedTensor of embeddings a feature."""
    features = twins.batch(0)
    ours, theirs = twins.hashed_sequences()(features), twins.plain_sequences()(twins.numbered(features))
    same("features of the output", list(ours), list(theirs))
    for name, expected in theirs.items():
        same(
            f"{name}: an embedding for each id, {tuple(expected.values().shape)}",
            ours[name].values(),
            expected.values(),
        )
        same(f"{name}: lengths", ours[name].lengths(), expected.lengths())


def sharded_model(*, dedups: bool) -> DistributedModelParallel:
    """Hashed sequences on all ranks."""
    collection = twins.hashed_sequences()
    apply_optimizer_in_backward(torch.optim.SGD, collection.parameters(), {"lr": LEARNING_RATE})
    return shard(SequenceModel(collection), HybridHashEmbeddingCollectionSharder(use_index_dedup=dedups))


def pipelined(model: DistributedModelParallel) -> list[float]:
    """The same loop, by a pipeline; a batch here is nothing but a KeyedJaggedTensor."""
    pipeline = HybridTrainPipelineSparseDist(model, optimizer_of(model), CPU)
    iterator = iter(batches(STEPS))
    return [pipeline.progress(iterator).item() for _ in range(STEPS)]
