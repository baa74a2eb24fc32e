"""Optimizers: defects of other systems, each with a test of the right behaviour here.

Not part of this version: saving and loading state (RE#305, FB#4512, TR#3267), plug-in optimizers and gradient hooks
(RE#269, TR#1614), resetting momenta (FB#1406), a step a row (FB#3342), counting or skipping NaN gradients (TFRA#429).
"""

from __future__ import annotations

from collections.abc import Iterable
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist

from hybridrec import ConfigError
from hybridrec.kernels.optimizer import OptimizerSpec
from tests.cases.small import Pools, kjt, sharded, table, unsharded
from tests.distributed.oracle import Table
from tests.distributed.scenario import Scenario, run_against_oracle, state_of
from tests.ranks import RankPool
from tests.unit.modules.batches import apply_optimizer_in_backward

MIXED_DIMS = [(8, 4), (8, 6), (128, 3)]
OPTIMIZERS = ("sgd", "adagrad", "rowwise_adagrad", "adam")


@pytest.mark.parametrize("dims", MIXED_DIMS, ids=str)
@pytest.mark.parametrize("optimizer", ["adam", "adagrad"])
def test_re419_mixed_dims_in_one_group(pool_1: RankPool, optimizer: str, dims: tuple[int, int]) -> None:
    tables = tuple(Table(name=f"t{i}", dim=dim, features=(f"f{i}",)) for i, dim in enumerate(dims))
    scenario = Scenario(tables=tables, optimizer=optimizer, steps=50, cache="minimum", ids_per_table=100)
    (result,) = pool_1.run(run_against_oracle, scenario)
    assert len(result["losses"]) == 50


def frozen_rows() -> tuple[int, bool]:
    """(rows of the frozen table, whether its pools stayed as they were)."""
    dmp = sharded([table("trained", 8, ["f"]), table("frozen", 4, ["g"])], device_rows=8)
    dmp.module.ebc.embedding_bags["frozen"].weight.requires_grad_(False)
    features = kjt({"f": [[1, 2], [3]], "g": [[1, 2], [3]]})
    before = dmp(features)
    before.sum().backward()
    return len(state_of(dmp)[1]), torch.equal(dmp(features)[:, 8:], before[:, 8:])


def test_tr3271_a_frozen_table_is_read_and_not_trained(pool_1: RankPool) -> None:
    assert pool_1.run(frozen_rows) == [(0, True)]


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_tr3030_shared_features_under_every_optimizer(pool_2: RankPool, optimizer: str) -> None:
    tables = (Table(name="shared", dim=8, features=("a", "b", "c")),)
    for result in pool_2.run(run_against_oracle, Scenario(tables=tables, optimizer=optimizer, steps=20)):
        assert sum(loss != 0 for loss in result["losses"]) > 10  # some batches are empty


@pytest.mark.parametrize("cls", [torch.optim.RMSprop, torch.optim.Adadelta, torch.optim.SparseAdam])
def test_re269_an_optimizer_that_does_not_exist_is_refused_by_name(cls: type) -> None:
    with pytest.raises(ConfigError, match=f"'t': optimizer .*{cls.__name__} .*Accepted"):
        OptimizerSpec.from_class(cls, {"lr": 0.1}, table="t")


def changed_rows() -> tuple[set[int], set[int]]:
    """(ids of the last step, ids whose rows it changed) of this rank."""
    dmp = sharded([table("t", 8, ["f"])], device_rows=16, optimizer=torch.optim.Adam, lr=0.1)
    dmp(kjt({"f": [list(range(20)), [3, 4]]})).sum().backward()
    before = {i: r.copy() for i, r in state_of(dmp)[0].items()}
    dmp(kjt({"f": [[5, 5, 7], [30]]})).sum().backward()
    after = state_of(dmp)[0]
    return {5, 7, 30} & set(after), {i for i, r in after.items() if i not in before or not np.array_equal(r, before[i])}


def test_ter226_touched_rows_change_and_no_others(pools: dict[int, RankPool]) -> None:
    for world_size in (1, 2):
        results = pools[world_size].run(changed_rows)
        assert all(touched == changed for touched, changed in results)
        assert set().union(*(touched for touched, _ in results)) == {5, 7, 30}


def rows_with_nan(optimizer: type[torch.optim.Optimizer]) -> set[int]:
    dmp = sharded([table("t", 8, ["f"])], device_rows=16, optimizer=optimizer, lr=0.1)
    features = kjt({"f": [[1, 2], [3], [4, 5]]})
    for _ in range(2):
        pools = dmp(features)
        gradient = torch.ones_like(pools)
        gradient[1] = torch.nan
        pools.backward(gradient)
    return {i for i, record in state_of(dmp)[0].items() if not np.isfinite(record).all()}


@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.Adagrad, torch.optim.Adam])
def test_tfra429_a_nan_gradient_stays_in_its_row(pools: dict[int, RankPool], optimizer: type) -> None:
    for world_size in (1, 2):
        assert set().union(*pools[world_size].run(rows_with_nan, optimizer)) == {3}


def optimizers_by_table() -> None:
    """Each table has an optimizer of its own, sharded and not."""
    choices = {
        "a": (torch.optim.SGD, {"lr": 0.5}),
        "b": (torch.optim.Adagrad, {"lr": 0.1}),
        "c": (torch.optim.Adam, {"lr": 0.01}),
    }

    def one_each(_: type, parameters: Iterable[torch.nn.Parameter], __: object) -> None:
        for parameter, (cls, kwargs) in zip(parameters, choices.values(), strict=True):
            apply_optimizer_in_backward(cls, [parameter], kwargs)

    tables = [table(name, 8, [name]) for name in choices]
    with mock.patch("tests.cases.small.apply_optimizer_in_backward", one_each):
        dmp, reference = sharded(tables, device_rows=8), unsharded(tables)
    assert isinstance(dmp.module, Pools)
    rank, world_size = dist.get_rank(), dist.get_world_size()
    for step in range(20):
        each = [{f: [[step + r, 3 * r, step % 4], [r]] for f in choices} for r in range(world_size)]
        together = {f: [bag for bags in each for bag in bags[f]] for f in choices}
        pools, expected = dmp(kjt(each[rank])), reference(kjt(together)).values()
        torch.testing.assert_close(pools.detach(), expected.detach()[2 * rank : 2 * rank + 2], rtol=1e-5, atol=1e-6)
        pools.square().sum().backward()
        (expected.square().sum() / world_size).backward()


def test_tr1033_each_table_has_its_own_optimizer(pool_2: RankPool) -> None:
    pool_2.run(optimizers_by_table)


def save_and_load() -> None:
    """Of a table that was trained, and of one that never was: what is trained afterwards is as if never saved."""
    for steps in (2, 0):
        dmps = [sharded([table("t", 4, ["f"])], optimizer=torch.optim.Adam, lr=0.1) for _ in range(2)]
        features = kjt({"f": [[1, 2]]})
        for _ in range(steps):
            dmps[0](features).sum().backward()
        dmps[1](kjt({"f": [[2, 9]]})).sum().backward()  # rows that are replaced
        dmps[1].load_state_dict(dmps[0].state_dict())
        for dmp in dmps:
            dmp(features).sum().backward()
        states = [dmp.state_dict() for dmp in dmps]
        assert list(states[0]) == list(states[1])
        for key, value in states[0].items():
            assert torch.equal(value, states[1][key]), key


def test_re305_fb4512_fb5525_fb5965_tr3267_no_checkpoint_without_its_rows_and_states(pool_2: RankPool) -> None:
    pool_2.run(save_and_load)
