"""How frozen rows are stored: floats as they are or halved, or codes of 8 or 4 bits with a scale and a bias a row.

A quantised value is ``code * scale + bias`` in float32, ``bias`` the least value of its row and ``scale`` the row's
range over 255 or 15: it is at most ``scale / 2`` away from the value, rounding of float32 aside.
"""

from __future__ import annotations

import enum
from typing import NamedTuple

import torch
from torch import Tensor

from hybridrec.errors import ConfigError


class RowFormat(str, enum.Enum):
    """The type of a frozen table's rows."""

    FP32 = "fp32"
    FP16 = "fp16"
    INT8 = "int8"
    INT4 = "int4"

    @property
    def code_dtype(self) -> torch.dtype:
        """Of what is stored for each column, or for each two."""
        return {"fp32": torch.float32, "fp16": torch.float16}.get(self.value, torch.uint8)

    @property
    def is_quantised(self) -> bool:
        """Whether rows have a scale and a bias."""
        return self in (RowFormat.INT8, RowFormat.INT4)

    def code_columns(self, dim: int) -> int:
        """Elements of `code_dtype` that a row of D columns takes: two columns share a byte of int4."""
        return (dim + 1) // 2 if self is RowFormat.INT4 else dim

    def row_bytes(self, dim: int) -> int:
        """What a row takes, without its id."""
        return self.code_columns(dim) * self.code_dtype.itemsize + 8 * self.is_quantised


def parse_row_format(value: object, where: str) -> RowFormat:
    """A `RowFormat` or its name.

    Raises:
        ConfigError: It is neither.
    """
    try:
        return RowFormat(value)
    except ValueError:
        allowed = ", ".join(repr(f.value) for f in RowFormat)
        raise ConfigError(f"{where}: dtype={value!r} is unknown. Accepted: {allowed}.") from None


class RowRefused(Exception):  # noqa: N818 - never leaves this package
    """A format cannot hold a row."""

    def __init__(self, row: int, problem: str) -> None:
        """``row``: its position among those that were to be encoded."""
        super().__init__(problem)
        self.row = row


class EncodedRows(NamedTuple):
    """Rows as they are stored."""

    codes: Tensor
    """[n, code_columns] of the format's dtype."""
    scale_bias: Tensor
    """float32 [n, 2]; [n, 0] if the format has none."""


def encode_rows(rows_nD: Tensor, row_format: RowFormat) -> EncodedRows:
    """
    Args:
        rows_nD: float32 [n, D].
        row_format: What to make of them.

    Returns:
        New tensors; views of ``rows_nD`` for fp32.

    Raises:
        RowRefused: A value cannot be held.
    """
    if not row_format.is_quantised:
        codes = rows_nD.to(row_format.code_dtype)
        if row_format is RowFormat.FP16:
            _refuse(torch.isfinite(rows_nD) & ~torch.isfinite(codes), rows_nD, "is beyond float16 (65,504)")
        return EncodedRows(codes, rows_nD.new_empty((len(rows_nD), 0)))
    least, most = rows_nD.amin(1, keepdim=True), rows_nD.amax(1, keepdim=True)
    _refuse(~torch.isfinite(rows_nD), rows_nD, "is not finite")
    _refuse(~torch.isfinite(most - least).expand_as(rows_nD), rows_nD, "and others of its row have no finite range")
    levels = 255 if row_format is RowFormat.INT8 else 15
    scale = (most - least) / levels
    steps = (rows_nD - least).double() / torch.where(scale > 0, scale, 1).double()
    codes = steps.round_().clamp_(max=levels).to(torch.uint8)
    if row_format is RowFormat.INT4:
        codes = torch.nn.functional.pad(codes, (0, codes.shape[1] % 2))
        codes = codes[:, 0::2] | codes[:, 1::2] << 4
    return EncodedRows(codes, torch.cat([scale, least], 1))


def decode_rows(codes: Tensor, scale_bias: Tensor, dim: int, is_quantised: bool, is_int4: bool) -> Tensor:
    """float32 [n, D] of encoded rows. Part of the saved graph, so in terms of the tensors alone."""
    if is_int4:
        low, high = torch.bitwise_and(codes, 15), torch.bitwise_right_shift(codes, 4)
        codes = torch.stack([low, high], 2).flatten(1)[:, :dim]
    rows = codes.to(torch.float32)
    if is_quantised:
        rows = rows * scale_bias[:, 0:1] + scale_bias[:, 1:2]
    return rows


def _refuse(is_wrong: Tensor, rows_nD: Tensor, problem: str) -> None:
    if bool(is_wrong.any()):
        row, column = is_wrong.nonzero()[0].tolist()
        raise RowRefused(row, f"its column {column}, {float(rows_nD[row, column]):.9g}, {problem}")
