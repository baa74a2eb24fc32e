"""Hashed tables as TorchRec's own collections: row i is what id i reads in eval mode."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torchrec.modules.embedding_configs import EmbeddingBagConfig, EmbeddingConfig, PoolingType
from torchrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from hybridrec import (
    CapacityError,
    ConfigError,
    Constant,
    HashEmbeddingBagCollection,
    HashEmbeddingBagConfig,
    HashEmbeddingCollection,
    HashEmbeddingConfig,
    Normal,
    StateError,
    Uniform,
    checkpoint,
)
from tests.checkpoint.made_snapshots import rows_of, snapshot_of, table_in
from tests.checkpoint.runs import build
from tests.checkpoint.test_import_table import ROW_WISE, TYPED
from tests.distributed import scenario as scenarios
from tests.distributed.pipelines import all_batches, mine
from tests.distributed.scenario import Scenario
from tests.ranks import RankPools
from tests.unit.modules.batches import apply_optimizer_in_backward

NUM_ROWS = 60
"""Of plain tables; 40 ids are trained at most, so that others have their initial row."""
BAGS = Scenario(optimizer="adam", steps=6, ids_per_table=40)
SEQUENCES = replace(BAGS, is_sequence=True, tables=tuple(replace(t, dim=8, is_mean=False) for t in ROW_WISE))


def every_row(collection: Any, features: list[str]) -> Tensor:
    """What each id below `NUM_ROWS` reads, a bag each: [NUM_ROWS, all columns]."""
    values = torch.arange(NUM_ROWS).repeat(len(features))
    kjt = KeyedJaggedTensor(features, values, lengths=torch.ones(len(values), dtype=torch.int64))
    with torch.no_grad():
        found = collection(kjt)
        found = found.wait() if hasattr(found, "wait") else found
        if hasattr(found, "values") and not isinstance(found, dict):
            return found.values()
        return torch.cat([found[name].values() for name in features], 1)


def plain_of(scenario: Scenario, source: Any, configs: Any = None) -> EmbeddingBagCollection | EmbeddingCollection:
    convert = checkpoint.to_embedding_collection if scenario.is_sequence else checkpoint.to_embedding_bag_collection
    return convert(source, configs, num_embeddings={t.name: NUM_ROWS for t in scenario.tables})


def weights_of(collection: nn.Module) -> dict[str, Tensor]:
    return {name.split(".")[1]: parameter.detach() for name, parameter in collection.named_parameters()}


def plain_configs(scenario: Scenario) -> list[Any]:
    kind: Any = EmbeddingConfig if scenario.is_sequence else EmbeddingBagConfig
    return [
        kind(
            name=t.name,
            num_embeddings=10**12,
            embedding_dim=t.dim,
            feature_names=list(t.features),
            **({"pooling": PoolingType.MEAN} if t.is_mean else {}),
        )
        for t in scenario.tables
    ]


def trained_and_converted(scenario: Scenario, path: Path) -> dict[str, Tensor]:
    """Of a delta, with batches in flight; the bits are those that the model reads, and that it goes on with."""
    with mock.patch.object(scenarios, "universe", lambda scenario, table: list(range(scenario.ids_per_table))):
        dmp, pipeline = build(scenario)
        batches = mine(scenario, all_batches(scenario))
    data = iter(batches)
    writer = checkpoint.DeltaWriter(path, dmp, pipeline._optimizer, pipeline=pipeline)
    for write in (lambda: None, writer.save_full, writer.save_delta):
        pipeline.progress(data)
        write()
    random = torch.get_rng_state()
    plain = plain_of(scenario, dmp.module.ebc)
    assert torch.equal(torch.get_rng_state(), random)
    from_snapshot = plain_of(scenario, path, plain_configs(scenario))
    assert weights_of(plain).keys() == {t.name for t in scenario.tables}
    for name, weight in weights_of(from_snapshot).items():
        assert weight.dtype == torch.float32 and weight.shape[0] == NUM_ROWS
        assert torch.equal(weight, weights_of(plain)[name])
    pipeline.reset()
    dmp.eval()
    features = [name for t in scenario.tables for name in t.features]
    assert torch.equal(every_row(dmp.module.ebc, features), every_row(plain, features))
    if dmp.module.ebc.host_group.size() == 1 and not scenario.is_sequence:  # pools are sums in the same order
        for batch in (one for one in batches if one.features.stride()):  # TorchRec's has no answer to empty ones
            with torch.no_grad():
                ours, theirs = dmp.module.ebc(batch.features).wait(), plain(batch.features)
            assert ours.keys() == theirs.keys()
            for name in ours.keys():  # noqa: SIM118 - a KeyedTensor
                assert torch.equal(ours[name], theirs[name]), name
    return weights_of(plain)


@pytest.mark.parametrize(
    ("scenario", "world_size"),
    [
        (replace(BAGS, tables=TYPED), 2),
        (replace(BAGS, tables=ROW_WISE), 3),
        (replace(BAGS, tables=ROW_WISE), 1),
        (SEQUENCES, 2),
        (SEQUENCES, 1),
    ],
)
def test_rows_are_what_the_model_reads(pools: RankPools, tmp_path: Path, scenario: Scenario, world_size: int) -> None:
    first, *others = pools[world_size].run(trained_and_converted, scenario, tmp_path)
    assert all(torch.equal(one[name], weight) for one in others for name, weight in first.items())


# ---- unsharded -------------------------------------------------------------------------------------------------------

SMALL_IDS = {
    "u": [0, 3, 3, 49, 7],
    "i": [5, 1, 1],
    "w": [12, 7],
}


def unsharded(*, is_weighted: bool = False, extra: tuple[int, ...] = ()) -> HashEmbeddingBagCollection:
    """One batch was trained."""
    configs = [
        HashEmbeddingBagConfig(10**9, 6, "user", feature_names=["u"], initializer=Normal(0.0, 0.1), seed=4),
        HashEmbeddingBagConfig(10**9, 3, "item", feature_names=["i", "w"], init_fn=lambda rows: rows.normal_()),
    ]
    if not is_weighted:
        configs[1].pooling = PoolingType.MEAN
    collection = HashEmbeddingBagCollection(configs, is_weighted=is_weighted)
    apply_optimizer_in_backward(torch.optim.Adagrad, collection.parameters(), {"lr": 0.1})
    trained = batch_of(SMALL_IDS | {"u": [*SMALL_IDS["u"], *extra]})
    collection(trained).values().square().sum().backward()
    return collection.eval()


def batch_of(ids: dict[str, list[int]]) -> KeyedJaggedTensor:
    """Two bags a feature: all but the last id, and that."""
    values = torch.tensor([i for name in "uiw" for i in ids[name]])
    lengths = torch.tensor([n for name in "uiw" for n in (len(ids[name]) - 1, 1)])
    return KeyedJaggedTensor(list("uiw"), values, weights=torch.linspace(0.3, 2, len(values)), lengths=lengths)


@pytest.mark.parametrize("is_weighted", [False, True])
def test_an_unsharded_collection(is_weighted: bool) -> None:
    collection = unsharded(is_weighted=is_weighted)
    plain = checkpoint.to_embedding_bag_collection(collection, num_embeddings={"user": 50, "item": 60})
    assert type(plain) is EmbeddingBagCollection and plain.is_weighted() is is_weighted
    assert [(c.num_embeddings, c.name) for c in plain.embedding_bag_configs()] == [(50, "user"), (60, "item")]
    assert collection.embedding_bag_configs()[0].num_embeddings == 10**9
    ids = {"u": [*range(50)], "i": [*range(60)], "w": [59, 0, 1]}
    for batch in (batch_of(ids), batch_of(SMALL_IDS)):
        assert torch.equal(plain(batch).values(), collection(batch).values())
    only = checkpoint.to_embedding_bag_collection(
        collection, [EmbeddingBagConfig(name="user", num_embeddings=50, embedding_dim=6, feature_names=["v"])]
    )
    assert torch.equal(only.embedding_bags["user"].weight, plain.embedding_bags["user"].weight)


def test_an_unsharded_collection_of_sequences() -> None:
    collection = HashEmbeddingCollection([HashEmbeddingConfig(50, 4, "user", feature_names=["u"])], need_indices=True)
    plain = checkpoint.to_embedding_collection(collection)
    assert type(plain) is EmbeddingCollection and plain.need_indices()
    batch = KeyedJaggedTensor(["u"], torch.arange(50), lengths=torch.tensor([50]))
    assert torch.equal(plain(batch)["u"].values(), collection.eval()(batch)["u"].values())


def test_ids_without_a_place_are_refused() -> None:
    with pytest.raises(ConfigError, match="table 'user': 1 ids are no rows of a plain table of 49, such as 49"):
        checkpoint.to_embedding_bag_collection(unsharded(), num_embeddings={"user": 49, "item": 60})
    with pytest.raises(ConfigError, match="table 'user': 3 ids are no rows of a plain table of 50, such as -"):
        checkpoint.to_embedding_bag_collection(
            unsharded(extra=(-1, -(2**63), 50)), num_embeddings={"user": 50, "item": 60}
        )


def refused_on_all_ranks(scenario: Scenario) -> str:
    dmp, _ = build(scenario)
    checkpoint.import_rows(dmp, "user", torch.tensor([-5, 3, 99, 2**40]), torch.ones((4, 8)))
    with pytest.raises(ConfigError) as caught:
        plain_of(scenario, dmp.module.ebc)
    return str(caught.value)


def test_all_ranks_refuse_what_one_has(pools: RankPools) -> None:
    one, two = pools[2].run(refused_on_all_ranks, BAGS)
    assert one == two and "table 'user': 3 ids are no rows of a plain table of 60, such as " in one


# ---- snapshots -------------------------------------------------------------------------------------------------------


def config(name: str = "user", dim: int = 4, rows: int = 30, **more: Any) -> EmbeddingBagConfig:
    return EmbeddingBagConfig(name=name, num_embeddings=rows, embedding_dim=dim, feature_names=["f"], **more)


@pytest.mark.parametrize(
    "kind",
    [
        {"initializer": Uniform(-0.5, 0.25)},
        {"initializer": Normal(-1.0, 1e-20)},
        {"initializer": Constant(3.5)},
        {"init_fn": lambda rows: rows.normal_()},
    ],
)
def test_ids_without_a_row_have_the_initial_row_of_the_snapshot(tmp_path: Path, kind: dict[str, Any]) -> None:
    hashed = HashEmbeddingBagCollection([HashEmbeddingBagConfig(30, 4, "user", feature_names=["f"], seed=5, **kind)])
    initializer: Any = hashed.table_configs[0].initializer
    banks = {"c0": {"user": torch.from_numpy(initializer.rows)}} if "init_fn" in kind else None
    ids, weights = torch.tensor([2, 29]), torch.ones((2, 4), dtype=torch.bfloat16)
    table = table_in(tmp_path, "user", ids, weights, initializer=repr(initializer), num_ranks=2)
    plain = checkpoint.to_embedding_bag_collection(snapshot_of(tmp_path, [table], banks=banks), [config()])
    expected = hashed.bag_of("user").read(torch.arange(30)).to(torch.bfloat16).float()
    expected[ids] = 1
    assert torch.equal(plain.embedding_bags["user"].weight, expected)


@pytest.mark.parametrize(
    ("initializer", "message"),
    [
        ("Bank()", "table 'user' has an init_fn, whose rows the snapshot does not have. Pass the collection"),
        ("Uniform(low=print())", "are not known to this version"),
        ("Uniform(height=1)", "are not known to this version"),
        ("Gamma(k=1)", r"table 'user': initial rows 'Gamma\(k=1\)' are not known to this version. Pass the collection"),
    ],
)
def test_initial_rows_that_cannot_be_known_are_refused(tmp_path: Path, initializer: str, message: str) -> None:
    table = table_in(tmp_path, "user", *rows_of(9, 4), initializer=initializer)
    snapshot_of(tmp_path, [table], banks={"c0": {"item": torch.ones((2, 4))}})
    with pytest.raises(ConfigError, match=message):
        checkpoint.to_embedding_bag_collection(tmp_path, [config()])


def test_what_cannot_be_converted_is_refused(tmp_path: Path) -> None:
    ids, weights = torch.arange(30), rows_of(30, 4)[1]
    tables = [table_in(tmp_path, n, ids, weights) for n in ("user", "item")]
    snapshot_of(tmp_path, tables)
    convert = checkpoint.to_embedding_bag_collection
    assert torch.equal(convert(tmp_path, [config()]).embedding_bags["user"].weight, weights)
    for arguments, message in (
        ((tmp_path, [config(dim=5)]), "table 'user': embedding_dim is 5 in its config and 4 in what is exported"),
        ((tmp_path, [config("word")]), r"no table 'word' in the snapshot. Tables: \['item', 'user'\]"),
        ((tmp_path,), "tables=None: a snapshot has no EmbeddingBagConfigs. Pass those of the tables"),
        ((nn.Linear(2, 2), [config()]), "source has type Linear. Pass a hashed collection"),
        ((unsharded(), [config("word")]), r"no table 'word' in the collection. Tables: \['item', 'user'\]"),
        (
            (HashEmbeddingCollection([HashEmbeddingConfig(5, 4, "user")]),),
            "tables=None: HashEmbeddingCollection has",
        ),
    ):
        with pytest.raises(ConfigError, match=message):
            convert(*arguments)
    with pytest.raises(ConfigError, match=r"num_embeddings: there is no table 'word'. Tables: \['user'\]"):
        convert(tmp_path, [config()], num_embeddings={"word": 5})
    with pytest.raises(CapacityError, match="most are of table 'user', 17,000,000,000,000,000. Pass num_embeddings"):
        convert(tmp_path, [config(rows=10**15)])
    (file,) = (tmp_path / "rows" / "user").iterdir()
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(StateError, match="00000.rows is damaged"):
        convert(tmp_path, [config()])
