"""Tables whose rows have 16 bits: the bits of a plain unlimited table, wherever rows are; where they end up."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from fbgemm_gpu.split_embedding_configs import EmbOptimType, SparseType
from torchrec.distributed import DistributedModelParallel
from torchrec.distributed.types import ShardingEnv
from torchrec.modules.embedding_configs import DataType
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from hybridrec import (
    ConfigError,
    HashEmbeddingBagCollection,
    HashEmbeddingBagConfig,
    HashEmbeddingCollection,
    HashEmbeddingConfig,
    HybridHashEmbeddingBagCollectionSharder,
    HybridHashEmbeddingCollectionSharder,
)
from tests.distributed.oracle import Table
from tests.distributed.pipelines import run_pipeline_against_oracle
from tests.distributed.scenario import Scenario, run_against_oracle
from tests.distributed.test_verification import train
from tests.distributed.test_where import asked_while_training
from tests.ranks import RankPool, RankPools

TABLES = (
    Table(name="user", dim=8, features=("user",), row_type="bfloat16"),
    Table(name="item", dim=4, features=("clicked", "bought"), is_mean=True, seed=3, row_type="float16"),
    Table(name="word", dim=5, features=("word",), row_type="bfloat16"),  # half a word is left over
    Table(name="page", dim=8, features=("page",)),
)
COLUMNS = (
    replace(TABLES[0], owners=((8, 1),)),
    Table(name="item", dim=8, features=("item",), row_type="float16", owners=((3, 0), (5, 1))),
    TABLES[2],
)
SEQUENCES = (
    Table(name="item", dim=5, features=("clicked", "bought"), row_type="bfloat16"),
    Table(name="word", dim=5, features=("word",), row_type="float16"),
    Table(name="user", dim=5, features=("user",)),
)


@pytest.mark.parametrize(
    ("world_size", "cache", "optimizer", "is_weighted"),
    [
        (1, "minimum", "adam", False),
        (1, "below", "rowwise_adagrad", True),
        (2, "all", "sgd", False),
        (2, "minimum", "adagrad", True),
        (2, "below", "adam", False),
        (2, "one", "rowwise_adagrad", False),
        (3, "minimum", "sgd", False),
    ],
)
def test_plain_loop(pools: RankPools, world_size: int, cache: str, optimizer: str, is_weighted: bool) -> None:
    scenario = Scenario(
        tables=TABLES, cache=cache, optimizer=optimizer, is_weighted=is_weighted, steps=25, ids_per_table=300
    )
    for result in pools[world_size].run(run_against_oracle, scenario):
        if cache == "minimum":
            assert all(s.write_backs > 0 and s.loads > 0 for s in result["stats"])


@pytest.mark.parametrize(
    ("world_size", "depth", "cache", "optimizer"),
    [(1, 3, "tenth", "rowwise_adagrad"), (2, 3, "minimum", "adam"), (2, 5, "below", "adagrad"), (3, 2, "all", "adam")],
)
def test_pipeline(pools: RankPools, world_size: int, depth: int, cache: str, optimizer: str) -> None:
    scenario = Scenario(tables=TABLES, cache=cache, optimizer=optimizer, steps=25, ids_per_table=300)
    pools[world_size].run(run_pipeline_against_oracle, scenario, depth, delay_seed=depth)


@pytest.mark.parametrize("optimizer", ["adam", "sgd"])
def test_tables_and_columns_on_single_ranks(pool_2: RankPool, optimizer: str) -> None:
    pool_2.run(run_against_oracle, Scenario(tables=COLUMNS, optimizer=optimizer, steps=20, ids_per_table=300))


@pytest.mark.parametrize(("world_size", "cache"), [(1, "minimum"), (2, "below")])
def test_sequences(pools: RankPools, world_size: int, cache: str) -> None:
    scenario = Scenario(is_sequence=True, tables=SEQUENCES, cache=cache, optimizer="adam", steps=20, ids_per_table=300)
    pools[world_size].run(run_against_oracle, scenario)
    pools[world_size].run(run_pipeline_against_oracle, scenario, 3)


@pytest.mark.parametrize("cache", ["minimum", "below"])
def test_verified_sees_no_difference(pool_2: RankPool, cache: str) -> None:
    scenario = Scenario(tables=TABLES, cache=cache, optimizer="adagrad", steps=15, ids_per_table=300)
    for check, _ in pool_2.run(train, scenario, 3):
        assert check.difference is None and check.rows > 100


def test_where_tells_values(pool_2: RankPool) -> None:
    tables = (TABLES[0], TABLES[2], TABLES[3])
    scenario = Scenario(tables=tables, optimizer="adagrad", steps=12, ids_per_table=300)
    assert set().union(*pool_2.run(asked_while_training, scenario, 3)) >= {"slot", "store", "unknown"}


# ---- the type of the output --------------------------------------------------------------------------------------


def outputs(is_sequence: bool, fused: dict[str, object]) -> list[torch.Tensor]:
    """Of one batch that trains and one that reads; the same collection without and with ``output_dtype``."""
    config, collection, sharder = (
        (HashEmbeddingConfig, HashEmbeddingCollection, HybridHashEmbeddingCollectionSharder)
        if is_sequence
        else (HashEmbeddingBagConfig, HashEmbeddingBagCollection, HybridHashEmbeddingBagCollectionSharder)
    )
    features = KeyedJaggedTensor(["f"], torch.tensor([3, 4, 3, -9]), lengths=torch.tensor([1, 2, 1]))
    host_env = ShardingEnv(dist.get_world_size(), dist.get_rank(), dist.new_group(backend="gloo"))
    module = collection([config(100, 6, "t", data_type=DataType.BF16, feature_names=["f"])])
    params = {"optimizer": EmbOptimType.EXACT_SGD, "learning_rate": 0.5, **fused}
    model = DistributedModelParallel(module, device=torch.device("cpu"), sharders=[sharder(host_env, params)])
    found = []
    for _ in range(2):
        out = model(features)
        values = out["f"].values() if is_sequence else out.values()
        found.append(values.detach())
        (values.float() * torch.arange(1, 7)).sum().backward()
    return found


@pytest.mark.parametrize("is_sequence", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_output_is_rounded_at_its_end(pool_2: RankPool, is_sequence: bool, dtype: torch.dtype) -> None:
    asked: object = SparseType.BF16 if dtype == torch.bfloat16 else DataType.FP16
    plain = pool_2.run(outputs, is_sequence, {})
    rounded = pool_2.run(outputs, is_sequence, {"output_dtype": asked})
    for ours, theirs in zip(rounded, plain, strict=True):
        assert all(one.dtype == dtype for one in ours) and all(one.dtype == torch.float32 for one in theirs)
        assert all(torch.equal(one, other.to(dtype)) for one, other in zip(ours, theirs, strict=True))


def refusals() -> list[str]:
    messages = []
    for fused in ({"output_dtype": DataType.INT8}, {"stochastic_rounding": True}):
        try:
            outputs(False, fused)
        except ConfigError as e:
            messages.append(str(e))
    return messages


def test_what_is_not_available_is_refused_by_name(pool_2: RankPool) -> None:
    for output_dtype, rounding in pool_2.run(refusals):
        assert "output_dtype" in output_dtype and "INT8" in output_dtype and "BF16 or FP16" in output_dtype
        assert "stochastic_rounding=True" in rounding and "table 't'" in rounding
