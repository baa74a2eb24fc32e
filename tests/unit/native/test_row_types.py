"""Rows of 16 bits in the core: rounding of initial rows bit for bit, and records wherever they go."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from hybridrec.native import ShardGroup, initial_rows, mix64
from hybridrec.native.core import CoreName
from hybridrec.native.protocol import InitKind, ShardSpec
from hybridrec.row_type import RowType

HALVES = [RowType.BFLOAT16, RowType.FLOAT16]


def bank_of(values: np.ndarray) -> ShardSpec:
    """One row, which every key has."""
    return ShardSpec(
        name="t",
        dim=len(values),
        num_row_states=0,
        num_row_wise_states=0,
        state_initial_values=(),
        num_slots=1,
        planned_rows=1,
        init_kind=InitKind.BANK,
        bank=values[np.newaxis],
    )


def edges() -> np.ndarray:
    """Around every value that 16 bits hold: the value, half-way to the next, and a step of float32 beside both."""
    bits = [np.arange(0x7F80, dtype=np.uint32) << 16]
    halves = np.arange(0x7C00, dtype=np.uint16).view(np.float16).astype(np.float32)
    bits += [halves.view(np.uint32), ((halves[:-1] + halves[1:]) / 2).view(np.uint32)]
    bits += [bits[0] + 0x8000, np.array([0x477FEFFF, 0x477FF000, 0x33000000, 0x33000001, 0x7F7FFFFF], np.uint32)]
    every = np.concatenate(bits)
    every = np.unique(np.concatenate([every, every + 1, every[every > 0] - 1]))
    every = every[every < 0x7F800000]
    return np.concatenate([every, every | np.uint32(1 << 31)]).view(np.float32)


@pytest.mark.parametrize("row_type", HALVES)
def test_every_kind_of_value_is_rounded_to_the_nearest_even(row_type: RowType, core: CoreName) -> None:
    values = edges()
    assert len(values) % 2 == 0
    for some in (values, values[:-1]):  # an odd dim too: half a word is left over
        spec = bank_of(some)
        spec = ShardSpec(**{**vars(spec), "row_type": row_type})
        (row,) = initial_rows(spec, torch.tensor([5]), core=core)
        expected = torch.from_numpy(some).to(row_type.dtype)
        assert row.dtype == row_type.dtype
        assert torch.equal(row.view(torch.int16), expected.view(torch.int16))


@pytest.mark.parametrize(("row_type", "one", "third"), [(HALVES[0], 0x3F80, 0x3EAB), (HALVES[1], 0x3C00, 0x3555)])
def test_words_are_the_stored_ones(row_type: RowType, one: int, third: int, core: CoreName) -> None:
    """The first value is in the low half of a word, what is left over is zero."""
    spec = bank_of(np.array([1.0, 1 / 3, -1.0], np.float32))
    spec = ShardSpec(**{**vars(spec), "row_type": row_type})
    row = initial_rows(spec, torch.tensor([5]), core=core)
    words = row_type.words(row).numpy().view("<u4")
    assert words.tolist() == [[third << 16 | one, one | 0x8000]]
    whole = torch.empty(0).set_(row.untyped_storage(), 0, (2,)).numpy().view("<u4")
    assert whole.tolist() == words[0].tolist()


@pytest.mark.parametrize("row_type", HALVES)
@pytest.mark.parametrize("kind", [InitKind.UNIFORM, InitKind.NORMAL, InitKind.CONSTANT])
def test_distributions_are_those_of_float32_rounded(row_type: RowType, kind: InitKind, core: CoreName) -> None:
    fields = {**vars(bank_of(np.zeros(7, np.float32))), "init_kind": kind, "bank": None, "init_a": -0.3, "init_b": 0.7}
    keys = mix64(torch.arange(500))
    plain = initial_rows(ShardSpec(**fields), keys, core=core)
    rounded = initial_rows(ShardSpec(**{**fields, "row_type": row_type}), keys, core=core)
    assert torch.equal(rounded, plain.to(row_type.dtype))


class Table:
    """A group of one small table, and a dict that says what its records must be."""

    def __init__(self, row_type: RowType, core: CoreName) -> None:
        self.spec = ShardSpec(
            name="t",
            dim=5,
            num_row_states=2,
            num_row_wise_states=1,
            state_initial_values=(0.5, 0.25, -1.0),
            num_slots=6,
            planned_rows=9,
            row_type=row_type,
        )
        self.group = ShardGroup([self.spec], core=core)
        self.columns = [
            torch.full((6, 3), 7.0),
            torch.full((6, 5), 7.0),
            torch.full((6, 5), 7.0),
            torch.full((6,), 7.0),
        ]
        self.group.bind_slots(0, self.columns[0], self.columns[1:3], self.columns[3:])
        self.known: dict[int, torch.Tensor] = {}
        self.core = core

    def initial(self, key: int) -> torch.Tensor:
        row = initial_rows(self.spec, torch.tensor([key]), core=self.core)
        state = torch.tensor([0.5] * 5 + [0.25] * 5 + [-1.0])
        return torch.cat([self.spec.row_type.words(row)[0], state])

    def slots(self) -> torch.Tensor:
        return torch.cat([column.view(6, -1) for column in self.columns], 1)

    def fill(self, slots: torch.Tensor, records: torch.Tensor) -> None:
        for column, part in zip(self.columns, records.split([3, 5, 5, 1], 1), strict=True):
            column[slots] = part.reshape(len(slots), *column.shape[1:])

    def train(self, keys: list[int], rng: random.Random, *, is_staged: bool) -> None:
        placed = torch.empty(len(keys), dtype=torch.int64)
        plan = self.group.plan(torch.tensor(keys), torch.tensor([0, len(keys)]), torch.tensor([0]), placed)
        assert plan.status == 0
        if is_staged:
            self.stage(plan.ordinal, plan.num_loads + plan.num_inits, plan.num_write_backs)
        else:
            self.group.swap(plan.ordinal)
        for key, slot in zip(keys, placed.tolist(), strict=True):
            expected = self.known.get(key, self.initial(key))
            assert self.slots()[slot].numpy().tobytes() == expected.numpy().tobytes()
            weights = torch.tensor([[rng.uniform(-2, 2) for _ in range(5)]])
            states = torch.tensor([[rng.uniform(-2, 2) for _ in range(11)]])
            self.known[key] = torch.cat([self.spec.row_type.words(weights), states], 1)[0]
            self.fill(torch.tensor([slot]), self.known[key][None])
        self.group.commit(plan.ordinal)

    def stage(self, ordinal: int, num_loads: int, num_victims: int) -> None:
        loads, victims = torch.empty(num_loads, dtype=torch.int64), torch.empty(num_victims, dtype=torch.int64)
        self.group.swap_slots(ordinal, loads, victims)
        leaving, coming = self.slots()[victims].reshape(-1), torch.empty(num_loads * 14)
        self.group.gather_loads(ordinal, coming)
        self.fill(loads, coming.view(-1, 14))
        if num_victims:
            self.group.scatter_victims(ordinal, leaving)

    def weights(self, keys: list[int]) -> torch.Tensor:
        index, counts = torch.empty(len(keys), dtype=torch.int64), torch.empty(1, dtype=torch.int64)
        handle = self.group.read_plan(
            torch.tensor(keys), torch.tensor([0, len(keys)]), torch.tensor([0]), index, counts
        )
        buffer = torch.empty(len(keys), 3)
        self.group.read_rows(handle, [buffer], host_only=False)
        return buffer


@pytest.mark.parametrize("row_type", HALVES)
@pytest.mark.parametrize("is_staged", [False, True])
def test_records_survive_every_way(row_type: RowType, is_staged: bool, core: CoreName) -> None:
    rng = random.Random(4)
    table = Table(row_type, core)
    for _ in range(40):
        table.train(rng.sample(range(1, 21), 4), rng, is_staged=is_staged)
    keys = sorted(table.known)
    assert len(keys) > 15
    expected = torch.stack([table.known.get(k, table.initial(k)) for k in [*keys, 99]])
    assert table.weights([*keys, 99]).numpy().tobytes() == expected[:, :3].contiguous().numpy().tobytes()
    table.group.flush()
    handle, n = table.group.export_begin(0)
    ids, scores, records = (torch.empty(n, dtype=torch.int64), torch.empty(n, dtype=torch.int64), torch.empty(n, 14))
    table.group.export_next(handle, ids, scores, records)
    table.group.export_end(handle)
    for id_, key, record in zip(ids.tolist(), mix64(ids).tolist(), records, strict=True):
        assert record.numpy().tobytes() == table.known[key].numpy().tobytes(), id_
    again = Table(row_type, core)
    again.group.set_ordinal(40)
    again.group.import_rows(0, ids, scores, records)
    assert torch.equal(again.weights(keys), expected[:-1, :3])
