"""Step 2: TorchRec's data types carry ids of the whole int64 range into hashed tables, and pools out of them."""

from __future__ import annotations

import torch
from torchrec import JaggedTensor, KeyedJaggedTensor, KeyedTensor

from examples.torchrec_tutorial import twins
from examples.torchrec_tutorial.tell import close, same, say, title


def run() -> None:
    """JaggedTensor, KeyedJaggedTensor, KeyedTensor."""
    title(2, "Data types")
    features = keyed(jagged())
    theirs, ours = twins.plain_bags(), twins.hashed_bags()
    expected, output = theirs(twins.numbered(features)), ours(features)
    say("\nA KeyedTensor comes out: one row a sample, the columns of all features side by side.")
    same("its type", type(output), KeyedTensor)
    same("its keys", output.keys(), expected.keys())
    same("its columns a key", output.length_per_key(), expected.length_per_key())
    close("its values", output.values(), expected.values())
    same("keys of to_dict()", list(output.to_dict()), list(expected.to_dict()))
    for key, pool in expected.to_dict().items():
        close(f"to_dict()[{key!r}], {tuple(pool.shape)}", output.to_dict()[key], pool)


def jagged() -> dict[str, JaggedTensor]:
    """Feature -> bags of different lengths."""
    say("A JaggedTensor holds bags of different lengths: values of all, and where each begins.")
    product = JaggedTensor(values=twins.IDS[[2, 3, 9]], lengths=torch.tensor([2, 0, 1]))
    say(product)
    same("offsets of lengths 2, 0, 1", product.offsets().tolist(), [0, 2, 2, 3])
    dense = [bag.tolist() for bag in product.to_dense()]
    same("to_dense()", dense, [[2**63 - 1, -(2**63)], [], twins.IDS[9:10].tolist()])
    user = JaggedTensor.from_dense([twins.IDS[[1]], twins.IDS[[5, 5]], twins.IDS[[7]]])
    return {"product": product, "user": user}


def keyed(features: dict[str, JaggedTensor]) -> KeyedJaggedTensor:
    """One batch of several features."""
    say("\nA KeyedJaggedTensor is a batch: a JaggedTensor for each feature.")
    kjt = KeyedJaggedTensor.from_jt_dict(features)
    say(kjt)
    same("keys", kjt.keys(), list(features))
    same("lengths", kjt.lengths().tolist(), [2, 0, 1, 1, 2, 1])
    same("values", kjt.values(), torch.cat([jt.values() for jt in features.values()]))
    same("to_dict()['user']", kjt.to_dict()["user"].values(), features["user"].values())
    return kjt
