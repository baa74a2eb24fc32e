"""`hybridrec.debug.where`: place, values and state of a row, with and without batches in flight; it changes nothing."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from hybridrec import ConfigError, HashEmbeddingBagCollection, HashEmbeddingBagConfig, IdError
from hybridrec.debug import RowLocation, where
from tests.distributed.oracle import initial_row, owner, words_of
from tests.distributed.pipelines import all_batches, build_oracle, build_pipelined, mine
from tests.distributed.scenario import Scenario, universe
from tests.ranks import RankPool
from tests.unit.modules.batches import apply_optimizer_in_backward


def record_of(place: RowLocation) -> bytes:
    assert place.weights is not None
    weights = words_of(place.weights.float().numpy(), str(place.weights.dtype).removeprefix("torch."))
    return b"".join([weights.tobytes(), *(state.numpy().tobytes() for state in place.states.values())])


def asked_while_training(scenario: Scenario, depth: int) -> set[str]:
    """After every step, ask for some ids of every table; what is told must be the oracle's, and so must training be."""
    batches = all_batches(scenario)
    dmp, pipeline = build_pipelined(scenario, batches, depth)
    oracle, dense_optimizer = build_oracle(scenario)
    rank, world_size = dist.get_rank(), dist.get_world_size()
    iterator, tiers = iter(mine(scenario, batches)), set()
    for step, everyone in enumerate(batches):
        loss = pipeline.progress(iterator)
        assert loss.item() == oracle.step(everyone, dense_optimizer).item()
        for t, table in enumerate(scenario.tables):
            expected = oracle.state_of(t)
            for id_ in itertools.islice(universe(scenario, table), step % 5, None, 40):
                place = where(dmp, table.name, id_)
                tiers.add(place.tier)
                assert (place.owner, place.rank) == (owner(id_, world_size), rank)
                assert (place.tier == "other rank") == (place.owner != rank)
                if place.tier == "unknown":
                    initial = words_of(initial_row(table, id_), table.row_type).tobytes()
                    assert record_of(place)[: len(initial)] == initial
                if place.tier not in ("other rank", "moving"):
                    assert record_of(place) == np.ascontiguousarray(expected[id_]).tobytes(), str(place)
                assert (place.slot is not None) == (place.tier == "slot") or place.tier == "moving"
    return tiers


@pytest.mark.parametrize(
    ("world_size", "depth", "optimizer"), [(1, 1, "adam"), (2, 3, "rowwise_adagrad"), (1, 12, "sgd")]
)
def test_where_tells_what_the_oracle_holds_and_disturbs_nothing(
    pools: dict[int, RankPool], world_size: int, depth: int, optimizer: str
) -> None:
    scenario = Scenario(optimizer=optimizer, steps=20, ids_per_table=400)
    tiers = set().union(*pools[world_size].run(asked_while_training, scenario, depth))
    assert {"slot", "store", "unknown"} <= tiers
    assert ("other rank" in tiers) == (world_size > 1)


def as_text() -> tuple[str, str, str]:
    scenario = Scenario(optimizer="adam", steps=3)
    batches = all_batches(scenario)
    dmp, pipeline = build_pipelined(scenario, batches, 1)
    iterator = iter(mine(scenario, batches))
    for _ in batches:
        pipeline.progress(iterator)
    id_ = next(i for bag in batches[2][0].bags["user"] for i, _ in bag)
    for table, asked, error in (("nobody", 1, ConfigError), ("user", 2**63, IdError), ("user", True, IdError)):
        with pytest.raises(error, match="where"):
            where(dmp, table, asked)
    place = where(dmp.module.ebc, "user", id_)
    assert place.last_used == 3 and place.pins == 0 and set(place.states) == {"exp_avg", "exp_avg_sq"}
    return (
        str(place),
        f"table 'user', id {id_} (owner: rank 0 of 1): slot {place.slot} of the device tier, row",
        str(where(dmp, "user", 123456789)),
    )


def test_where_reads_well(pool_1: RankPool) -> None:
    ((text, beginning, unknown),) = pool_1.run(as_text)
    assert text.startswith(beginning) and "\n  exp_avg_sq: [" in text
    assert "no row; it reads its initial row\n  weights: [" in unknown


def test_where_of_an_unsharded_collection() -> None:
    config = HashEmbeddingBagConfig(name="t", num_embeddings=100, embedding_dim=3, feature_names=["f"])
    collection = HashEmbeddingBagCollection([config])
    apply_optimizer_in_backward(torch.optim.Adagrad, collection.parameters(), {"lr": 0.1})
    before = where(nn.Sequential(collection), "t", -7)
    assert str(where(collection, "t", np.int64(-7))) == str(before)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="where: module has type NoneType"):
        where(None, "t", 1)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"where: table=\['t'\] has type list"):
        where(collection, ["t"], 1)  # type: ignore[arg-type]
    features = KeyedJaggedTensor(keys=["f"], values=torch.tensor([-7]), lengths=torch.tensor([1]))
    collection(features).values().sum().backward()
    after = where(collection, "t", -7)
    assert (before.tier, after.tier, after.last_used) == ("unknown", "store", 1)
    assert torch.equal(after.weights, collection(features).values()[0].detach())
    assert not torch.equal(after.weights, before.weights) and set(after.states) == {"sum"}
    assert torch.equal(after.states["sum"], torch.ones(3))
