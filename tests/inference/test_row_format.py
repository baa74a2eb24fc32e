"""How rows are stored: bounds of the error, exact cases, and what a format refuses."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from hybridrec.errors import ConfigError
from hybridrec.inference.row_format import RowFormat, RowRefused, decode_rows, encode_rows, parse_row_format

LARGEST = torch.finfo(torch.float32).max


def stored(rows_nD: Tensor, row_format: RowFormat) -> Tensor:
    """Rows after they were stored and read."""
    encoded = encode_rows(rows_nD, row_format)
    columns = row_format.code_columns(rows_nD.shape[1])
    assert encoded.codes.shape == (len(rows_nD), columns) and encoded.codes.dtype == row_format.code_dtype
    assert columns * encoded.codes.itemsize + 4 * encoded.scale_bias.shape[1] == row_format.row_bytes(rows_nD.shape[1])
    is_int4 = row_format is RowFormat.INT4
    return decode_rows(*encoded, rows_nD.shape[1], row_format.is_quantised, is_int4)


@given(
    st.integers(1, 9).flatmap(
        lambda dim: st.lists(
            st.lists(st.floats(-(2.0**99), 2.0**99, width=32), min_size=dim, max_size=dim), min_size=1, max_size=5
        )
    ),
    st.sampled_from([(RowFormat.INT8, 255), (RowFormat.INT4, 15)]),
)
def test_a_quantised_value_is_half_a_step_away_at_most(rows: list[list[float]], kind: tuple[RowFormat, int]) -> None:
    rows_nD = torch.tensor(rows, dtype=torch.float32)
    row_format, levels = kind
    bound = (rows_nD.amax(1) - rows_nD.amin(1)) / levels / 2
    rounding = 4e-7 * (rows_nD.abs().amax(1) + bound)  # of float32, where codes are decoded
    error = (stored(rows_nD, row_format) - rows_nD).abs().amax(1)
    assert (error <= bound * 1.0001 + rounding).all()


@pytest.mark.parametrize("row_format", [RowFormat.INT8, RowFormat.INT4])
def test_the_ends_of_a_row_are_exact_codes(row_format: RowFormat) -> None:
    levels = 255 if row_format is RowFormat.INT8 else 15
    rows_nD = torch.arange(levels + 1, dtype=torch.float32).flip(0).unsqueeze(0)  # every code once
    assert torch.equal(stored(rows_nD, row_format), rows_nD)


@pytest.mark.parametrize("dim", [1, 2, 5])
@pytest.mark.parametrize("row_format", RowFormat)
def test_rows_of_one_value_and_no_rows(row_format: RowFormat, dim: int) -> None:
    rows_nD = torch.tensor([[0.0], [-1.5], [3e4]]).expand(3, dim).contiguous()
    assert torch.equal(stored(rows_nD, row_format), rows_nD)
    assert stored(rows_nD[:0], row_format).shape == (0, dim)


def test_floats_are_kept_or_rounded_once() -> None:
    rows_nD = torch.tensor([[float("nan"), float("inf"), 1 / 3, -LARGEST]])
    assert stored(rows_nD, RowFormat.FP32).numpy().tobytes() == rows_nD.numpy().tobytes()
    halves = torch.tensor([[float("nan"), -float("inf"), 1 / 3, 65504.0]])
    assert stored(halves, RowFormat.FP16).numpy().tobytes() == halves.half().float().numpy().tobytes()


@pytest.mark.parametrize(
    ("row_format", "bad", "problem"),
    [
        (RowFormat.FP16, [1.0, 65520.0], "column 1, 65520, is beyond float16"),
        (RowFormat.INT8, [float("nan"), 0.0], "column 0, nan, is not finite"),
        (RowFormat.INT4, [0.0, float("-inf")], "column 1, -inf, is not finite"),
        (RowFormat.INT8, [LARGEST, -LARGEST], "have no finite range"),
    ],
)
def test_a_row_that_cannot_be_held_is_refused(row_format: RowFormat, bad: list[float], problem: str) -> None:
    with pytest.raises(RowRefused, match=problem) as e:
        encode_rows(torch.tensor([[1.0, 2.0], bad, bad]), row_format)
    assert e.value.row == 1


def test_formats_have_names() -> None:
    assert [parse_row_format(name, "x") for name in ("fp32", "fp16", "int8", "int4")] == list(RowFormat)
    with pytest.raises(ConfigError, match=r"here: dtype='int2' is unknown. Accepted: 'fp32', 'fp16', 'int8', 'int4'"):
        parse_row_format("int2", "here")
