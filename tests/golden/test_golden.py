"""Owners of ids, initial rows and slot decisions are those of the stored files, on every core and over every route."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from hybridrec.distributed.input_dist import HashInputDist
from hybridrec.native import has_compiled_core, unmix64
from hybridrec.native.core import CoreName
from hybridrec.native.protocol import PlanStatus
from tests.golden.values import GOLDEN, NUM_BATCHES, some_ids, stored
from tests.ranks import RankPools

CORES = ["reference", *(["compiled"] if has_compiled_core() else [])]


@pytest.mark.parametrize("core", CORES)
@pytest.mark.parametrize("name", list(GOLDEN))
def test_values_are_the_stored_ones(name: str, core: CoreName) -> None:
    computed = json.loads(json.dumps(GOLDEN[name](core)))
    assert computed == stored(name)


def test_the_stored_decisions_are_of_every_kind() -> None:
    batches = stored("slots")["batches"]
    assert len(batches) == NUM_BATCHES
    plans = [batch["plan"] for batch in batches]
    status, loads, inits, victims, write_backs = 0, 7, 8, 9, 10
    assert {plan[status] for plan in plans} == {PlanStatus.OK, PlanStatus.QUOTA}
    assert all(sum(plan[kind] for plan in plans) > 3 for kind in (loads, inits, victims, write_backs))


def received() -> list[int]:
    """Ids that arrive at this rank when rank 0 sends all."""
    ids = torch.tensor(some_ids() if dist.get_rank() == 0 else [], dtype=torch.int64)
    features = KeyedJaggedTensor(keys=["f"], values=ids, lengths=torch.ones_like(ids))
    arrived: Any = HashInputDist(dist.GroupMember.WORLD, 1)(features).wait().wait()
    return unmix64(arrived.values()).tolist()


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_ids_arrive_at_their_stored_owners(pools: RankPools, world_size: int) -> None:
    column = stored("routing")["world sizes"].index(world_size)
    owners = {int(id_): of_world[column] for id_, of_world in stored("routing")["owners"].items()}
    expected = [[id_ for id_ in some_ids() if owners[id_] == rank] for rank in range(world_size)]
    assert pools[world_size].run(received) == expected
