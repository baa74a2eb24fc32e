"""`hybridrec.config`: what is accepted, what it resolves to, and what each refusal says."""

from __future__ import annotations

import copy
import dataclasses
import functools
import math
import pickle
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig
from torchrec.modules.embedding_configs import DataType, PoolingType
from torchrec.modules.embedding_modules import get_embedding_names_by_table

from hybridrec.config import (
    DEFAULT_INITIALIZER,
    HashEmbeddingBagConfig,
    embedding_names,
    resolve_table,
    resolve_tables,
    shard_quota,
    shard_rows,
)
from hybridrec.errors import ConfigError
from hybridrec.row_type import RowType
from hybridrec.store.initializer import Bank, Constant, Normal, Uniform
from hybridrec.types import FullPolicy


def make(**changes: Any) -> HashEmbeddingBagConfig:
    """A good config, changed."""
    return HashEmbeddingBagConfig(**{"num_embeddings": 100, "embedding_dim": 8, "name": "user", **changes})


# ---- what a config resolves to -----------------------------------------------------------------------------------


def test_defaults() -> None:
    table = resolve_table(make(feature_names=["f", "g"]))
    assert dataclasses.asdict(table) == {
        "name": "user",
        "num_embeddings": 100,
        "embedding_dim": 8,
        "feature_names": ("f", "g"),
        "pooling": PoolingType.SUM,
        "planned_rows": 100,
        "max_rows": None,
        "full_policy": FullPolicy.GROW,
        "device_rows": None,
        "seed": 0,
        "initializer": dataclasses.asdict(Uniform(-0.01, 0.01)),
        "row_type": RowType.FLOAT32,
    }


def test_a_plain_torchrec_config_has_the_same_defaults() -> None:
    plain = EmbeddingBagConfig(100, 8, "user", feature_names=["f"])
    assert resolve_table(plain) == resolve_table(make(feature_names=["f"]))


def test_fields_of_torchrec_are_positional_as_there_and_ours_are_keyword_only() -> None:
    assert resolve_table(HashEmbeddingBagConfig(100, 8, "user", DataType.FP32, ["f"])).feature_names == ("f",)
    ours = {"planned_rows", "max_rows", "full_policy", "device_rows", "seed", "initializer"}
    assert {f.name for f in dataclasses.fields(HashEmbeddingBagConfig) if f.kw_only} == ours


def test_every_field_arrives() -> None:
    table = resolve_table(
        make(
            pooling=PoolingType.MEAN,
            planned_rows=7,
            max_rows=9,
            full_policy="evict",
            device_rows=3,
            seed=-5,
            initializer=Constant(0.5),
        )
    )
    assert table.pooling is PoolingType.MEAN
    assert (table.planned_rows, table.max_rows, table.device_rows, table.seed) == (7, 9, 3, -5)
    assert table.full_policy is FullPolicy.EVICT
    assert table.initializer == Constant(0.5)


def test_a_table_without_features_takes_its_name_and_the_users_object_stays() -> None:
    config = make()
    before = {**vars(config), "feature_names": list(config.feature_names)}
    assert resolve_tables([config])[0].feature_names == ("user",)
    assert vars(config) == before


def test_numpy_ints_are_ints() -> None:
    table = resolve_table(make(num_embeddings=np.int64(5), planned_rows=np.int32(4), seed=np.int64(3)))
    assert (table.num_embeddings, table.planned_rows, table.seed) == (5, 4, 3)
    assert type(table.num_embeddings) is int


def test_a_resolved_table_is_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        resolve_table(make()).seed = 1  # type: ignore[misc]


def test_configs_survive_replace_pickle_and_deepcopy() -> None:
    config = make(initializer=Normal(0.0, 0.1), planned_rows=10)
    for other in (
        dataclasses.replace(config, num_embeddings=10**12),
        pickle.loads(pickle.dumps(config)),
        copy.deepcopy(config),
    ):
        assert resolve_table(other).initializer == Normal(0.0, 0.1)


def test_a_hash_config_builds_a_torchrec_collection() -> None:
    collection = EmbeddingBagCollection([make(feature_names=["f"])])
    assert collection.embedding_bags["user"].weight.shape == (100, 8)


def test_what_was_changed_after_construction_is_checked_again() -> None:
    config = make()
    config.device_rows = 0
    with pytest.raises(ConfigError, match=r"table 'user': device_rows=0 is not positive"):
        resolve_table(config)


# ---- initial rows ------------------------------------------------------------------------------------------------


def test_the_default_range_is_not_torchrecs() -> None:
    assert DEFAULT_INITIALIZER == Uniform(-0.01, 0.01)
    assert make(num_embeddings=4).init_fn.keywords == {"a": -0.5, "b": 0.5}  # type: ignore[union-attr]
    assert resolve_table(make(num_embeddings=4)).initializer == DEFAULT_INITIALIZER
    assert resolve_table(EmbeddingBagConfig(4, 8, "user")).initializer == DEFAULT_INITIALIZER


@pytest.mark.parametrize("config_class", [HashEmbeddingBagConfig, EmbeddingBagConfig])
def test_weight_init_min_and_max_are_a_uniform(config_class: type) -> None:
    config = config_class(4, 8, "user", weight_init_min=-2.0, weight_init_max=3.0)
    assert resolve_table(config).initializer == Uniform(-2.0, 3.0)


@pytest.mark.parametrize("config_class", [HashEmbeddingBagConfig, EmbeddingBagConfig])
def test_an_init_fn_fills_a_bank(config_class: type) -> None:
    config = config_class(4, 3, "user", init_fn=functools.partial(torch.nn.init.constant_, val=0.25))
    initializer = resolve_table(config).initializer
    assert isinstance(initializer, Bank)
    rows = torch.as_tensor(initializer.rows)
    assert rows.shape == (4096, 3)
    assert bool((rows == 0.25).all())


@pytest.mark.parametrize("config_class", [HashEmbeddingBagConfig, EmbeddingBagConfig])
def test_a_users_partial_of_uniform_is_a_uniform(config_class: type) -> None:
    config = config_class(4, 3, "user", init_fn=functools.partial(torch.nn.init.uniform_, a=-0.25, b=0.75))
    assert resolve_table(config).initializer == Uniform(-0.25, 0.75)


def test_a_users_init_fn_that_equals_torchrecs_default_is_still_the_users() -> None:
    config = make(num_embeddings=4, init_fn=functools.partial(torch.nn.init.uniform_, a=-0.5, b=0.5))
    assert resolve_table(config).initializer == Uniform(-0.5, 0.5)


# ---- refusals ----------------------------------------------------------------------------------------------------

REFUSALS: list[tuple[dict[str, Any], str]] = [
    ({"embedding_dim": 0}, r"table 'user': embedding_dim=0 is out of range\. Accepted: 1 to 2,048"),
    ({"embedding_dim": 2049}, r"embedding_dim=2049 is out of range"),
    ({"embedding_dim": 8.0}, r"embedding_dim=8\.0 has type float\. Pass an int"),
    ({"embedding_dim": True}, r"embedding_dim=True has type bool"),
    ({"num_embeddings": 0}, r"num_embeddings=0 is not positive"),
    ({"num_embeddings": "9"}, r"num_embeddings='9' has type str"),
    ({"num_embeddings": 2**58}, r"num_embeddings=288230376151711744 x embedding_dim=8 .*planned_rows"),
    ({"planned_rows": 0}, r"planned_rows=0 is not positive.*None for the default"),
    ({"planned_rows": 1.5}, r"planned_rows=1\.5 has type float"),
    ({"device_rows": -1}, r"device_rows=-1 is not positive"),
    ({"max_rows": 0, "full_policy": "error"}, r"max_rows=0 is not positive"),
    ({"full_policy": "evict"}, r"full_policy='evict' without max_rows never takes effect\. Pass max_rows"),
    ({"full_policy": FullPolicy.ERROR}, r"full_policy='error' without max_rows"),
    ({"full_policy": "drop"}, r"full_policy='drop' is unknown\. Accepted: 'grow', 'evict', 'error'"),
    ({"max_rows": 5}, r"max_rows=5 has no effect with full_policy='grow'.*'evict' or 'error'"),
    ({"seed": 2**63}, r"seed=9223372036854775808 does not fit in int64"),
    ({"seed": -(2**63) - 1}, r"does not fit in int64"),
    ({"seed": 0.5}, r"seed=0\.5 has type float"),
    ({"data_type": DataType.INT8}, r"data_type=<DataType\.INT8.* is not available.*Use DataType\.FP32, BF16 or FP16"),
    (
        {"data_type": DataType.FP16, "initializer": Constant(7e4)},
        r"data_type=<DataType\.FP16.* holds values up to 65504, initial rows reach 70000\. Use DataType\.FP32",
    ),
    ({"data_type": DataType.BF16, "initializer": Normal(3.39e38, 1e35)}, r"data_type=<DataType\.BF16.*initial rows"),
    ({"pooling": PoolingType.NONE}, r"pooling=<PoolingType\.NONE.*Use PoolingType\.SUM or PoolingType\.MEAN"),
    ({"name": ""}, r"table '': name='' is empty"),
    ({"name": "a.b"}, r"table 'a\.b': name='a\.b' contains '\.'"),
    ({"name": 3}, r"table 3: name=3 has type int"),
    ({"name": "keys"}, r"name='keys' is an attribute of torch\.nn\.ModuleDict.*Rename it"),
    ({"name": "training"}, r"name='training' is an attribute of torch\.nn\.ModuleDict"),
    ({"feature_names": "f"}, r"feature_names='f' has type str\. Pass a list of str"),
    ({"feature_names": ["f", ""]}, r"feature_names=\['f', ''\] has the entry ''"),
    ({"feature_names": [1]}, r"has the entry 1"),
    ({"feature_names": ["f", "g", "f"]}, r"names 'f' twice"),
    ({"num_embeddings_post_pruning": 5}, r"num_embeddings_post_pruning=5 is not honoured.*default, None"),
    ({"need_pos": True}, r"need_pos=True is not honoured.*default, False"),
    ({"input_dim": 5}, r"input_dim=5 is not honoured"),
    ({"total_num_buckets": 5}, r"total_num_buckets=5 is not honoured"),
    ({"use_virtual_table": True}, r"use_virtual_table=True is not honoured"),
    ({"virtual_table_eviction_policy": "x"}, r"virtual_table_eviction_policy='x' is not honoured"),
    ({"enable_embedding_update": True}, r"enable_embedding_update=True is not honoured"),
    ({"stash_weights": True}, r"stash_weights=True is not honoured"),
    ({"initializer": "zeros"}, r"initializer='zeros' has type str\. Accepted: Uniform, Normal, Constant, None"),
    ({"init_fn": 3}, r"init_fn=3 is not callable"),
    ({"weight_init_min": -1.0}, r"weight_init_min=-1\.0 is given without weight_init_max\. Give weight_init_max too"),
    ({"weight_init_max": 1.0}, r"weight_init_max=1\.0 is given without weight_init_min"),
    ({"weight_init_min": 1.0, "weight_init_max": -1.0}, r"weight_init_min=1\.0, weight_init_max=-1\.0 are no range"),
    ({"initializer": Constant(1.0), "init_fn": torch.nn.init.zeros_}, r"initializer and init_fn are both given"),
    (
        {"weight_init_min": 0.0, "weight_init_max": 1.0, "init_fn": torch.nn.init.zeros_},
        r"weight_init_min and weight_init_max and init_fn are both given.*Give one of them",
    ),
    (
        {"weight_init_min": 0.0, "weight_init_max": 1.0, "initializer": Constant(1.0)},
        r"initializer and weight_init_min and weight_init_max are both given",
    ),
]


@pytest.mark.parametrize(("changes", "message"), REFUSALS, ids=["-".join(r[0]) for r in REFUSALS])
def test_refused_at_construction(changes: dict[str, Any], message: str) -> None:
    known = {f.name for f in dataclasses.fields(HashEmbeddingBagConfig)}
    if not changes.keys() <= known:
        pytest.skip(f"this TorchRec has no field {sorted(changes.keys() - known)}")
    with pytest.raises(ConfigError, match=message):
        make(**changes)


@pytest.mark.parametrize("field", ["data_type", "pooling", "need_pos", "init_fn"])
def test_a_plain_config_is_refused_when_it_is_resolved(field: str) -> None:
    value = {"data_type": DataType.INT4, "pooling": PoolingType.NONE, "need_pos": True, "init_fn": "zeros"}[field]
    config = EmbeddingBagConfig(10, 8, "user", **{field: value})
    with pytest.raises(ConfigError, match=f"table 'user': {field}="):
        resolve_table(config)


def test_unusual_values_that_are_accepted() -> None:
    for changes in ({"embedding_dim": 1}, {"embedding_dim": 2048}, {"seed": 2**63 - 1}, {"seed": -(2**63)}):
        resolve_table(make(**changes))
    assert resolve_table(make(num_embeddings=2**58 - 1)).planned_rows == 2**58 - 1


# ---- collections of tables ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tables", "message"),
    [
        ([], r"tables: the list is empty"),
        (None, r"tables: got NoneType\. Pass a list"),
        (make(), r"tables: got HashEmbeddingBagConfig\. Pass a list"),
        (["user"], r"tables: 'user' has type str"),
        ([make(), make(name="b"), make()], r"table name 'user' is used 2 times"),
        ([make(), make(name="user[0:8]")], r"table 'user\[0:8\]' has the name of columns of table 'user'"),
        (
            [
                make(name="t", feature_names=["f"]),
                make(name="u", feature_names=["f"]),
                make(name="v", feature_names=["f@t"]),
            ],
            r"output name 'f@t' is used 2 times",
        ),
    ],
)
def test_refused_tables(tables: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        resolve_tables(tables)


@given(st.lists(st.lists(st.sampled_from("abcd"), min_size=1, max_size=4, unique=True), min_size=1, max_size=4))
def test_names_of_outputs_are_torchrecs(features: list[list[str]]) -> None:
    configs = [make(name=f"t{i}", feature_names=names) for i, names in enumerate(features)]
    assert embedding_names(resolve_tables(configs)) == get_embedding_names_by_table(configs)


@given(st.integers(1, 2**61), st.integers(2, 4096))
def test_shard_rows_is_the_share_and_four_standard_deviations(planned: int, world: int) -> None:
    rows = shard_rows(planned, world)
    assert 1 <= rows <= planned
    if rows < planned:
        margin = rows - math.ceil(fraction(planned, world))
        assert (margin - 1) ** 2 < 16 * fraction(planned, world) <= margin**2


def fraction(numerator: int, denominator: int) -> Fraction:
    """Exact quotient."""
    return Fraction(numerator, denominator)


def test_shard_rows_examples() -> None:
    assert shard_rows(10**12, 1) == 10**12
    assert shard_rows(100, 4) == 25 + 20
    assert shard_rows(10, 4) == 10
    assert shard_rows(2**60 + 1, 2) == 2**59 + 1 + math.isqrt(8 * (2**60 + 1) - 1) + 1


def test_shard_quota_rounds_up() -> None:
    assert [shard_quota(10, w) for w in (1, 3, 4, 10, 11)] == [10, 4, 3, 1, 1]
    assert shard_quota(2**60 + 1, 2) == 2**59 + 1
