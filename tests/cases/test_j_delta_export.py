"""J: deltas, what serving processes read of them, exports."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torchrec.distributed import DistributedModelParallel
from torchrec.distributed.types import ShardingEnv
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from hybridrec import ConfigError, HashEmbeddingBagConfig, StateError, Uniform, checkpoint, get_default_hybrid_sharders
from hybridrec.native import initial_rows, mix64, table_seed
from hybridrec.native.protocol import InitKind, ShardSpec
from tests.cases.small import kjt, unsharded
from tests.checkpoint.test_deltas import EVICTING, write_chain
from tests.distributed.scenario import TABLES, universe
from tests.ranks import RankPools


@pytest.fixture(scope="module")
def chain(pools: RankPools, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A snapshot with four deltas of tables that evict; what they add up to was compared with the live tables."""
    path = tmp_path_factory.mktemp("chain")
    pools[2].run(write_chain, EVICTING, path, first=32, every=4, max_rows=160)
    return path


def drop(second: Path, third: Path) -> None:
    shutil.rmtree(second)


def repeat(second: Path, third: Path) -> None:
    shutil.rmtree(third)
    shutil.copytree(second, third)


def swap(second: Path, third: Path) -> None:
    aside = second.with_name("aside")
    second.rename(aside)
    third.rename(second)
    aside.rename(third)


def cut(second: Path, third: Path) -> None:
    file = next(f for f in sorted(second.rglob("*.rows")) if f.stat().st_size)
    file.write_bytes(file.read_bytes()[:-1])


@pytest.mark.parametrize(("damage", "number"), [(drop, 2), (repeat, 3), (swap, 2), (cut, 2)])
def test_re454_an_increment_dropped_repeated_swapped_or_cut_is_refused_by_its_number(
    chain: Path, tmp_path: Path, damage: Callable[[Path, Path], None], number: int
) -> None:
    path = tmp_path / "copy"
    shutil.copytree(chain, path)
    (deltas,) = path.glob("step_*/deltas")
    damage(deltas / "00000002", deltas / "00000003")
    with pytest.raises(StateError, match=f"delta {number} of"):
        checkpoint.follow(path)


def test_re454_increments_with_evictions_are_the_full_dump(pools: RankPools, tmp_path: Path) -> None:
    """`write_chain` compares every bit after each increment."""
    found = pools[2].run(write_chain, EVICTING, tmp_path, first=34, every=2, max_rows=160)
    assert [one["number"] for one in found] == [7, 7]
    assert list(tmp_path.rglob("*.ids"))


@pytest.mark.parametrize(("policy", "max_rows"), [("grow", None), ("evict", 160), ("error", 600)])
def test_re211_re242_re245_increments_under_every_policy(
    pools: RankPools, tmp_path: Path, policy: str, max_rows: int | None
) -> None:
    """Whatever happens to full tables, and however many steps are between two increments."""
    scenario = replace(EVICTING, steps=40)
    for every in (2, 5):
        path = tmp_path / str(every)
        found = pools[2].run(write_chain, scenario, path, first=30, every=every, max_rows=max_rows, policy=policy)
        assert {one["number"] for one in found} == {10 // every}
        assert bool(list(path.rglob("*.ids"))) == (policy == "evict")


@pytest.mark.parametrize("optimizer", ["sgd", "adagrad", "adam", "rowwise_adagrad"])
def test_tr3476_increments_have_ids_rows_and_states(pools: RankPools, tmp_path: Path, optimizer: str) -> None:
    """From the first step on, when no state of any row is there yet."""
    scenario = replace(EVICTING, optimizer=optimizer, steps=4)
    pools[1].run(write_chain, scenario, tmp_path, first=1, every=1)
    follower = checkpoint.follow(tmp_path)
    assert follower.number == 3
    for name in follower.table_names:
        rows = follower.rows(name)
        assert set(rows.states) == {"sgd": set(), "adam": {"exp_avg", "exp_avg_sq"}}.get(optimizer, {"sum"})
        assert all(bool(state.any()) for state in rows.states.values())


class Twins(nn.Module):
    """Two collections, both with a table ``t``."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = (
            unsharded(
                [
                    HashEmbeddingBagConfig(
                        100, dim, "t", feature_names=[feature], seed=dim, initializer=Uniform(-0.1, 0.1)
                    )
                ]
            )
            for dim, feature in ((4, "a"), (6, "b"))
        )

    def forward(self, features: KeyedJaggedTensor) -> Tensor:
        return torch.cat([self.first(features).values(), self.second(features).values()], 1)


def train_twins(path: Path) -> dict[str, dict[int, list[float]]]:
    """Collection -> id -> row, of this rank."""
    host_env = ShardingEnv(dist.get_world_size(), dist.get_rank(), dist.new_group(backend="gloo"))
    dmp = DistributedModelParallel(
        Twins(), device=torch.device("cpu"), sharders=get_default_hybrid_sharders(host_env), init_data_parallel=False
    )
    writer = checkpoint.DeltaWriter(path, dmp)
    for step in range(4):
        bags = {"a": [[1, 2 + step]], "b": [[1, 20 - step, 2]]}
        dmp(kjt(bags)).sum().backward()
        writer.save_delta() if step else writer.save_full()
    again = DistributedModelParallel(
        Twins(), device=torch.device("cpu"), sharders=get_default_hybrid_sharders(host_env), init_data_parallel=False
    )
    checkpoint.load(path, again)
    exports = [
        {
            name: dict(zip(chunk.ids_N.tolist(), chunk.weights_ND.tolist(), strict=True))
            for name in ("first", "second")
            for chunk in [*getattr(model.module, name).export_rows("t")]
        }
        for model in (dmp, again)
    ]
    if exports[0] != exports[1]:
        raise AssertionError("load: the rows of one collection went to the other")
    return exports[0]


def test_ter607_two_modules_with_one_table_name_stay_apart(pools: RankPools, tmp_path: Path) -> None:
    found = pools[2].run(train_twins, tmp_path)
    follower = checkpoint.follow(tmp_path)
    assert follower.number == 3 and follower.table_names == ["t", "t"]
    with pytest.raises(ConfigError, match="more than one table 't'"):
        follower.embeddings("t", torch.tensor([1]))
    for collection, dim, num_rows in (("first", 4, 5), ("second", 6, 6)):
        expected = {i: row for one in found for i, row in one.get(collection, {}).items()}
        rows, is_known = follower.embeddings("t", torch.tensor(list(expected)), collection=collection)
        assert rows.shape == (num_rows, dim) and bool(is_known.all()) and rows.tolist() == list(expected.values())


def test_dr1023_fb4955_no_id_reads_the_row_of_another(chain: Path) -> None:
    """Ids that live, that left, that never were: each reads its own row, or its own initial row, after every delta."""
    (snapshot,) = chain.glob("step_*")
    follower = checkpoint.Follower(chain)
    versions = [follower.now]
    follower._take(follower._snapshot_layer(snapshot))
    versions.append(follower.now)  # before the deltas: others live, and positions are used again
    follower.update()
    versions.append(follower.now)
    for now in versions:
        for table in TABLES:
            ids = torch.tensor([*universe(EVICTING, table), 4, 5, 6])
            read, is_known = now.embeddings(table.name, ids)
            assert 0 < int(is_known.sum()) < len(ids)
            own = now.rows(table.name)
            row_of = dict(zip(own.ids_N.tolist(), own.weights_ND, strict=True))
            expected = [row_of.get(i, initial) for i, initial in zip(ids.tolist(), initial_of(table, ids), strict=True)]
            assert torch.equal(read, torch.stack(expected))
            assert len(torch.unique(read, dim=0)) == len(ids)


def initial_of(table: Any, ids: Tensor) -> Tensor:
    """As docs/design/initial_rows.md has it."""
    spec = ShardSpec(
        name=table.name,
        dim=table.dim,
        num_row_states=0,
        num_row_wise_states=0,
        state_initial_values=(),
        num_slots=0,
        planned_rows=0,
        table_seed=table_seed(table.seed, table.name),
        init_kind=InitKind.UNIFORM,
        init_a=-0.1,
        init_b=0.1,
    )
    return initial_rows(spec, mix64(ids))
