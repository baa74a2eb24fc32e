"""Step 1: from a matrix of torch's to a collection of TorchRec's to a hashed one, on one device."""

from __future__ import annotations

import copy

import torch
from torch import nn
from torchrec import KeyedJaggedTensor
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward

from examples.torchrec_tutorial import twins
from examples.torchrec_tutorial.tell import close, same, say, title


def run() -> None:
    """One table, two tables, training, copies."""
    title(1, "Unsharded tables")
    one_table()
    collections()
    training()
    copies()


def one_table() -> None:
    """Torch's modules look up row numbers; a hashed table looks up ids, and here the two are the same numbers."""
    say("torch's embedding is a matrix of 10 rows, and ids are row numbers. Ours has a row for any int64.")
    config = twins.HashEmbeddingBagConfig(10, twins.DIM, "table", feature_names=["feature"])
    collection = twins.HashEmbeddingBagCollection([config])
    embedding, bag = nn.Embedding(10, twins.DIM), nn.EmbeddingBag(10, twins.DIM, mode="sum")
    rows = collection.embedding_bags["table"].read(torch.arange(10))
    with torch.no_grad():
        embedding.weight.copy_(rows)
        bag.weight.copy_(rows)
    ids, offsets = torch.tensor([3, 7, 7, 9, 0]), torch.tensor([0, 2, 2, 5])
    one_each = KeyedJaggedTensor(keys=["feature"], values=ids, lengths=torch.ones(5, dtype=torch.int64))
    same("one id a bag: nn.Embedding's rows", collection(one_each)["feature"], embedding(ids))
    bags = KeyedJaggedTensor(keys=["feature"], values=ids, offsets=offsets)
    close("bags [3, 7], [], [7, 9, 0]: nn.EmbeddingBag's pools", collection(bags)["feature"], bag(ids, offsets[:-1]))


def collections() -> None:
    """TorchRec's collection and ours, exchanged for each other."""
    theirs, ours = twins.plain_bags(), twins.hashed_bags()
    say("\nTorchRec's collection of two tables, and the hashed one:")
    say(theirs)
    say(ours)
    features = twins.batch(0)
    expected, output = theirs(twins.numbered(features)), ours(features)
    close("pools of a batch of both features", output.values(), expected.values())
    same("names of parameters", [n for n, _ in ours.named_parameters()], [n for n, _ in theirs.named_parameters()])
    weight = ours.embedding_bags["product_table"].weight
    say(f"embedding_bags.product_table.weight has the nominal shape {tuple(weight.shape)} and takes no memory;")
    say("rows are read by id: embedding_bags['product_table'].read(ids).")


def training() -> None:
    """The optimizer is attached; from there it is one loop for both."""
    theirs, ours = twins.plain_bags(), twins.hashed_bags()
    for collection in (theirs, ours):
        apply_optimizer_in_backward(torch.optim.Adagrad, collection.parameters(), {"lr": 0.1})
    for step in range(5):
        features = twins.batch(step)
        ours(features).values().square().sum().backward()
        theirs(twins.numbered(features)).values().square().sum().backward()
    say("\nTrained by Adagrad in the backward, five batches each:")
    for name, bag in theirs.embedding_bags.items():
        close(f"rows of {name}", ours.embedding_bags[name].read(twins.IDS), bag.weight.detach())


def copies() -> None:
    """`copy.deepcopy` gives tables of their own."""
    first, features = twins.hashed_bags(), twins.batch(1)
    apply_optimizer_in_backward(torch.optim.SGD, first.parameters(), {"lr": 0.5})
    second = copy.deepcopy(first)
    before = second(features).values().detach()
    first(features).values().sum().backward()
    same("a deep copy does not learn what its original does", second(features).values().detach(), before)
