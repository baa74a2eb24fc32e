"""Plans of table-wise and column-wise tables: by constraint, their bytes on their ranks, and what is refused."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torchrec.distributed.planner import EmbeddingShardingPlanner, ParameterConstraints, Topology
from torchrec.distributed.types import ShardingEnv, ShardingPlan
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad

from hybridrec import (
    HashEmbeddingBagCollection,
    HashEmbeddingBagConfig,
    HashEmbeddingCollection,
    HashEmbeddingConfig,
    HybridHashEmbeddingCollectionSharder,
    describe_plan,
    get_default_hybrid_sharders,
)
from hybridrec.errors import ConfigError
from tests.ranks import RankPool

GIB = 1 << 30


def plan_of(
    types: dict[str, list[str] | None],
    *,
    optimizer: Any = torch.optim.Adagrad,
    device: str = "cpu",
    rows: int | dict[str, int] = 100_000,
    hbm: int = 4 * GIB,
    min_partition: int = 32,
    world_size: int | None = None,
    is_sequence: bool = False,
    sharding_type: str | None = None,
    compute_kernels: list[str] | None = None,
) -> tuple[ShardingPlan, Any, Any]:
    world_size = world_size or dist.get_world_size()
    config_class = HashEmbeddingConfig if is_sequence else HashEmbeddingBagConfig
    tables = [
        config_class(
            name=name,
            num_embeddings=rows if isinstance(rows, int) else rows[name],
            embedding_dim=64,
            feature_names=[name],
        )
        for name in types
    ]
    ebc = (HashEmbeddingCollection if is_sequence else HashEmbeddingBagCollection)(tables)
    apply_optimizer_in_backward(optimizer, ebc.parameters(), {"lr": 0.1})
    env = ShardingEnv(world_size=world_size, rank=dist.get_rank(), pg=dist.new_group(backend="gloo"))
    sharders = get_default_hybrid_sharders(env)
    if sharding_type:
        sharders = [HybridHashEmbeddingCollectionSharder(env, sharding_type=sharding_type)]
    planner = EmbeddingShardingPlanner(
        topology=Topology(
            world_size=world_size, local_world_size=world_size, compute_device=device, hbm_cap=hbm, ddr_cap=16 * GIB
        ),
        constraints={
            name: ParameterConstraints(
                sharding_types=allowed, compute_kernels=compute_kernels, min_partition=min_partition
            )
            for name, allowed in types.items()
            if allowed is not None
        },
    )
    return planner.plan(ebc, sharders), ebc, sharders


def chosen(types: dict[str, list[str] | None], **kwargs: Any) -> dict[str, Any]:
    plan, ebc, sharders = plan_of(types, **kwargs)
    parts = plan.plan[""]
    return {
        "types": {name: parts[name].sharding_type for name in types},
        "ranks": {name: parts[name].ranks for name in types},
        "sizes": {name: [s.shard_sizes for s in parts[name].sharding_spec.shards] for name in types},
        "text": describe_plan(plan, ebc, sharders),
        "kernels": {name: parts[name].compute_kernel for name in types},
        "factors": {name: p.load_factor if (p := parts[name].cache_params) else None for name in types},
    }


@pytest.mark.parametrize("is_sequence", [False, True])
def test_constraints_choose(pool_2: RankPool, is_sequence: bool) -> None:
    types = {"free": None, "whole": ["table_wise"], "cut": ["column_wise"], "either": ["column_wise", "table_wise"]}
    first, second = pool_2.run(chosen, types, is_sequence=is_sequence)
    assert first["types"] == second["types"] and first["ranks"] == second["ranks"]
    assert first["types"]["free"] == "row_wise"
    assert first["types"]["whole"] == "table_wise" and len(first["ranks"]["whole"]) == 1
    assert first["types"]["cut"] == "column_wise" and first["sizes"]["cut"] == [[100_000, 32]] * 2
    assert first["types"]["either"] in ("column_wise", "table_wise")
    assert "'cut[32:64]'" in first["text"] and "all ranks" in first["text"]


def test_owned_tables_spread_and_fill_their_ranks(pool_2: RankPool) -> None:
    """Two tables that do not fit one device together go to both; caches grow until their own rank is full."""
    types: dict[str, list[str] | None] = {"a": ["table_wise"], "b": ["table_wise"]}
    for result in pool_2.run(chosen, types, device="cuda", rows=8_000_000, hbm=6 * GIB):
        assert sorted(rank for ranks in result["ranks"].values() for rank in ranks) == [0, 1]
        assert set(result["kernels"].values()) == {"fused"}
    for result in pool_2.run(chosen, types, device="cuda", rows=8_000_000, hbm=3 * GIB):
        assert sorted(rank for ranks in result["ranks"].values() for rank in ranks) == [0, 1]
        assert set(result["kernels"].values()) == {"fused_uvm_caching"}
        for factor in result["factors"].values():  # of 4 GB for all rows and states, in 2.4 GiB less inputs
            assert 0.4 < factor < 0.7


def refused(types: dict[str, list[str] | None], **kwargs: Any) -> tuple[str, str]:
    if kwargs.pop("row_wise_state", False):
        kwargs["optimizer"] = RowWiseAdagrad
    try:
        plan_of(types, **kwargs)
    except Exception as e:
        return type(e).__name__, str(e)
    return "", ""


@pytest.mark.parametrize("sharding_type", ["data_parallel", "table_row_wise", "grid_shard", "table_column_wise"])
def test_other_types_are_refused_by_name(pool_1: RankPool, sharding_type: str) -> None:
    ((name, text),) = pool_1.run(refused, {"t": [sharding_type]})
    assert name == ConfigError.__name__
    assert "table 't'" in text and repr(sharding_type) in text and "'row_wise'" in text


@pytest.mark.parametrize("kernel", ["dense", "key_value", "quant"])
def test_other_kernels_are_refused_by_name(pool_1: RankPool, kernel: str) -> None:
    ((name, text),) = pool_1.run(refused, {"t": ["row_wise"]}, compute_kernels=[kernel])
    assert name == ConfigError.__name__
    assert "table 't'" in text and repr(kernel) in text and "'fused_uvm_caching'" in text


def test_a_sharder_of_sequences_chooses_column_wise(pool_2: RankPool) -> None:
    for result in pool_2.run(chosen, {"t": None}, is_sequence=True, sharding_type="column_wise"):
        assert result["types"] == {"t": "column_wise"}


@pytest.mark.parametrize("is_sequence", [False, True])
def test_column_wise_with_row_wise_state_is_refused(pool_1: RankPool, is_sequence: bool) -> None:
    ((name, text),) = pool_1.run(refused, {"t": ["column_wise"]}, row_wise_state=True, is_sequence=is_sequence)
    assert name == ConfigError.__name__ and "one value a row" in text and "table 't'" in text
    ((name, text),) = pool_1.run(refused, {"t": ["column_wise", "row_wise"]}, row_wise_state=True)
    assert (name, text) == ("", "")


def test_a_table_too_large_for_its_rank_is_named(pool_2: RankPool) -> None:
    """It would fit two ranks row-wise, and does not fit one."""
    types: dict[str, list[str] | None] = {"huge": ["table_wise"], "small": None}
    for name, text in pool_2.run(refused, types, rows=50_000_000):
        assert name == "PlanCapacityError"
        assert "'huge'" in text and "planned_rows <=" in text and "row_wise" in text


def advised_rows(text: str, rows: dict[str, int]) -> dict[str, int]:
    """Every table with the fewest rows that a line of the message allows it."""
    rows = dict(rows)
    for name, value in re.findall(r"^'(\w+)(?:\[\d+:\d+\])?' .* planned_rows <= ([\d,]+)", text, re.MULTILINE):
        rows[name] = min(rows[name], int(value.replace(",", "")))
    return rows


MILLION = 10**6
TOO_LARGE: dict[str, tuple[dict[str, list[str] | None], dict[str, int]]] = {
    "one table": ({"a": ["table_wise"]}, {"a": 300 * MILLION}),
    "columns": ({"a": ["column_wise"]}, {"a": 120 * MILLION}),
    "columns beside a row-wise table": ({"a": ["column_wise"], "b": None}, {"a": 40 * MILLION, "b": 20 * MILLION}),
    "on every rank": (
        {"a": ["table_wise"], "b": ["table_wise"], "c": ["column_wise"]},
        {"a": 30 * MILLION, "b": 29 * MILLION, "c": 30 * MILLION},
    ),
}


@pytest.mark.parametrize("case", list(TOO_LARGE))
def test_the_advice_leads_to_a_plan(pool_1: RankPool, case: str) -> None:
    """The settings of all lines together; or, with the tables as they are, row-wise on so many ranks and no fewer."""
    types, rows = TOO_LARGE[case]
    ((name, text),) = pool_1.run(refused, types, rows=rows, world_size=2)
    assert name == "PlanCapacityError" and "shard all tables 'row_wise'" in text
    fewer = advised_rows(text, rows)
    assert fewer != rows
    assert pool_1.run(refused, types, rows=fewer, world_size=2) == [("", "")]
    all_row_wise: dict[str, list[str] | None] = dict.fromkeys(types)
    found = re.search(r"use W >= (\d+) ranks", text)
    ranks = int(found[1]) if found else 2
    assert pool_1.run(refused, all_row_wise, rows=rows, world_size=ranks) == [("", "")]
    if ranks > 2:
        ((name, _),) = pool_1.run(refused, all_row_wise, rows=rows, world_size=ranks - 1)
        assert name == "PlanCapacityError"


def test_the_advice_names_the_table_of_a_column_shard(pool_1: RankPool) -> None:
    types, rows = TOO_LARGE["columns"]
    ((_, text),) = pool_1.run(refused, types, rows=rows, world_size=2)
    assert re.search(r"^'a\[0:32\]' .* planned_rows <= [\d,]+ of table 'a'$", text, re.MULTILINE), text
