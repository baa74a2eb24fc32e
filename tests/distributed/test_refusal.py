"""G5: a batch that cannot be taken is refused on all ranks with one text, and leaves everything as it was."""

from __future__ import annotations

import dataclasses

import pytest
import torch
import torch.distributed as dist
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from hybridrec import HybridRecError, IdError
from tests.distributed.scenario import Scenario, build, make_batch, state_of, to_kjt
from tests.ranks import RankPool

SLOTS = {"user": 40, "item": 40, "word": 40}


def train(dmp: torch.nn.Module, optimizer: torch.optim.Optimizer, scenario: Scenario, steps: range) -> list[float]:
    losses = []
    for step in steps:
        batch = make_batch(scenario, step, dist.get_rank(), dist.get_world_size())
        optimizer.zero_grad()
        loss = dmp(to_kjt(scenario, batch), batch.labels)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def bits(dmp: torch.nn.Module) -> list[dict[int, bytes]]:
    return [{id_: row.tobytes() for id_, row in table.items()} for table in state_of(dmp)]


def counters(dmp: torch.nn.Module) -> list[dict[str, object]]:
    """What a refused batch must not change; `rejected` counts it, and memory that was allocated stays."""
    free = {"rejected", "host_bytes"}
    return [{k: v for k, v in dataclasses.asdict(s).items() if k not in free} for s in dmp.module.ebc.stats()]


def refuse_one(kind: str, rank_with_fault: int) -> dict[str, object]:
    """Train, feed a bad batch on one rank, train on; and the same run without the bad batch."""
    scenario = Scenario(steps=20)
    rank = dist.get_rank()
    dmp, optimizer = build(scenario, SLOTS)
    untouched, untouched_optimizer = build(scenario, SLOTS)
    train(dmp, optimizer, scenario, range(10))
    train(untouched, untouched_optimizer, scenario, range(10))
    before, counted = bits(dmp), counters(dmp)
    batch = make_batch(scenario, 11, rank, dist.get_world_size())  # not empty on any rank
    features = to_kjt(scenario, batch)
    if rank == rank_with_fault:
        features = bad_features(kind, features)
    try:
        dmp(features, batch.labels)
    except HybridRecError as e:
        error: HybridRecError | None = e
    else:
        error = None
    same = bits(dmp) == before and counters(dmp) == counted
    later = train(dmp, optimizer, scenario, range(10, 20))
    expected = train(untouched, untouched_optimizer, scenario, range(10, 20))
    return {
        "type": type(error).__name__,
        "text": str(error),
        "unchanged": same,
        "goes on": later == expected and bits(dmp) == bits(untouched),
    }


def bad_features(kind: str, features: KeyedJaggedTensor) -> KeyedJaggedTensor:
    keys, values, lengths = features.keys(), features.values(), features.lengths()
    if kind == "float ids":
        return KeyedJaggedTensor(keys=keys, values=values.float(), lengths=lengths)
    if kind == "missing feature":
        return KeyedJaggedTensor(keys=["other", *keys[1:]], values=values, lengths=lengths)
    if kind == "lengths too long":
        return KeyedJaggedTensor(keys=keys, values=values[:-1], lengths=lengths)
    raise KeyError(kind)


@pytest.mark.parametrize(
    ("kind", "error", "match"),
    [
        ("float ids", IdError, "float32"),
        ("missing feature", IdError, "'user'"),
        ("lengths too long", IdError, "lengths"),
    ],
)
@pytest.mark.parametrize("world_size", [1, 2])
def test_refused_on_all_ranks(
    pools: dict[int, RankPool], world_size: int, kind: str, error: type[Exception], match: str
) -> None:
    for rank_with_fault in range(world_size):
        results = pools[world_size].run(refuse_one, kind, rank_with_fault)
        for result in results:
            assert result["type"] == error.__name__, result
            assert match in result["text"]
            assert result["unchanged"], result
            assert result["goes on"], result
        assert len({result["text"] for result in results}) == 1


def forward_only(kind: str) -> dict[str, object]:
    """Forwards that no backward follows leave pins at zero and the table as it was; training goes on the same."""
    scenario = Scenario(steps=20)
    dmp, optimizer = build(scenario, SLOTS)
    untouched, untouched_optimizer = build(scenario, SLOTS)
    train(dmp, optimizer, scenario, range(5))
    train(untouched, untouched_optimizer, scenario, range(5))
    before, counted = bits(dmp), counters(dmp)
    for step in range(100, 110):
        batch = make_batch(scenario, step, dist.get_rank(), dist.get_world_size())
        features = to_kjt(scenario, batch)
        if kind == "no_grad":
            with torch.no_grad():
                dmp(features, batch.labels)
        elif kind == "eval":
            dmp.eval()
            dmp(features, batch.labels)
            dmp.train()
        else:  # the graph is dropped without a backward
            loss = dmp(features, batch.labels)
            del loss
    pins = sum(s.pins for s in dmp.module.ebc.stats())
    rows_same = bits(dmp) == before
    counters_same = counters(dmp) == counted
    later = train(dmp, optimizer, scenario, range(5, 20))
    expected = train(untouched, untouched_optimizer, scenario, range(5, 20))
    return {"pins": pins, "rows": rows_same, "counters": counters_same, "goes on": later == expected}


@pytest.mark.parametrize("kind", ["no_grad", "eval", "abandoned"])
@pytest.mark.parametrize("world_size", [1, 2])
def test_forward_without_backward(pools: dict[int, RankPool], world_size: int, kind: str) -> None:
    for result in pools[world_size].run(forward_only, kind):
        assert result["pins"] == 0
        assert result["rows"]
        assert result["goes on"]
        if kind != "abandoned":  # an abandoned batch moved rows between the tiers, which traffic counters keep
            assert result["counters"]


def eval_reads() -> dict[str, object]:
    """Eval gives the bits of the training forward for known ids, and initial rows for unknown ones."""
    scenario = Scenario(steps=20)
    dmp, optimizer = build(scenario, SLOTS)
    train(dmp, optimizer, scenario, range(10))
    batch = make_batch(scenario, 4, dist.get_rank(), dist.get_world_size())
    features = to_kjt(scenario, batch)
    trained = dmp(features, batch.labels).detach()
    dmp.eval()
    read = dmp(features, batch.labels).detach()
    dmp.train()
    return {"equal": torch.equal(trained, read)}


@pytest.mark.parametrize("world_size", [1, 2])
def test_eval_equals_training_forward(pools: dict[int, RankPool], world_size: int) -> None:
    for result in pools[world_size].run(eval_reads):
        assert result["equal"]


def second_backward() -> str:
    scenario = Scenario()
    dmp, _ = build(scenario, SLOTS)
    batch = make_batch(scenario, 0, dist.get_rank(), dist.get_world_size())
    loss = dmp(to_kjt(scenario, batch), batch.labels)
    loss.backward(retain_graph=True)
    before = bits(dmp)
    try:
        loss.backward()
    except HybridRecError as e:
        return f"{type(e).__name__} {bits(dmp) == before}"
    return "no error"


def test_second_backward_is_refused(pool_1: RankPool) -> None:
    assert pool_1.run(second_backward) == ["StateError True"]


def two_forwards_one_backward() -> dict[str, object]:
    """Both batches' rows are pinned until the backward; each is one step, as two plain tables' backwards would be."""
    scenario = Scenario(steps=4)
    dmp, optimizer = build(scenario, {"user": 80, "item": 120, "word": 80})
    rank, world_size = dist.get_rank(), dist.get_world_size()
    first, second = (make_batch(scenario, s, rank, world_size) for s in (0, 1))
    optimizer.zero_grad()
    loss = dmp(to_kjt(scenario, first), first.labels)
    pinned_one = sum(s.pins for s in dmp.module.ebc.stats())
    loss = loss + dmp(to_kjt(scenario, second), second.labels)
    pinned_two = sum(s.pins for s in dmp.module.ebc.stats())
    loss.backward()
    stats = dmp.module.ebc.stats()
    return {
        "one": pinned_one,
        "two": pinned_two,
        "after": sum(s.pins for s in stats),
        "uniques": [s.uniques for s in stats],
    }


def test_two_forwards_one_backward(pool_1: RankPool) -> None:
    (result,) = pool_1.run(two_forwards_one_backward)
    assert 0 < result["one"] < result["two"] == sum(result["uniques"])
    assert result["after"] == 0
