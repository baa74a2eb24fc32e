"""Golden vectors, computed apart from hybridrec in plain Python integers; `mix64(1)` is MurmurHash3's published one."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hybridrec.errors import ConfigError
from hybridrec.native import mix64, table_seed, unmix64
from hybridrec.native.core import CoreName
from tests.property import plain
from tests.unit.native.conftest import CORES

MIX64 = {
    0: 0x0,
    1: 0xB456BCFC34C2CB2C,
    2: 0x3ABF2A20650683E7,
    42: 0x810879608E4259CC,
    -1: 0x64B5720B4B825F21,
    -2: 0x3A8593886C55A02B,
    -(2**63): 0x8F780810AF31A493,
    2**63 - 1: 0xABB93DF0A930EDEA,
    0x9E3779B97F4A7C15 - 2**64: 0x9CA066F1A4AB2EEA,
}
TABLE_SEED = {
    (0, ""): 0x9775A911A90DCF7A,
    (0, "user"): 0xED442A87598DBAA1,
    (1, "user"): 0x799DD5B800F1F574,
    (-1, "user"): 0xC10ACB87A38937E6,
    (2**64 - 1, "user"): 0xC10ACB87A38937E6,
    (2**63 - 1, "товар"): 0x2CE9BC903286799D,
    (0, "a" * 40): 0xCE2C46F7C61FC501,
}


def test_golden_keys(core: CoreName) -> None:
    ids, keys = torch.tensor(list(MIX64)), torch.tensor([plain.signed(key) for key in MIX64.values()])
    assert mix64(ids, core=core).tolist() == keys.tolist()
    assert unmix64(keys, core=core).tolist() == ids.tolist()


def test_golden_table_seeds(core: CoreName) -> None:
    assert {pair: table_seed(*pair, core=core) for pair in TABLE_SEED} == TABLE_SEED


@pytest.mark.parametrize("seed", [2**64, -(2**63) - 1])
def test_a_seed_of_more_than_64_bits_is_refused(core: CoreName, seed: int) -> None:
    with pytest.raises(ConfigError, match=rf"table 'user': seed={seed} does not fit in 64 bits"):
        table_seed(seed, "user", core=core)


@given(st.lists(st.integers(-(2**63), 2**63 - 1), max_size=50))
def test_mix64_is_a_bijection(ids: list[int]) -> None:
    expected = [plain.signed(plain.mix64(i)) for i in ids]
    for core in CORES:
        keys = mix64(torch.tensor(ids, dtype=torch.int64), core=core)
        assert keys.tolist() == expected
        assert unmix64(keys, core=core).tolist() == ids


@pytest.mark.parametrize("num_ids", [0, 1, 31, 32, 33, 4097])
def test_all_sizes_and_shapes(core: CoreName, num_ids: int) -> None:
    ids = torch.arange(num_ids).reshape(num_ids, 1) - 5
    before = ids.clone()
    keys = mix64(ids, core=core)
    assert keys.shape == ids.shape
    assert keys.flatten().tolist() == [plain.signed(plain.mix64(i)) for i in range(-5, num_ids - 5)]
    assert torch.equal(ids, before)
