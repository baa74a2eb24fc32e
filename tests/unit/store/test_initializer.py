from __future__ import annotations

import copy
import dataclasses
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from hybridrec.errors import ConfigError
from hybridrec.native import initial_rows, mix64
from hybridrec.native.protocol import InitKind, ShardSpec
from hybridrec.store.initializer import Bank, Constant, Normal, Uniform, bank_from_init_fn

ROWS = np.arange(12, dtype=np.float32).reshape(4, 3)


def first_rows(initializer: Any, dim: int = 3) -> torch.Tensor:
    spec = ShardSpec(
        name="t",
        dim=dim,
        num_row_states=0,
        num_row_wise_states=0,
        state_initial_values=(),
        num_slots=1,
        planned_rows=1,
        **initializer.to_spec_fields(),
    )
    return initial_rows(spec, mix64(torch.arange(2000)))


def test_spec_fields_give_the_rows_that_were_asked_for() -> None:
    uniform = first_rows(Uniform(2.0, 3.0))
    assert uniform.min() >= 2 and uniform.max() < 3 and uniform.unique().numel() > 5900
    normal = first_rows(Normal(10.0, 0.5))
    assert abs(normal.mean() - 10) < 0.05 and abs(normal.std() - 0.5) < 0.05
    assert first_rows(Constant(-2.5)).unique().tolist() == [-2.5]
    bank = first_rows(Bank(ROWS))
    assert {tuple(row) for row in bank.tolist()} == {tuple(row) for row in ROWS.tolist()}


def test_kinds() -> None:
    assert Uniform(1, 2).to_spec_fields()["init_kind"] is InitKind.UNIFORM
    assert Normal(1, 2).to_spec_fields() == {"init_kind": InitKind.NORMAL, "init_a": 1, "init_b": 2, "bank": None}
    assert Constant(1).to_spec_fields()["init_kind"] is InitKind.CONSTANT
    assert Bank(ROWS).to_spec_fields()["bank"].tolist() == ROWS.tolist()


REFUSALS: list[tuple[Callable[[], object], str]] = [
    (lambda: Uniform(1.0, 0.5), r"Uniform\(low=1\.0, high=0\.5\): low is greater than high\. Swap them"),
    (lambda: Uniform(float("nan"), 1.0), r"Uniform: low=nan is no finite float32"),
    (lambda: Uniform(0.0, float("inf")), r"high=inf is no finite float32"),
    (lambda: Uniform(-3e38, 3e38), r"high - low is no finite float32\. Choose a narrower range"),
    (lambda: Uniform("0", 1.0), r"low='0' has type str\. Pass a float"),  # type: ignore[arg-type]
    (lambda: Uniform(False, 1.0), r"low=False has type bool"),
    (lambda: Normal(0.0, -0.1), r"Normal\(mean=0\.0, std=-0\.1\): std is negative"),
    (lambda: Normal(0.0, 1e38), r"values 6 std from the mean are no finite float32\. Lower std"),
    (lambda: Normal(float("-inf"), 1.0), r"mean=-inf is no finite float32"),
    (lambda: Constant(1e39), r"Constant: value=1e\+39 is no finite float32"),
    (lambda: Constant(None), r"value=None has type NoneType"),  # type: ignore[arg-type]
    (lambda: Bank(ROWS.astype(np.float64)), r"rows is float64 \(4, 3\)\. Accepted: float32 \[n, D\]"),
    (lambda: Bank(ROWS[0]), r"rows is float32 \(3,\)"),
    (lambda: Bank(ROWS[:0]), r"rows is float32 \(0, 3\)"),
    (lambda: Bank([[1.0]]), r"rows is list"),  # type: ignore[arg-type]
    (lambda: Bank(np.where(ROWS == 7, np.nan, ROWS).astype(np.float32)), r"rows\[2, 1\] is nan\. Accepted: finite"),
]


@pytest.mark.parametrize(("make", "match"), REFUSALS)
def test_refusals(make: Callable[[], object], match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        make()


def test_extremes_that_are_accepted() -> None:
    assert first_rows(Uniform(0.5, 0.5)).unique().tolist() == [0.5]
    assert first_rows(Normal(0.25, 0)).unique().tolist() == [0.25]
    assert bool(first_rows(Uniform(-1.7e38, 1.7e38)).isfinite().all())


@pytest.mark.parametrize("value", [Uniform(1, 2), Normal(1, 2), Constant(1), Bank(ROWS)])
def test_initializers_are_frozen_values(value: Any) -> None:
    assert copy.deepcopy(value) == value
    assert pickle.loads(pickle.dumps(value)) == value
    assert hash(copy.deepcopy(value)) == hash(value)
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(value, dataclasses.fields(value)[0].name, 0)


def test_banks_differ_by_their_rows_and_own_them() -> None:
    rows = ROWS.copy()
    bank = Bank(rows)
    rows[3, 2] = 99
    assert bank == Bank(torch.from_numpy(ROWS))  # type: ignore[arg-type]
    assert bank != Bank(rows)
    assert bank != Constant(0)
    assert Bank(ROWS.T).rows.flags.c_contiguous


# ---- bank_from_init_fn -------------------------------------------------------------------------------------------


def test_a_bank_depends_on_the_seed_and_leaves_the_users_generator_alone() -> None:
    torch.manual_seed(11)
    expected = torch.rand(3)
    torch.manual_seed(11)
    banks = [bank_from_init_fn(torch.nn.init.normal_, 5, seed, num_rows=64) for seed in (1, 1, 2, -(2**63), 2**63 - 1)]
    assert torch.equal(torch.rand(3), expected)
    assert banks[0] == banks[1]
    assert len({bank.rows.tobytes() for bank in banks}) == 4
    assert banks[0].rows.shape == (64, 5)


def test_an_init_fn_may_return_rows_or_fill_them() -> None:
    def fill(rows: torch.Tensor) -> None:
        rows.fill_(3.0)

    assert bank_from_init_fn(fill, 2, 0, num_rows=3) == Bank(np.full((3, 2), 3, np.float32))
    assert bank_from_init_fn(lambda rows: rows + 1, 2, 0, num_rows=3) == Bank(np.ones((3, 2), np.float32))
    assert bank_from_init_fn(lambda rows: None, 2, 0).rows.shape == (4096, 2)


def test_the_generator_is_restored_when_the_init_fn_fails() -> None:
    def fail(rows: torch.Tensor) -> None:
        torch.rand(10)
        raise KeyError("theirs")

    torch.manual_seed(11)
    expected = torch.rand(3)
    torch.manual_seed(11)
    with pytest.raises(KeyError, match="theirs"):
        bank_from_init_fn(fail, 2, 0)
    assert torch.equal(torch.rand(3), expected)


@pytest.mark.parametrize(
    ("init_fn", "match"),
    [
        (lambda rows: rows.double(), r"init_fn made torch\.float64 \(8, 2\) of a float32 \(8, 2\)"),
        (lambda rows: rows[:1], r"init_fn made torch\.float32 \(1, 2\)"),
        (lambda rows: 5, r"init_fn returned a int\. Accepted: a float32 \[8, 2\] tensor, or None"),
        (lambda rows: rows.fill_(torch.inf), r"init_fn made rows that cannot be used\. .*rows\[0, 0\] is inf"),
    ],
)
def test_what_an_init_fn_may_not_make(init_fn: Callable[[torch.Tensor], Any], match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        bank_from_init_fn(init_fn, 2, 0, num_rows=8)
