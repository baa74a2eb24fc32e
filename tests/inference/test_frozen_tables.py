"""Lookups in one frozen table: an id reads its own row, its initial row or zeros, and never another id's."""

from __future__ import annotations

import inspect
import textwrap
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from hybridrec import Constant, HashEmbeddingBagConfig
from hybridrec.config import resolve_table
from hybridrec.inference import FrozenTable, frozen_tables
from hybridrec.inference.row_format import RowFormat, encode_rows

EXTREMES = [-(2**63), -(2**63) + 1, -2, -1, 0, 1, 2, 2**62, 2**63 - 2, 2**63 - 1]
KNOWN = {
    "some": [-(2**63) + 1, -1, 1, 7, 9, 2**62],
    "both ends": [-(2**63), 0, 2**63 - 1],
    "negative": [-9, -7, -5],
    "one": [42],
    "the last": [2**63 - 1],
    "none": [],
}


def make_table(
    known: list[int], row_format: RowFormat = RowFormat.FP32, *, has_initial_rows: bool = True
) -> FrozenTable:
    """Row k holds (k + 1, -(k + 1), k + 1); an initial row is 100 in every column."""
    config = resolve_table(HashEmbeddingBagConfig(10, 3, "t", initializer=Constant(100.0)))
    rows = torch.arange(1.0, len(known) + 1).unsqueeze(1) * torch.tensor([1.0, -1.0, 1.0])
    codes, scale_bias = (torch.cat([a, a.new_zeros((1, a.shape[1]))]) for a in encode_rows(rows, row_format))
    ids = torch.tensor([*known, frozen_tables.LAST_ID])
    return FrozenTable(
        config, row_format, ids=ids, codes=codes, scale_bias=scale_bias, has_initial_rows=has_initial_rows
    )


def check_lookup(known: list[int], *, has_initial_rows: bool, row_format: RowFormat = RowFormat.FP32) -> None:
    """Every known id, its neighbours, and the ends of int64."""
    table = make_table(known, row_format, has_initial_rows=has_initial_rows)
    asked = sorted({*EXTREMES, *(i + d for i in known for d in (-1, 0, 1) if -(2**63) <= i + d < 2**63)})
    asked = [*asked, *reversed(asked)]
    unknown = 100.0 if has_initial_rows else 0.0
    for id_, row in zip(asked, table(torch.tensor(asked)).tolist(), strict=True):
        k = known.index(id_) + 1 if id_ in known else None
        want = [unknown] * 3 if k is None else [k, -k, k]
        assert row == pytest.approx(want, rel=1e-3), f"id {id_} of {known}"


@pytest.mark.parametrize("row_format", RowFormat)
@pytest.mark.parametrize("has_initial_rows", [True, False])
@pytest.mark.parametrize("known", KNOWN.values(), ids=KNOWN)
def test_every_id_reads_its_own_row(known: list[int], has_initial_rows: bool, row_format: RowFormat) -> None:
    check_lookup(known, has_initial_rows=has_initial_rows, row_format=row_format)
    assert make_table(known)(torch.empty(0, dtype=torch.int64)).shape == (0, 3)


MUTANTS = {
    "no equality check": ("== ids_N", ">= ids_N"),
    "a neighbour's row": ("is_found, position_N, self.num_rows", "is_found, position_N, position_N - 1"),
    "the first row": ("is_found, position_N, self.num_rows", "is_found, position_N, 0"),
    "right instead of left": ("ids_N)  # <=", "ids_N, right=True).clamp(max=self.num_rows)  # <="),
    "found row overwritten": ("(number_N == self.num_rows)", "(number_N >= self.num_rows - 1)"),
    "another id's initial row": ("0, unknown_n, initial_nD", "0, unknown_n - 1, initial_nD"),
}


@pytest.mark.parametrize("old_new", MUTANTS.values(), ids=MUTANTS)
def test_a_wrong_lookup_is_seen(monkeypatch: pytest.MonkeyPatch, old_new: tuple[str, str]) -> None:
    source = textwrap.dedent(inspect.getsource(FrozenTable.forward))
    assert source.count(old_new[0]) == 1
    namespace = dict(vars(frozen_tables))
    exec(source.replace(*old_new), namespace)  # noqa: S102
    forward: Callable[[FrozenTable, Tensor], Tensor] = namespace["forward"]
    monkeypatch.setattr(FrozenTable, "forward", forward)
    failures = 0
    for known in KNOWN.values():
        for has_initial_rows in (True, False):
            try:
                check_lookup(known, has_initial_rows=has_initial_rows)
            except (AssertionError, IndexError):
                failures += 1
    assert failures > 0
