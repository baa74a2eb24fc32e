"""`freeze` and `load`: the rows of evaluation, in memory and in files, in little memory; refusals leave nothing."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import nn
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor

from hybridrec import ConfigError, IdError
from hybridrec.inference import FreezeReport, freeze, load
from tests.inference.collections import batch, hostile_batch, pooled, sequences


@pytest.mark.parametrize("is_weighted", [False, True])
@pytest.mark.parametrize("on_disk", [False, True])
def test_fp32_pools_are_those_of_evaluation_bit_for_bit(tmp_path: Path, is_weighted: bool, on_disk: bool) -> None:
    collection = pooled(is_weighted)
    path = tmp_path / "frozen" if on_disk else None
    frozen = freeze(collection, path, dtype="fp32", chunk_rows=3)
    for module in [frozen, load(path)] if on_disk else [frozen]:
        for features in (batch(50, is_weighted=is_weighted), hostile_batch(is_weighted=is_weighted)):
            want, got = collection(features), module(features)
            assert torch.equal(got.values(), want.values())
            assert (got.keys(), got.length_per_key()) == (want.keys(), want.length_per_key())
        assert str(module.report) == str(frozen.report)
        assert [c.name for c in module.embedding_bag_configs()] == ["user", "item", "word"]
        assert module.is_weighted() == is_weighted and module.device == torch.device("cpu")


@pytest.mark.parametrize("need_indices", [False, True])
def test_fp32_sequences_are_those_of_evaluation_bit_for_bit(tmp_path: Path, need_indices: bool) -> None:
    collection = sequences(need_indices)
    freeze(collection, tmp_path / "frozen", dtype="fp32", chunk_rows=3)
    module = load(tmp_path / "frozen")
    features = hostile_batch()
    want, got = collection(features), module(features)
    assert list(got) == list(want)
    for name in want:
        assert torch.equal(got[name].values(), want[name].values())
        assert torch.equal(got[name].lengths(), want[name].lengths())
        assert (got[name].weights_or_none() is not None) == need_indices
        if need_indices:
            assert torch.equal(got[name].weights(), want[name].weights())
    assert module.need_indices() == need_indices and module.embedding_dim() == 4
    assert module.embedding_names_by_table() == collection.embedding_names_by_table()


@pytest.mark.parametrize("dtype", ["fp16", "int8", "int4"])
def test_known_rows_are_within_the_reported_error_and_unknown_ones_exact(dtype: str) -> None:
    collection = pooled()
    frozen = freeze(collection, dtype=dtype)
    for t, config in enumerate(collection.table_configs):
        table = frozen.tables.tables[t].table
        ids = table.ids[:-1]
        exact = collection.bag_of(config.name).read(ids)
        errors = (table(ids) - exact).abs()
        report = frozen.report.tables[t]
        assert report.max_abs_error == errors.max() and report.mean_abs_error == pytest.approx(float(errors.mean()))
        width = exact.amax(1) - exact.amin(1)
        bound = {"fp16": exact.abs().amax(1) / 2048, "int8": width / 510, "int4": width / 30}[dtype]
        assert (errors.amax(1) <= bound * 1.001 + 1e-6).all() and (errors.max() > 0 or config.embedding_dim == 1)
        unknown = torch.tensor([123456789, -(2**40), 2**63 - 2])
        assert torch.equal(table(unknown), collection.bag_of(config.name).read(unknown))


def test_unknown_ids_read_zeros_but_count_in_a_mean() -> None:
    collection = pooled()
    frozen = freeze(collection, dtype="fp32", unknown_row="zero")
    known = int(frozen.tables.tables[1].table.ids[0])
    features = KeyedJaggedTensor(
        ["u", "v", "i", "w"],
        torch.tensor([999, known, 888, 777]),
        lengths=torch.tensor([1, 0, 0, 0, 2, 0, 1, 0]),
    )
    pools = frozen(features).to_dict()
    assert torch.equal(pools["u"], torch.zeros(2, 3)) and torch.equal(pools["w"], torch.zeros(2, 1))
    row = collection.bag_of("item").read(torch.tensor([known]))
    assert torch.equal(pools["i@item"], torch.cat([row / 2, torch.zeros(1, 8)]))
    seen = KeyedJaggedTensor(["u", "v", "i", "w"], torch.tensor([known]), lengths=torch.tensor([0, 0, 1, 0]))
    assert torch.equal(frozen(seen).values(), collection(seen).values())


def test_training_goes_on_and_does_not_reach_what_was_frozen() -> None:
    collection = pooled()
    features = batch(60)
    frozen = freeze(collection, dtype="fp32")
    before = collection(features).values()
    collection.train()
    collection(features).values().sum().backward()
    assert torch.equal(frozen(features).values(), before)
    assert not torch.equal(collection.eval()(features).values(), before)


def test_tables_without_rows_and_batches_without_bags() -> None:
    collection = pooled(steps=0)
    for unknown_row in ("initial", "zero"):
        frozen = freeze(collection, dtype="int8", unknown_row=unknown_row)
        assert [table.rows for table in frozen.report.tables] == [0, 0, 0]
        pools = frozen(hostile_batch()).values()
        assert torch.equal(pools, collection(hostile_batch()).values() if unknown_row == "initial" else pools * 0)
        assert frozen(hostile_batch(0)).values().shape == (0, 16)
        empty = KeyedJaggedTensor(
            ["u", "v", "i", "w"], torch.empty(0, dtype=torch.int64), lengths=torch.zeros(8).long()
        )
        assert torch.equal(frozen(empty).values(), torch.zeros(2, 16))


def test_a_report_counts_every_byte() -> None:
    report = freeze(pooled(), dtype={"user": "int4", "item": "int8", "word": "fp16"}).report
    user, item, word = report.tables
    assert (user.dtype, user.bytes) == ("int4", (user.rows + 1) * (8 + 2 + 8))
    assert (item.dtype, item.bytes) == ("int8", (item.rows + 1) * (8 + 8 + 8))
    assert (word.dtype, word.bytes_per_row) == ("fp16", 8 + 2)
    assert report.bytes == user.bytes + item.bytes + word.bytes
    assert f"'item': {item.rows} rows x 8 as int8, {item.bytes} bytes (24.0 a row, 40 as fp32)" in str(report)
    assert FreezeReport.from_json(report.to_json()) == report


REFUSED = {
    "dtype": ({"dtype": "int2"}, "dtype='int2' is unknown"),
    "dtype of a table": (
        {"dtype": {"user": "int8", "item": "x", "word": "int8"}},
        "table 'item': dtype='x' is unknown",
    ),
    "tables": ({"dtype": {"user": "int8"}}, "dtype names the tables 'user'; the collection has 'user', 'item', 'word'"),
    "unknown row": ({"unknown_row": "mean"}, "unknown_row='mean'. Accepted: 'initial' or 'zero'"),
    "chunk": ({"chunk_rows": 0}, "chunk_rows=0"),
}


@pytest.mark.parametrize(("arguments", "message"), REFUSED.values(), ids=REFUSED)
def test_wrong_arguments_leave_nothing(tmp_path: Path, arguments: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        freeze(pooled(steps=1), tmp_path / "frozen", **arguments)
    assert list(tmp_path.iterdir()) == []


def test_rows_that_a_dtype_cannot_hold_are_named_and_nothing_is_left(tmp_path: Path) -> None:
    collection = pooled(steps=1)
    bag = collection.bag_of("item")
    id_ = sorted(bag._row_of_id)[1]
    bag._rows[bag._row_of_id[id_], 2] = float("inf")
    for dtype, accepted in (("int8", False), ("int4", False), ("fp16", True), ("fp32", True)):
        if accepted:
            assert float(freeze(collection, dtype=dtype).tables.tables[1].table(torch.tensor([id_]))[0, 2]) == float(
                "inf"
            )
            continue
        with pytest.raises(ConfigError, match=rf"table 'item': the row of id {id_} cannot be stored as {dtype}: .*inf"):
            freeze(collection, tmp_path / "frozen", dtype=dtype)
    assert list(tmp_path.iterdir()) == []


def test_what_is_no_hashed_collection_is_refused() -> None:
    for module in (nn.Linear(1, 1), EmbeddingBagCollection([EmbeddingBagConfig(3, 4, "t", feature_names=["f"])])):
        with pytest.raises(ConfigError, match=f"module has type {type(module).__name__}"):
            freeze(module)


def test_batches_that_cannot_be_served_are_refused() -> None:
    frozen = freeze(pooled(steps=1))
    with pytest.raises(IdError, match="the batch lacks 'w'"):
        frozen(KeyedJaggedTensor(["u", "v", "i"], torch.tensor([1]), lengths=torch.tensor([1, 0, 0])))
    variable = KeyedJaggedTensor(
        ["u", "v", "i", "w"],
        torch.tensor([1]),
        lengths=torch.tensor([1, 0, 0, 0]),
        stride_per_key_per_rank=[[1], [1], [1], [1]],
        inverse_indices=(["u", "v", "i", "w"], torch.zeros((4, 2), dtype=torch.int64)),
    )
    with pytest.raises(IdError, match="the batch is variable"):
        frozen(variable)


def test_damaged_files_are_named(tmp_path: Path) -> None:
    path = tmp_path / "frozen"
    freeze(pooled(steps=1), path)
    with pytest.raises(ConfigError, match="exists"):
        freeze(pooled(steps=1), path)
    codes = path / "1.codes"
    whole = codes.read_bytes()
    codes.write_bytes(whole[:-1])
    with pytest.raises(ConfigError, match=rf"'{codes}' has {len(whole) - 1} bytes; it should have {len(whole)}"):
        load(path)
    codes.unlink()
    with pytest.raises(ConfigError, match="1.codes' is missing"):
        load(path)
    (path / "frozen.json").write_text('{"format": "hybridrec.frozen", "version": 99}')
    with pytest.raises(ConfigError, match="format and version .*99"):
        load(path)
    with pytest.raises(ConfigError, match="cannot be read"):
        load(tmp_path)


def test_a_damaged_manifest_is_named(tmp_path: Path) -> None:
    freeze(pooled(steps=1), tmp_path / "frozen")
    manifest = tmp_path / "frozen" / "frozen.json"
    whole = manifest.read_text()
    content = json.loads(whole)
    short = dict(content)
    del short["tables"][0]["seed"]
    altered = [
        json.dumps(short),
        whole.replace('"rows": ', '"rows": 1'),
        whole.replace("item", "thing"),
        "[]",
        "null",
        "3",
    ]
    for text in altered:
        assert text != whole
        manifest.write_text(text)
        with pytest.raises(ConfigError, match=r"frozen.json' is (damaged|no manifest)"):
            load(tmp_path / "frozen")
    manifest.write_text(whole)
    load(tmp_path / "frozen")


def test_nothing_of_a_user_is_removed(tmp_path: Path) -> None:
    beside = tmp_path / "frozen.partial"
    beside.mkdir()
    (beside / "notes").write_text("dear")
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    freeze(pooled(steps=1), tmp_path / "frozen")
    with pytest.raises(ConfigError, match="link' exists"):
        freeze(pooled(steps=1), tmp_path / "link")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["frozen", "frozen.partial", "link"]
    assert (beside / "notes").read_text() == "dear"


def test_a_loaded_collection_does_not_write_into_its_files(tmp_path: Path) -> None:
    frozen = freeze(pooled(), tmp_path / "frozen", dtype="fp32")
    before = (tmp_path / "frozen" / "0.codes").read_bytes()
    frozen.tables.tables[0].table.codes.fill_(7)
    assert (tmp_path / "frozen" / "0.codes").read_bytes() == before
