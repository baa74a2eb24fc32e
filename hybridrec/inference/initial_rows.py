"""Initial rows as a graph of plain integer tensor operations: what an id without a row reads in a frozen table.

The values are those of docs/design/initial_rows.md, bit for bit. uint64 is carried in int64: sums and products wrap
round alike, and a logical shift is an arithmetic one whose upper bits are masked away.
"""

# No ``from __future__ import annotations``: torch.jit reads the annotations of the classes as they are.
import numpy as np
import torch
from torch import Tensor, nn

from hybridrec.config import TableConfig
from hybridrec.native import table_seed
from hybridrec.native.protocol import InitKind
from hybridrec.native.reference.mix64 import GOLDEN
from hybridrec.row_type import RowType
from hybridrec.store.initializer import SpecFields

# Numbers stand where they are used: what is scripted sees no constants of a Python module.


def mix64(x: Tensor) -> Tensor:
    """The keys of ids: the bijection of docs/design/initial_rows.md. int64 of any shape; a new tensor."""
    x = torch.bitwise_xor(x, torch.bitwise_and(torch.bitwise_right_shift(x, 33), 0x7FFFFFFF))
    x = x * -0x00AE502812AA7333  # 0xff51afd7ed558ccd
    x = torch.bitwise_xor(x, torch.bitwise_and(torch.bitwise_right_shift(x, 33), 0x7FFFFFFF))
    x = x * -0x3B314601E57A13AD  # 0xc4ceb9fe1a85ec53
    return torch.bitwise_xor(x, torch.bitwise_and(torch.bitwise_right_shift(x, 33), 0x7FFFFFFF))


class UniformRows(nn.Module):
    """``uniform(low, high)``."""

    steps: Tensor

    def __init__(self, seed: int, dim: int, low: float, high: float) -> None:
        """``seed``: the table's, int64 or uint64."""
        super().__init__()
        self.dim, self.low = dim, float(np.float32(low))
        self.span = float(np.float32(high) - np.float32(low))
        self.seed = _signed(seed)
        self.register_buffer("steps", _steps((dim + 1) // 2), persistent=True)

    def forward(self, ids_n: Tensor) -> Tensor:
        """float32 [n, D] of int64 [n]."""
        words = mix64(mix64(mix64(ids_n) + self.seed).unsqueeze(1) + self.steps)
        even = torch.bitwise_and(torch.bitwise_right_shift(words, 40), 0xFFFFFF)
        odd = torch.bitwise_and(torch.bitwise_right_shift(words, 8), 0xFFFFFF)
        bits = torch.stack([even, odd], 2).flatten(1)[:, : self.dim]
        return bits.to(torch.float32) * 2.0**-24 * self.span + self.low


class NormalRows(nn.Module):
    """``normal(mean, std)``: the sum of the twelve 16-bit lanes of three words."""

    steps: Tensor

    def __init__(self, seed: int, dim: int, mean: float, std: float) -> None:
        """``seed``: the table's, int64 or uint64."""
        super().__init__()
        self.dim, self.mean, self.std = dim, float(np.float32(mean)), float(np.float32(std))
        self.seed = _signed(seed)
        self.register_buffer("steps", _steps(3 * dim), persistent=True)

    def forward(self, ids_n: Tensor) -> Tensor:
        """float32 [n, D] of int64 [n]."""
        words = mix64(mix64(mix64(ids_n) + self.seed).unsqueeze(1) + self.steps)
        # Two sums of 16-bit lanes in the halves of each word; three words together do not overflow them.
        lanes = torch.bitwise_and(words, 0x0000FFFF0000FFFF) + torch.bitwise_and(
            torch.bitwise_right_shift(words, 16), 0x0000FFFF0000FFFF
        )
        sums = lanes.unflatten(1, [self.dim, 3]).sum(2)
        total = torch.bitwise_and(sums, 0xFFFFFFFF) + torch.bitwise_right_shift(sums, 32)
        return (total - 12 * 65535 // 2).to(torch.float32) * 2.0**-16 * self.std + self.mean


class ConstantRows(nn.Module):
    """``constant(value)``."""

    def __init__(self, dim: int, value: float) -> None:
        super().__init__()
        self.dim, self.value = dim, float(np.float32(value))

    def forward(self, ids_n: Tensor) -> Tensor:
        """float32 [n, D] of int64 [n]."""
        return torch.full((ids_n.size(0), self.dim), self.value, dtype=torch.float32, device=ids_n.device)


class BankRows(nn.Module):
    """Row ``base mod n`` of a bank of n rows."""

    bank: Tensor

    def __init__(self, seed: int, bank: Tensor) -> None:
        """``seed``: the table's, int64 or uint64; ``bank``: float32 [n, D], n below 2^31."""
        super().__init__()
        self.seed, self.num_rows = _signed(seed), len(bank)
        self.weight_of_high = 2**32 % len(bank)
        self.register_buffer("bank", bank, persistent=True)

    def forward(self, ids_n: Tensor) -> Tensor:
        """float32 [n, D] of int64 [n]."""
        base = mix64(mix64(ids_n) + self.seed)
        high = torch.bitwise_and(torch.bitwise_right_shift(base, 32), 0xFFFFFFFF)
        low = torch.bitwise_and(base, 0xFFFFFFFF)
        # high * 2^32 + low, unsigned, without ever leaving int64
        number = torch.remainder(torch.remainder(high, self.num_rows) * self.weight_of_high + low, self.num_rows)
        return self.bank.index_select(0, number)


class RoundedRows(nn.Module):
    """Rows as a table of 16 bits holds them: rounded to the nearest, ties to even."""

    is_bfloat16: bool

    def __init__(self, rows: nn.Module, is_bfloat16: bool) -> None:
        """``rows``: makes the float32 rows; ``is_bfloat16``: or else float16."""
        super().__init__()
        self.rows, self.is_bfloat16 = rows, is_bfloat16

    def forward(self, ids_n: Tensor) -> Tensor:
        """float32 [n, D] of int64 [n]."""
        rows_nD: Tensor = self.rows(ids_n)
        if self.is_bfloat16:
            return rows_nD.to(torch.bfloat16).to(torch.float32)
        return rows_nD.to(torch.float16).to(torch.float32)


def initial_rows_of(config: TableConfig) -> nn.Module:
    """The module that makes a table's initial rows.

    Returns:
        Module whose forward turns ids int64 [n] into float32 [n, D].
    """
    rows = _float32_rows_of(config)
    if config.row_type is RowType.FLOAT32:
        return rows
    return RoundedRows(rows, config.row_type is RowType.BFLOAT16)


def _float32_rows_of(config: TableConfig) -> nn.Module:
    fields: SpecFields = config.initializer.to_spec_fields()
    seed, dim, a, b = table_seed(config.seed, config.name), config.embedding_dim, fields["init_a"], fields["init_b"]
    match fields["init_kind"]:
        case InitKind.UNIFORM:
            return UniformRows(seed, dim, a, b)
        case InitKind.NORMAL:
            return NormalRows(seed, dim, a, b)
        case InitKind.CONSTANT:
            return ConstantRows(dim, a)
        case _:
            return BankRows(seed, torch.from_numpy(fields["bank"].copy()))


def _signed(x: int) -> int:
    """The int64 of the same 64 bits."""
    return (x + 2**63) % 2**64 - 2**63


def _steps(num_words: int) -> Tensor:
    """int64 [num_words]: what is added to ``base`` for word j."""
    return torch.tensor([_signed((j + 1) * GOLDEN) for j in range(num_words)], dtype=torch.int64)
