"""Criteo files: what lines become, how ranks and workers share them, and what is said of malformed ones."""

from __future__ import annotations

import gzip
import math
import random
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from examples.little_demo import criteo
from examples.little_demo.batch import Batch, DataError, Share, load
from examples.little_demo.criteo import FEATURES, Criteo

MASK = 2**64 - 1


def line(number: int = 0, *, label: str = "0", integers: list[str] | None = None, categories: str = "") -> str:
    """A valid line; categories that are not given are told apart by the line's number."""
    given = categories.split() or [f"{number:x}{column:02x}" for column in range(26)]
    return "\t".join([label, *(integers or ["1"] * 13), *given])


def write(path: Path, lines: list[str]) -> Path:
    opened = gzip.open(path, "wt") if path.suffix == ".gz" else path.open("w")
    with opened as file:
        file.writelines(f"{text}\n" for text in lines)
    return path


def expected_id(column: int, value: int) -> int:
    """splitmix64 in Python's unbounded integers; value 2^32 is the missing one."""
    z = ((column << 33 | value) + 0x9E3779B97F4A7C15) & MASK
    z = ((z ^ z >> 30) * 0xBF58476D1CE4E5B9) & MASK
    z = ((z ^ z >> 27) * 0x94D049BB133111EB) & MASK
    z ^= z >> 31
    return z - 2**64 if z >= 2**63 else z


def ids_of(batch: Batch, feature: str) -> list[int]:
    return batch.ids[feature].values().tolist()


def numbers(batches: Iterator[Batch]) -> list[list[float]]:
    """The lines of batches, by their first integer."""
    return [batch.dense[:, 0].exp().sub(1).round().tolist() for batch in batches]


def test_a_line_becomes_label_ids_and_logarithms(tmp_path: Path) -> None:
    integers = ["", "-1", "0", "5", "-3", "123456789", *["2"] * 7]
    text = line(label="1", integers=integers)
    text = text.rsplit("\t", 2)[0] + "\t\tFfFfFfFf"  # category 25 is missing
    (batch,) = Criteo(write(tmp_path / "t.txt", [text])).train_batches(Share(batch_size=4), 0)
    assert batch.labels.tolist() == [1.0]
    assert batch.labels.dtype == batch.dense.dtype == torch.float32
    logs = [0.0, 0.0, 0.0, math.log(6), 0.0, math.log(123456790), *[math.log(3)] * 7]
    assert batch.dense.tolist() == [pytest.approx(logs, rel=1e-6)]
    assert tuple(batch.ids.keys()) == FEATURES
    for column in range(1, 25):
        assert ids_of(batch, f"c{column}") == [expected_id(column, column - 1)]
    assert ids_of(batch, "c25") == [expected_id(25, 2**32)]
    assert ids_of(batch, "c26") == [expected_id(26, 2**32 - 1)]


def test_a_value_has_another_id_in_another_column(tmp_path: Path) -> None:
    path = write(tmp_path / "t.txt", [line(categories="0a " * 26), line(categories="0A " * 26)])
    (batch,) = Criteo(path).train_batches(Share(batch_size=4), 0)
    ids = batch.ids.values().view(26, 2)
    assert torch.equal(ids[:, 0], ids[:, 1])  # hexadecimal digits, not text
    assert len(torch.unique(ids)) == 26


@pytest.mark.parametrize("name", ["t.txt", "t.tsv.gz"])
@pytest.mark.parametrize(("world_size", "workers"), [(1, 0), (2, 0), (3, 2)])
def test_every_line_is_read_once_by_one_rank(name: str, world_size: int, workers: int, tmp_path: Path) -> None:
    path = write(tmp_path / name, [line(n, integers=[str(n), *["0"] * 12]) for n in range(1, 101)])
    data = Criteo(path)

    def of_ranks(epochs: range | None) -> list[list[list[float]]]:
        shares = [Share(batch_size=15, rank=rank, world_size=world_size) for rank in range(world_size)]
        return [numbers(load(data, s, epochs=epochs, num_workers=workers, pin_memory=False)) for s in shares]

    train, test = of_ranks(range(1)), of_ranks(None)
    assert [n for n in range(1, 101) if n % 10] == sorted(n for rank in train for batch in rank for n in batch)
    assert list(range(10, 101, 10)) == sorted(n for rank in test for batch in rank for n in batch)
    assert {len(rank) for rank in train} == {6}
    # A batch is 15 lines in a row, dealt to the ranks in turn.
    first = [n for n in range(1, 17) if n % 10]
    assert [train[rank][0] for rank in range(world_size)] == [first[rank::world_size] for rank in range(world_size)]
    assert train[0][1][0] == 17.0


def test_a_last_batch_too_small_for_the_ranks_is_left_out(tmp_path: Path) -> None:
    data = Criteo(write(tmp_path / "t.txt", [line(n, integers=[str(n), *["0"] * 12]) for n in range(1, 10)]))
    parts = [numbers(data.train_batches(Share(batch_size=4, rank=r, world_size=2), 0)) for r in range(2)]
    assert parts == [[[1, 3], [5, 7]], [[2, 4], [6, 8]]]  # of line 9 rank 1 would have nothing


def test_every_epoch_reads_the_file_again(tmp_path: Path) -> None:
    data = Criteo(write(tmp_path / "t.txt", [line(n) for n in range(9)]))
    batches = load(data, Share(batch_size=4), epochs=range(3), num_workers=0, pin_memory=False)
    assert [len(batch.labels) for batch in batches] == [4, 4, 1] * 3


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "1 fields. 40 with a tab"),
        (line() + "\t", "41 fields. 40 with a tab"),
        (line().partition("\t")[2], "39 fields.*use train.txt"),
        (line(label="2"), "field 1 is '2'. The label is 0 or 1"),
        (line(label=""), "field 1 is ''. The label is 0 or 1"),
        (line(integers=["1.5", *["0"] * 12]), "field 2 is '1.5'. A whole number of at most 18 digits"),
        (line(integers=[*["0"] * 12, "9" * 19]), "field 14 is '9999999999999999999'. A whole number"),
        (line(categories="xyz " + "0 " * 25), "field 15 is 'xyz'. At most 8 hexadecimal digits"),
        (line(categories="0 " * 25 + "123456789"), "field 40 is '123456789'. At most 8 hexadecimal digits"),
        (line(categories="0x1f " + "0 " * 25), "field 15 is '0x1f'. At most 8 hexadecimal digits"),
        (line(categories="-1 " + "0 " * 25), "field 15 is '-1'"),
        (line(categories="é" * 99 + " 0" * 25), r"field 15 is '\\\\xc3.* \.\.'"),
    ],
)
def test_malformed_lines_are_named(text: str, message: str, tmp_path: Path) -> None:
    path = write(tmp_path / "t.txt", [line(), line(), text, line()])
    with pytest.raises(DataError, match=rf"t\.txt, line 3: {message}"):
        Criteo(path)
    data = Criteo(path, sample_lines=2)  # the sample is fine
    with pytest.raises(DataError, match=rf"t\.txt, line 3: {message}"):
        list(data.train_batches(Share(batch_size=4), 0))


def test_a_malformed_line_is_told_through_worker_processes(tmp_path: Path) -> None:
    data = Criteo(write(tmp_path / "t.txt", [line(), "?", line()]), sample_lines=1)
    with pytest.raises(DataError, match=r"^[^\n]*t\.txt, line 2: 1 fields"):
        list(load(data, Share(batch_size=2), epochs=range(1), num_workers=2, pin_memory=False))


def test_files_that_cannot_be_used_are_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"empty\.txt: empty"):
        Criteo(write(tmp_path / "empty.txt", []))
    with pytest.raises(DataError, match=r"none\.txt, after line 0: cannot be read: No such file"):
        Criteo(tmp_path / "none.txt")
    plain = write(tmp_path / "t.txt", [line()])
    with pytest.raises(DataError, match=r"renamed\.gz, after line 0: cannot be read: Not a gzipped file"):
        Criteo(plain.rename(tmp_path / "renamed.gz"))
    with pytest.raises(DataError, match="0 lines held out, but each of 1 ranks needs one"):
        list(Criteo(write(tmp_path / "t.txt", [line()] * 9)).test_batches(Share(batch_size=2)))


def test_a_cut_off_gzip_file_is_told_where_it_ends(tmp_path: Path) -> None:
    generator = random.Random(0)
    path = write(tmp_path / "t.gz", [line(generator.getrandbits(20)) for _ in range(4_000)])
    path.write_bytes(path.read_bytes()[:-1_000])
    data = Criteo(path, sample_lines=10)
    with pytest.raises(DataError, match=r"t\.gz, after line [\d,]+: cannot be read: Compressed file ended"):
        list(data.train_batches(Share(batch_size=256), 0))


def test_the_file_is_read_as_it_is_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = Criteo(write(tmp_path / "t.txt", [line(n) for n in range(500)]), sample_lines=10)
    parsed: list[int] = []
    parse = criteo.parse

    def counting(lines: list[criteo.Line], path: Path) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        parsed.extend(number for number, _ in lines)
        return parse(lines, path)

    monkeypatch.setattr(criteo, "parse", counting)
    batches = data.train_batches(Share(batch_size=16, rank=1, world_size=2, first=1, step=3), 0)
    next(batches)
    assert len(parsed) == 8  # its rows of its batch, nothing else
    assert parsed == [n for n in range(1, 100) if n % 10][16:32][1::2]


@pytest.mark.parametrize("name", ["t.txt", "t.gz"])
def test_sizes_are_judged_by_a_sample(name: str, tmp_path: Path) -> None:
    generator = random.Random(0)
    lines = [line(categories=f"{n:x} {generator.getrandbits(3):x} " + "7 " * 24) for n in range(4_000)]
    data = Criteo(write(tmp_path / name, lines), sample_lines=1_000)
    tables = {table.feature: table for table in data.tables()}
    assert tables["c1"].planned_rows == pytest.approx(4_000, rel=0.1)  # every line has a new id
    assert (tables["c2"].planned_rows, tables["c3"].planned_rows) == (8, 1)
    assert tables["c1"].is_cached and not tables["c2"].is_cached
    whole = {table.feature: table for table in Criteo(data.path).tables()}
    assert whole["c1"].planned_rows == 4_000
