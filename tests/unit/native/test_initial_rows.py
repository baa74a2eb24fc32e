"""Initial rows: golden values, plain-Python values, moments, and the same bits from every core."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from hybridrec.native import initial_rows, mix64, table_seed
from hybridrec.native.core import CoreName
from hybridrec.native.protocol import InitKind, ShardSpec
from tests.property import plain
from tests.unit.native.conftest import CORES

EXTREME_IDS = [0, 1, -1, -(2**63), 2**63 - 1]
BANK = np.arange(4096 * 3, dtype=np.float32).reshape(4096, 3)

# table "item", seed 7, columns 0 to 2; computed apart from hybridrec in Python integers and exact float32 steps
UNIFORM = [
    ["0x1.26b2a4p-8", "-0x1.a2f228p-8", "-0x1.51e684p-8"],
    ["0x1.47f9p-13", "-0x1.49daep-9", "0x1.94086p-10"],
    ["-0x1.560d2p-11", "-0x1.6ee704p-8", "0x1.055ac4p-7"],
    ["0x1.66b6dp-10", "0x1.20d968p-9", "-0x1.109e56p-7"],
    ["-0x1.2109e6p-7", "-0x1.ac1534p-9", "0x1.79d74p-8"],
]
NORMAL = [
    ["0x1.edd4p+0", "0x1.58c4p+1", "-0x1.e1a4p-1"],
    ["-0x1.7448p-1", "0x1.3c2ep+0", "0x1.b4e8p-1"],
    ["0x1.5a2p-2", "0x1.00b9p+2", "-0x1.35adp+1"],
    ["-0x1.1158p-1", "-0x1.2b6bp+1", "-0x1.61bep+0"],
    ["-0x1.a72p-4", "-0x1.e48p-4", "0x1.2044p+0"],
]
BANK_ROWS = [2684, 1471, 3085, 234, 4028]


def make_spec(kind: InitKind, a: float = 0.0, b: float = 0.0, *, dim: int = 3, seed: int | None = None) -> ShardSpec:
    return ShardSpec(
        name="item",
        dim=dim,
        num_row_states=0,
        num_row_wise_states=0,
        state_initial_values=(),
        num_slots=1,
        planned_rows=1,
        table_seed=plain.table_seed(7, "item") if seed is None else seed,
        init_kind=kind,
        init_a=a,
        init_b=b,
        bank=BANK if kind == InitKind.BANK else None,
    )


def rows(spec: ShardSpec, ids: list[int], core: CoreName) -> torch.Tensor:
    return initial_rows(spec, mix64(torch.tensor(ids, dtype=torch.int64), core=core), core=core)


def from_hex(values: list[list[str]]) -> list[list[float]]:
    return [[float.fromhex(v) for v in row] for row in values]


def test_golden_uniform(core: CoreName) -> None:
    assert rows(make_spec(InitKind.UNIFORM, -0.01, 0.01), EXTREME_IDS, core).tolist() == from_hex(UNIFORM)


def test_golden_normal(core: CoreName) -> None:
    assert rows(make_spec(InitKind.NORMAL, 0.5, 2.0), EXTREME_IDS, core).tolist() == from_hex(NORMAL)


def test_golden_bank(core: CoreName) -> None:
    assert rows(make_spec(InitKind.BANK), EXTREME_IDS, core).tolist() == BANK[BANK_ROWS].tolist()


def test_constant(core: CoreName) -> None:
    assert rows(make_spec(InitKind.CONSTANT, 0.1), EXTREME_IDS, core).tolist() == [[float(np.float32(0.1))] * 3] * 5


@pytest.mark.parametrize("dim", [1, 2, 7, 64])
def test_every_column_is_what_plain_integers_say(core: CoreName, dim: int) -> None:
    seed = plain.table_seed(-3, "t")
    keys = [plain.mix64(i) for i in (*EXTREME_IDS, 123456789)]
    keys_n = torch.tensor([plain.signed(k) for k in keys])
    uniform = initial_rows(make_spec(InitKind.UNIFORM, -0.3, 0.7, dim=dim, seed=seed), keys_n, core=core)
    normal = initial_rows(make_spec(InitKind.NORMAL, 0.1, 0.03, dim=dim, seed=seed), keys_n, core=core)
    for i, key in enumerate(keys):
        assert uniform[i].tolist() == [float(plain.uniform(seed, key, c, -0.3, 0.7)) for c in range(dim)]
        assert normal[i].tolist() == [float(plain.normal(seed, key, c, 0.1, 0.03)) for c in range(dim)]


@pytest.mark.parametrize(
    ("kind", "a", "b"),
    [
        (InitKind.UNIFORM, -1e-3, 3.0),
        (InitKind.UNIFORM, 0.1, 0.1),
        (InitKind.UNIFORM, -1.5e38, 1.5e38),
        (InitKind.NORMAL, -7.25, 1e-4),
        (InitKind.NORMAL, 0.0, 1e37),
        (InitKind.CONSTANT, -0.0, 0.0),
        (InitKind.BANK, 0.0, 0.0),
    ],
)
def test_every_core_gives_the_same_bits(kind: InitKind, a: float, b: float) -> None:
    ids = [*EXTREME_IDS, *range(-2000, 2000)]
    found = [rows(make_spec(kind, a, b), ids, core).numpy().tobytes() for core in CORES]
    assert len(found[0]) == len(ids) * 3 * 4
    assert set(found) == {found[0]}


def test_moments_of_uniform(core: CoreName) -> None:
    values = rows(make_spec(InitKind.UNIFORM, -1.0, 3.0, dim=16), list(range(20000)), core).double()
    assert values.min() >= -1 and values.max() < 3
    # 320,000 values: five standard errors
    assert abs(values.mean() - 1) < 5 * (16 / 12 / 320_000) ** 0.5
    assert abs(values.var() - 16 / 12) < 0.01
    assert values.mean(0).sub(1).abs().max() < 5 * (16 / 12 / 20_000) ** 0.5


def test_moments_of_normal(core: CoreName) -> None:
    values = rows(make_spec(InitKind.NORMAL, 0.25, 0.5, dim=16), list(range(20000)), core).double()
    z = (values - 0.25) / 0.5
    assert abs(z.mean()) < 5 / 320_000**0.5
    assert abs(z.var() - 1) < 0.015
    assert abs((z**4).mean() - 2.9) < 0.05  # Irwin-Hall of twelve: kurtosis 3 - 0.1
    assert 3.5 < z.abs().max() <= 6


def test_neighbours_and_columns_do_not_depend_on_each_other(core: CoreName) -> None:
    values = rows(make_spec(InitKind.UNIFORM, -1.0, 1.0, dim=8), list(range(20000)), core).double()
    correlations = torch.corrcoef(torch.cat([values[:-1], values[1:]], 1).t()) - torch.eye(16)
    assert correlations.abs().max() < 5 / 20_000**0.5


def test_seeds_and_names_tell_tables_apart(core: CoreName) -> None:
    seeds = [table_seed(s, n, core=core) for s in range(10) for n in ("a", "b", "ab", "ba")]
    assert len(set(seeds)) == 40
    specs = [make_spec(InitKind.UNIFORM, 0.0, 1.0, seed=s) for s in seeds]
    assert len({tuple(rows(spec, [5], core)[0].tolist()) for spec in specs}) == 40


def test_no_rows(core: CoreName) -> None:
    assert rows(make_spec(InitKind.NORMAL, 0.0, 1.0), [], core).shape == (0, 3)


@pytest.mark.parametrize("core", ["compiled", "reference"])
@pytest.mark.parametrize("kind", [InitKind.UNIFORM, InitKind.NORMAL, InitKind.CONSTANT])
def test_a_column_shard_has_the_columns_of_its_table(core: CoreName, kind: InitKind) -> None:
    whole = ShardSpec(
        name="t",
        dim=9,
        num_row_states=0,
        num_row_wise_states=0,
        state_initial_values=(),
        num_slots=1,
        planned_rows=1,
        table_seed=5,
        init_kind=kind,
        init_a=-0.5,
        init_b=0.5,
    )
    keys = torch.tensor([0, -1, 2**63 - 1, -(2**63), 77])
    rows = initial_rows(whole, keys, core=core)
    for first in range(9):
        for dim in range(1, 10 - first):
            part = dataclasses.replace(whole, dim=dim, first_column=first)
            assert torch.equal(initial_rows(part, keys, core=core), rows[:, first : first + dim])
