"""What is planned for a shard against what the compiled core then takes."""

from __future__ import annotations

import pytest
import torch

from hybridrec.native import ShardGroup, mix64
from hybridrec.native.core import has_compiled_core
from hybridrec.native.protocol import ShardSpec
from hybridrec.store.host_bytes import planned_host_bytes

BATCH = 1 << 16


def allocated(num_rows: int, num_slots: int, dim: int, states: tuple[int, int]) -> int:
    """Train new rows, batch by batch, through so many slots; what the core says that it took."""
    num_row_states, num_row_wise_states = states
    spec = ShardSpec(
        name="t",
        dim=dim,
        num_row_states=num_row_states,
        num_row_wise_states=num_row_wise_states,
        state_initial_values=(0.0,) * sum(states),
        num_slots=num_slots,
        planned_rows=num_rows,
    )
    group = ShardGroup([spec], core="compiled")
    slots = [torch.empty((num_slots, dim)) for _ in range(1 + num_row_states)]
    group.bind_slots(0, slots[0], slots[1:], [torch.empty(num_slots) for _ in range(num_row_wise_states)])
    keys = mix64(torch.arange(num_rows, dtype=torch.int64))
    returning = keys if num_slots < num_rows else keys[:0]  # so that the last rows leave their slots too
    for part in torch.cat([keys, returning]).split(min(BATCH, num_slots)):
        plan = group.plan(part, torch.tensor([0, len(part)]), torch.tensor([0]), torch.empty_like(part))
        group.swap(plan.ordinal)
        group.commit(plan.ordinal)
    return int(group.counters(0).host_bytes)


@pytest.mark.skipif(not has_compiled_core(), reason="the numpy reference counts its own memory")
@pytest.mark.parametrize("num_rows", [1, 700, 33_000, 75_000, 200_000, 1_000_000, 1_300_000, 1_700_000])
def test_all_rows_in_slots(num_rows: int) -> None:
    planned = planned_host_bytes(
        dim=1, num_row_states=0, num_row_wise_states=0, num_rows=num_rows, num_slots=num_rows, store_rows=0
    )
    assert planned == pytest.approx(allocated(num_rows, num_rows, 1, (0, 0)), rel=0.02)


@pytest.mark.skipif(not has_compiled_core(), reason="the numpy reference counts its own memory")
@pytest.mark.parametrize(("dim", "states"), [(8, (1, 0)), (17, (0, 1)), (64, (2, 0)), (5, (1, 2))])
def test_rows_in_the_store(dim: int, states: tuple[int, int]) -> None:
    planned = planned_host_bytes(
        dim=dim,
        num_row_states=states[0],
        num_row_wise_states=states[1],
        num_rows=150_000,
        num_slots=10_000,
        store_rows=150_000,
    )
    assert planned == pytest.approx(allocated(150_000, 10_000, dim, states), rel=0.05)


def test_what_a_part_costs() -> None:
    none = {"dim": 16, "num_row_states": 1, "num_row_wise_states": 0, "num_rows": 1000, "num_slots": 0, "store_rows": 0}
    rows = planned_host_bytes(**none)
    assert planned_host_bytes(**{**none, "num_slots": 100}) == rows + 4000  # 40 bytes a slot
    assert planned_host_bytes(**{**none, "store_rows": 16_384}) == rows + (2 << 20)  # 128 bytes a row, in huge pages
    assert planned_host_bytes(**{**none, "store_rows": 16_385}) == rows + (4 << 20)


@pytest.mark.parametrize("num_rows", [10**8, 10**9, 2**32 - 1])
def test_bytes_a_row_of_a_large_map(num_rows: int) -> None:
    """68 bytes for a line of four at loads of 0.29 to 0.70, and 12 to 18 for row numbers."""
    planned = planned_host_bytes(
        dim=1, num_row_states=0, num_row_wise_states=0, num_rows=num_rows, num_slots=0, store_rows=0
    )
    assert 24.2 + 12 <= planned / num_rows <= 58.7 + 18.1
