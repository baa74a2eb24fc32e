"""Criteo's click logs (Kaggle 2014 and the terabyte set): a text file, read as it is used and never held in memory.

One impression a line, 40 fields with a tab between them: the label 0 or 1; 13 integers; 26 categories, each a 32-bit
number in hexadecimal. Integers and categories may be missing: an empty field.
"""

from __future__ import annotations

import gzip
import os
import re
import zlib
from collections.abc import Generator, Iterable, Iterator
from contextlib import closing
from itertools import islice
from pathlib import Path
from typing import BinaryIO, cast

import numpy as np
import torch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from examples.little_demo.batch import Batch, DataError, DataSet, Share, TableFacts
from examples.little_demo.hashing import mix

NUM_INTEGERS = 13
NUM_CATEGORIES = 26
FEATURES = tuple(f"c{number}" for number in range(1, NUM_CATEGORIES + 1))
HELD_OUT_EVERY = 10
"""Of so many lines the last is held out."""
SAMPLE_LINES = 20_000
"""Lines that are looked at before training, to size the tables."""
WHOLE_ON_DEVICE = 1_000
"""Tables of at most so many rows stay on the device."""

INTEGER, CATEGORY = re.compile(rb"(-?\d{1,18})?"), re.compile(rb"[0-9a-fA-F]{0,8}")
LINE = re.compile(
    rb"[01]" + (rb"\t(?:%b)" % INTEGER.pattern) * NUM_INTEGERS + (rb"\t%b" % CATEGORY.pattern) * NUM_CATEGORIES
)
"""All of a valid line: one match is quicker than 40 checks."""

Line = tuple[int, bytes]
"""Its number, from 1 on, and its bytes without the line end."""


class Criteo(DataSet):
    """Nine lines in ten to train on, each tenth held out.

    An id is the hash of (column, value); a missing value is a value of its own. An integer n becomes log(1 + n); what
    is missing or negative becomes 0.

    Every reader goes through the whole file but parses its own lines only. If the last batch has fewer lines than
    there are ranks, so that some would have none, it is left out.
    """

    name = "criteo"
    unit = "impressions"
    features = FEATURES
    num_dense = NUM_INTEGERS
    num_workers = 2

    def __init__(self, path: Path, *, sample_lines: int = SAMPLE_LINES) -> None:
        """Look at the beginning of the file.

        Args:
            path: Of the file; gzip if its name ends in ``.gz``.
            sample_lines: How many lines to look at.

        Raises:
            DataError: The file cannot be read, has no lines, or one of the first lines is malformed.
        """
        self.path = path
        with closing(self._lines()) as lines:
            sample = list(islice(lines, sample_lines))
        if not sample:
            raise DataError(f"{path}: empty. A Criteo file has one impression a line.")
        self._ids_NF = parse(sample, path)[1]
        self._num_lines = len(sample)
        if len(sample) == sample_lines:  # there may be more: as many as fit the bytes of the file
            read = _packed_size([text for _, text in sample], is_packed=path.suffix == ".gz")
            self._num_lines = max(sample_lines, round(sample_lines * os.path.getsize(path) / read))

    def tables(self) -> list[TableFacts]:
        tables = []
        for feature, ids in zip(FEATURES, self._ids_NF.T.copy(), strict=True):
            planned = expected_rows(ids, self._num_lines)
            tables.append(
                TableFacts(
                    feature=feature,
                    ids=torch.from_numpy(ids),
                    is_sample=True,
                    planned_rows=planned,
                    is_cached=planned > WHOLE_ON_DEVICE,
                )
            )
        return tables

    def describe(self) -> str:
        return f"{self.path.name}, about {self._num_lines:,} impressions, one in {HELD_OUT_EVERY} held out"

    def train_batches(self, share: Share, epoch: int) -> Iterator[Batch]:
        return self._batches(share, is_held_out=False)

    def test_batches(self, share: Share) -> Iterator[Batch]:
        return self._batches(share, is_held_out=True)

    def _batches(self, share: Share, *, is_held_out: bool) -> Iterator[Batch]:
        """One rank's rows of every ``step``-th batch of one part of the file."""
        with closing(self._lines()) as lines:
            part = (line for line in lines if (line[0] % HELD_OUT_EVERY == 0) == is_held_out)
            number = 0
            while len(block := list(islice(part, share.batch_size))) >= share.world_size:
                if number % share.step == share.first:
                    yield make_batch(*parse(block[share.rank :: share.world_size], self.path))
                number += 1
            if number == 0:
                which = "held out" if is_held_out else "to train on"
                raise DataError(
                    f"{self.path}: {len(block)} lines {which}, but each of {share.world_size} ranks needs one. "
                    f"Of {HELD_OUT_EVERY} lines one is held out: the file needs more lines, or fewer --ranks."
                )

    def _lines(self) -> Generator[Line, None, None]:
        """The lines in turn.

        Raises:
            DataError: The file cannot be read to its end.
        """
        number = 0
        try:
            packed = self.path.suffix == ".gz"
            with cast(BinaryIO, gzip.open(self.path)) if packed else self.path.open("rb") as file:
                for number, text in enumerate(file, 1):
                    yield number, text.rstrip(b"\r\n")
        except (OSError, EOFError, zlib.error) as error:  # a gzip file that was cut off or damaged, among others
            reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
            raise DataError(f"{self.path}, after line {number:,}: cannot be read: {reason}") from error


def parse(lines: Iterable[Line], path: Path) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Labels, ids and dense features of some lines.

    Args:
        lines: N of them.
        path: Named in errors.

    Returns:
        float32 [N] labels, int64 [N, 26] ids, float32 [N, 13] dense features.

    Raises:
        DataError: A line is malformed.
    """
    rows = []
    for number, text in lines:
        if LINE.fullmatch(text) is None:
            raise DataError(f"{path}, line {number:,}: {what_is_wrong(text)}")
        rows.append(text.split(b"\t"))
    labels = np.array([row[0] == b"1" for row in rows], np.float32)
    integers = np.array([[int(text or b"0") for text in row[1 : 1 + NUM_INTEGERS]] for row in rows], np.float64)
    # No category is as large as 2^32, which therefore stands for a missing one.
    values = np.array([[int(text, 16) if text else 1 << 32 for text in row[1 + NUM_INTEGERS :]] for row in rows])
    columns = np.arange(1, NUM_CATEGORIES + 1, dtype=np.uint64) << np.uint64(33)
    ids = mix(columns | values.astype(np.uint64)).view(np.int64)
    return labels, ids, np.log1p(np.maximum(integers, 0.0)).astype(np.float32)


def what_is_wrong(text: bytes) -> str:
    """Why a line is malformed."""
    fields = text.split(b"\t")
    expected = 1 + NUM_INTEGERS + NUM_CATEGORIES
    if len(fields) != expected:
        return (
            f"{len(fields)} fields. {expected} with a tab between them are expected: the label, {NUM_INTEGERS} "
            f"integers, {NUM_CATEGORIES} categories. (Criteo's own test.txt has no labels: use train.txt.)"
        )
    if fields[0] not in (b"0", b"1"):
        return f"field 1 is {_shown(fields[0])}. The label is 0 or 1."
    for number, field in enumerate(fields[1:], 2):
        if number <= 1 + NUM_INTEGERS:
            if INTEGER.fullmatch(field) is None:
                return (
                    f"field {number} is {_shown(field)}. A whole number of at most 18 digits is expected, or nothing."
                )
        elif CATEGORY.fullmatch(field) is None:
            return f"field {number} is {_shown(field)}. At most 8 hexadecimal digits are expected, or nothing."
    raise ValueError("the line is well formed")


def make_batch(labels: np.ndarray, ids: np.ndarray, dense: np.ndarray) -> Batch:
    """The batch of what `parse` returns: one id a feature and row."""
    values = torch.from_numpy(np.ascontiguousarray(ids.T)).view(-1)
    kjt = KeyedJaggedTensor(keys=list(FEATURES), values=values, lengths=torch.ones(values.shape[0], dtype=torch.int64))
    return Batch(torch.from_numpy(dense), kjt, torch.from_numpy(labels))


def expected_rows(ids: np.ndarray, num_lines: int) -> int:
    """How many different ids a column of the whole file will have, judged by a sample. It is only an estimate.

    Source: Heaps' law, distinct = c * lines^b; both halves of the sample give b.

    Args:
        ids: int64 [N], the first ids of the column.
        num_lines: Of the whole file.
    """
    distinct = len(np.unique(ids))
    exponent = np.log2(distinct / len(np.unique(ids[: (len(ids) + 1) // 2])))
    return int(np.ceil(distinct * (num_lines / len(ids)) ** min(1.0, float(exponent))))


def _packed_size(lines: list[bytes], *, is_packed: bool) -> int:
    """Bytes that the lines take in the file."""
    text = b"\n".join(lines) + b"\n"
    return len(zlib.compress(text)) if is_packed else len(text)


def _shown(field: bytes) -> str:
    """The field for a message: the beginning will do."""
    text = field.decode("ascii", "backslashreplace")
    return repr(text if len(text) <= 40 else text[:40] + " ..")
