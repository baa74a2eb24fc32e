"""`PipelinedCall`: what of a model's call is taken for what was sent ahead, where devices differ."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from hybridrec.distributed.batch_contents import kjts_of, versions_of
from hybridrec.distributed.in_flight import InFlightBatch, Mode
from hybridrec.distributed.pipelined_call import DeclaredInput, PipelinedCall


def kjt(num_bags: int, num_ids: int, device: str = "cpu") -> KeyedJaggedTensor:
    lengths = torch.zeros(num_bags, dtype=torch.int64, device=device)
    return KeyedJaggedTensor(keys=["f"], values=torch.arange(num_ids, device=device), lengths=lengths)


class Owner:
    """Held weakly."""


def is_used(sent: KeyedJaggedTensor, given: KeyedJaggedTensor) -> bool:
    """Whether a call with ``given`` uses what was sent; the user's function says that ``given`` is right."""
    owner: Any = Owner()
    call = PipelinedCall(owner, "ebc", DeclaredInput("ebc", lambda batch: given), nn.Identity())
    batch = InFlightBatch(
        index=0,
        mode=Mode(is_training=True, modules=(True,)),
        host=None,
        device=None,
        arrived=None,
        arguments={"ebc": ([sent], {})},
    )
    return call._is_as_expected(batch, (given,), {})


@pytest.mark.parametrize(
    ("sent", "given", "expected"),
    [
        (kjt(3, 5), kjt(3, 5), True),
        (kjt(3, 5), kjt(3, 5, "meta"), True),
        (kjt(3, 5), kjt(3, 6, "meta"), False),
        (kjt(3, 5), kjt(2, 5, "meta"), False),
        (kjt(3, 5), KeyedJaggedTensor(keys=["f"], values=torch.zeros(5).long(), lengths=torch.zeros(3).long()), False),
    ],
    ids=["copied", "moved", "more-ids", "fewer-bags", "other-ids"],
)
def test_a_call_with_another_batch_than_was_sent_is_ordinary(sent: Any, given: Any, expected: bool) -> None:
    assert is_used(sent, given) is expected


class Nested:
    def __init__(self, inner: Any) -> None:
        self.inner = [{"x": inner}, "text", 3]


def test_contents_of_a_batch_are_found_in_any_class() -> None:
    features, dense = kjt(3, 5), torch.zeros(2)
    batch = Nested((features, dense))
    assert kjts_of(batch) == [features] and kjts_of(dense) == []
    found = {id(tensor) for tensor, _ in versions_of(batch)}
    assert {id(features.values()), id(features.lengths()), id(dense)} <= found
