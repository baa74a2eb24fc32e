"""What the facade refuses, before an address reaches the core; and what both cores refuse at the wrong time."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch

from hybridrec.errors import CapacityError, ConfigError, IdError, StateError
from hybridrec.native import ShardGroup, initial_rows, mix64
from hybridrec.native.core import CoreName
from hybridrec.native.protocol import InitKind, PlanStatus, ShardSpec
from tests.property.driver import Slots, make_specs

OFFSETS, TABLES = torch.tensor([0, 2, 3]), torch.tensor([0, 1])


def keys(*ids: int) -> torch.Tensor:
    return mix64(torch.tensor(ids, dtype=torch.int64))


@pytest.fixture
def group(core: CoreName) -> ShardGroup:
    """Two tables, bound, with one batch in flight that is not moved."""
    specs = make_specs()
    group = ShardGroup(specs, core=core)
    for t, spec in enumerate(specs):
        bind(group, t, Slots(spec, spec.num_slots))
    assert group.plan(keys(1, 2, 3), OFFSETS, TABLES, torch.empty(3, dtype=torch.int64)).ordinal == 1
    return group


def bind(group: ShardGroup, table: int, slots: Slots) -> None:
    group.bind_slots(table, *slots.bind())


def dump(group: ShardGroup) -> list[Any]:
    return [[a.tolist() for a in group.entries(t)] + [group.counters(t)] for t in range(2)]


BAD_BATCHES: dict[str, tuple[dict[str, Any], str]] = {
    "dtype": ({"keys": torch.zeros(3)}, r"plan: keys has dtype torch\.float32\. Accepted: torch\.int64"),
    "int32": ({"keys": torch.zeros(3, dtype=torch.int32)}, r"keys has dtype torch\.int32"),
    "type": ({"keys": [1, 2, 3]}, r"plan: keys has type list\. Pass a torch\.Tensor"),
    "shape": ({"keys": torch.zeros(1, 3, dtype=torch.int64)}, r"keys has shape \(1, 3\)\. Accepted: \[any\]"),
    "strides": ({"keys": torch.zeros(6, dtype=torch.int64)[::2]}, r"keys is not contiguous .*keys\.contiguous\(\)"),
    "device": ({"keys": torch.zeros(3, dtype=torch.int64, device="meta")}, r"keys is on meta .*host memory"),
    "offsets length": (
        {"feature_offsets": torch.tensor([0, 3])},
        r"feature_offsets has shape \(2,\)\. Accepted: \[3\]",
    ),
    "offsets start": ({"feature_offsets": torch.tensor([1, 2, 3])}, r"feature_offsets=\[1, 2, 3\] do not cut 3 keys"),
    "offsets end": ({"feature_offsets": torch.tensor([0, 2, 4])}, r"ascending, from 0 to 3"),
    "offsets order": ({"feature_offsets": torch.tensor([0, 4, 3])}, r"do not cut 3 keys into features"),
    "table": ({"feature_table": torch.tensor([0, 2])}, r"feature_table=\[0, 2\] names table 2\. Accepted: 0 to 1"),
    "negative table": ({"feature_table": torch.tensor([-1, 0])}, r"names table -1"),
}


@pytest.mark.parametrize("name", BAD_BATCHES)
def test_bad_batches_change_nothing(group: ShardGroup, name: str) -> None:
    changes, match = BAD_BATCHES[name]
    before = dump(group)
    batch = {"keys": keys(1, 2, 3), "feature_offsets": OFFSETS, "feature_table": TABLES} | changes
    with pytest.raises(IdError, match=match):
        group.plan(**batch, slots=torch.empty(3, dtype=torch.int64))
    with pytest.raises(IdError, match=match.replace("plan:", "read_plan:")):
        empty = torch.empty(3, dtype=torch.int64)
        group.read_plan(**batch, index=empty, unique_counts=torch.empty(2, dtype=torch.int64))
    assert dump(group) == before


def test_buffers_of_the_wrong_size_are_refused(group: ShardGroup) -> None:
    two, three = torch.empty(2, dtype=torch.int64), torch.empty(3, dtype=torch.int64)
    with pytest.raises(ConfigError, match=r"plan: slots has shape \(2,\)\. Accepted: \[3\]"):
        group.plan(keys(1, 2, 3), OFFSETS, TABLES, two)
    with pytest.raises(ConfigError, match=r"read_plan: index has shape \(2,\)"):
        group.read_plan(keys(1, 2, 3), OFFSETS, TABLES, two, two)
    with pytest.raises(ConfigError, match=r"unique_counts has shape \(3,\)\. Accepted: \[2\]"):
        group.read_plan(keys(1, 2, 3), OFFSETS, TABLES, three, three)
    with pytest.raises(ConfigError, match=r"swap_counts: counts has shape \(2,\)\. Accepted: \[2, 2\]"):
        group.swap_counts(1, two)
    with pytest.raises(ConfigError, match=r"swap_slots: load_slots has shape \(2,\)\. Accepted: \[3\]"):
        group.swap_slots(1, two, two[:0])
    with pytest.raises(ConfigError, match=r"victim_slots has shape \(2,\)\. Accepted: \[0\]"):
        group.swap_slots(1, three, two)
    with pytest.raises(ConfigError, match=r"gather_loads: staging has 17 floats\. Accepted: 18 and more"):
        group.gather_loads(1, torch.empty(17))
    group.gather_loads(1, torch.empty(18))
    handle = group.read_plan(keys(1, 2, 3), OFFSETS, TABLES, three, two)
    with pytest.raises(ConfigError, match=r"read_rows: buffers\[0\] has 1 rows\. Accepted: 2 and more"):
        group.read_rows(handle, [torch.empty(1, 3), torch.empty(1, 2)], False)
    with pytest.raises(ConfigError, match=r"buffers\[1\] has shape \(1, 3\)\. Accepted: \[any, 2\]"):
        group.read_rows(handle, [torch.empty(2, 3), torch.empty(1, 3)], False)
    with pytest.raises(ConfigError, match=r"read_rows: 1 buffers for 2 tables"):
        group.read_rows(handle, [torch.empty(2, 3)], False)


def test_bind_slots_checks_every_array(group: ShardGroup) -> None:
    good = Slots(make_specs()[0], 7)
    weights, states, row_wise = good.bind()
    with pytest.raises(ConfigError, match=r"bind_slots: weights has shape \(6, 3\)\. Accepted: \[7, 3\]"):
        group.bind_slots(0, weights[:6], states, row_wise)
    with pytest.raises(ConfigError, match=r"row_states\[0\] has dtype torch\.float64"):
        group.bind_slots(0, weights, [states[0].double()], row_wise)
    with pytest.raises(ConfigError, match=r"row_wise_states\[1\] is not contiguous"):
        group.bind_slots(0, weights, states, [row_wise[0], torch.empty(14)[::2]])
    with pytest.raises(ConfigError, match=r"'uniform' has 1 row-sized and 2 row-wise states; 0 and 2 tensors came"):
        group.bind_slots(0, weights, [], row_wise)
    with pytest.raises(ConfigError, match=r"bind_slots: table=2\. Accepted: 0 to 1"):
        group.bind_slots(2, weights, states, row_wise)


def test_calls_at_the_wrong_time_change_nothing(group: ShardGroup) -> None:
    before = dump(group)
    three = torch.empty(3, dtype=torch.int64)
    handle = group.read_plan(keys(1, 2, 3), OFFSETS, TABLES, three, torch.empty(2, dtype=torch.int64))
    buffers = [torch.empty(2, 3), torch.empty(1, 2)]
    for call in (
        lambda: group.commit(1),
        lambda: group.commit(2),
        lambda: group.undo(0),
        lambda: group.swap(7),
        lambda: group.flush(),
        lambda: group.read_rows(handle, buffers, False),
        lambda: group.read_resident(handle, 0),
        lambda: group.read_records(0, np.array([0], dtype=np.uint32)),
        lambda: group.resize_slots(0, 9),
        lambda: group.read_rows(handle + 1, buffers, False),
    ):
        with pytest.raises(StateError):
            call()
        assert dump(group) == before
    group.swap(1)
    with pytest.raises(StateError):
        group.swap(1)
    group.commit(1)
    for call in (lambda: group.commit(1), lambda: group.undo(1), lambda: group.swap(1)):
        with pytest.raises(StateError):
            call()


def test_slots_only_grow_and_are_unbound_then(group: ShardGroup) -> None:
    group.undo(1)
    with pytest.raises(ConfigError):
        group.resize_slots(0, 6)
    group.resize_slots(0, 8)
    assert group.plan(keys(1, 2, 3), OFFSETS, TABLES, torch.empty(3, dtype=torch.int64)).num_inits == 3
    with pytest.raises(StateError, match="bind_slots"):
        group.swap(1)
    bind(group, 0, Slots(make_specs()[0], 8))
    group.swap(1)
    group.commit(1)


def test_records_of_dead_or_dirty_rows_are_refused(group: ShardGroup) -> None:
    group.swap(1)
    group.commit(1)
    for row in (0, 2, 5):
        with pytest.raises(ConfigError, match=f"row {row}"):
            group.read_records(0, np.array([row], dtype=np.uint32))
    group.flush()
    assert group.read_records(0, np.array([1, 0], dtype=np.uint32)).shape == (2, 8)
    with pytest.raises(ConfigError, match="rows is no uint32 numpy array"):
        group.read_records(0, np.array([0]))


def flush_slots(group: ShardGroup) -> torch.Tensor:
    counts = torch.empty(2, dtype=torch.int64)
    group.flush_counts(counts)
    slots = torch.empty(int(counts.sum()), dtype=torch.int64)
    group.flush_slots(slots)
    return slots


def test_a_staged_flush_checks_its_buffers(group: ShardGroup) -> None:
    group.swap(1)
    group.commit(1)
    three = torch.empty(3, dtype=torch.int64)
    with pytest.raises(ConfigError, match=r"flush_counts: counts has shape \(3,\)\. Accepted: \[2\]"):
        group.flush_counts(three)
    with pytest.raises(ConfigError, match=r"flush_slots: slots has shape \(2,\)\. Accepted: \[3\]"):
        group.flush_slots(three[:2])
    with pytest.raises(StateError, match=r"flush_slots"):
        group.flush_records(torch.empty(18))
    assert flush_slots(group).tolist() == [0, 1, 0]
    with pytest.raises(ConfigError, match=r"flush_records: staging has 17 floats\. Accepted: 18 and more"):
        group.flush_records(torch.empty(17))
    with pytest.raises(ConfigError, match=r"flush_records: staging has dtype torch\.float64"):
        group.flush_records(torch.empty(18).double())
    group.flush_records(torch.arange(18, dtype=torch.float32))
    rows = np.array([1, 0], dtype=np.uint32)
    assert group.read_records(0, rows).tolist() == [list(range(8, 16)), list(range(8))]
    assert group.read_records(1, rows[1:]).tolist() == [[16, 17]]


@pytest.mark.parametrize("between", ["commit", "undo", "plan", "flush", "read"])
def test_a_staged_flush_that_something_came_between_begins_again(group: ShardGroup, between: str) -> None:
    group.swap(1)
    three = torch.empty(3, dtype=torch.int64)
    if between != "commit":
        group.commit(1)
    if between == "undo":
        assert group.plan(keys(1, 2, 3), OFFSETS, TABLES, three).ordinal == 2
    assert len(flush_slots(group)) == 3
    if between == "commit":
        group.commit(1)
    elif between == "undo":
        group.undo(2)
    elif between == "plan":
        assert group.plan(keys(1, 7, 3), OFFSETS, TABLES, three).ordinal == 2
        group.swap(2)
    elif between == "flush":
        group.flush()
    else:
        group.read_plan(keys(1, 2, 3), OFFSETS, TABLES, three, torch.empty(2, dtype=torch.int64))
        group.flush_records(torch.zeros(18))
        return
    before = dump(group)
    with pytest.raises(StateError, match="flush_slots"):
        group.flush_records(torch.zeros(100))
    assert dump(group) == before
    num_dirty = len(flush_slots(group))
    assert num_dirty == {"plan": 4, "flush": 0}.get(between, 3)
    group.flush_records(torch.zeros(100))
    assert len(flush_slots(group)) == 0


def test_a_read_ends_once_and_end_read_may_come_again(group: ShardGroup) -> None:
    group.swap(1)
    handle = group.read_plan(
        keys(1, 2, 3), OFFSETS, TABLES, torch.empty(3, dtype=torch.int64), torch.empty(2, dtype=torch.int64)
    )
    buffers = [torch.empty(2, 3), torch.empty(1, 2)]
    group.read_rows(handle, buffers, True)
    group.read_rows(handle, buffers, False)
    with pytest.raises(StateError, match=f"the read plan {handle} has ended or never was"):
        group.read_rows(handle, buffers, False)
    group.end_read(handle)
    group.end_read(handle)


BAD_SPECS: list[tuple[dict[str, Any], str]] = [
    ({"dim": 0}, r"table 'uniform': dim=0\. Accepted: 1 and more"),
    ({"num_slots": 0}, r"num_slots=0\. Accepted: 1 and more"),
    ({"num_slots": 2**31}, r"num_slots=2,147,483,648 cannot be numbered"),
    ({"num_row_states": -1}, r"num_row_states=-1"),
    ({"max_rows": -1}, r"max_rows=-1"),
    ({"state_initial_values": (0.0,)}, r"state_initial_values has 1 values for 3 states"),
    ({"full_policy": "drop"}, r"full_policy='drop'\. Accepted: 'grow', 'evict', 'error'"),
    ({"full_policy": "evict"}, r"full_policy='evict' without max_rows never takes effect"),
    ({"table_seed": -1}, r"table_seed=-1 is no uint64"),
    ({"init_a": float("nan")}, r"init_a=nan"),
    ({"init_b": 1e39}, r"init_b=1e\+39\. Accepted: finite float32"),
    ({"init_kind": InitKind.BANK}, r"bank is no C-contiguous float32 numpy array"),
    ({"init_kind": InitKind.BANK, "bank": np.zeros((4, 2), np.float32)}, r"bank has shape \(4, 2\)"),
    ({"init_kind": InitKind.BANK, "bank": np.zeros((4, 3))}, r"bank is no C-contiguous float32"),
    ({"init_kind": 9}, r"init_kind=9\. Accepted: \['UNIFORM'"),
]


@pytest.mark.parametrize(("changes", "match"), BAD_SPECS)
def test_bad_specs(core: CoreName, changes: dict[str, Any], match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        ShardGroup([dataclasses.replace(make_specs()[0], **changes)], core=core)


def test_bad_groups(core: CoreName) -> None:
    for budget, threads in ((-1, 1), (0, 0)):
        with pytest.raises(ConfigError, match=f"host_budget_bytes={budget}, num_threads={threads}"):
            ShardGroup(make_specs(), host_budget_bytes=budget, num_threads=threads, core=core)


def test_a_group_may_have_no_tables(core: CoreName) -> None:
    group = ShardGroup([], core=core)  # a rank that owns none of the tables of a collection
    none = torch.zeros(0, dtype=torch.int64)
    plan = group.plan(none, torch.zeros(1, dtype=torch.int64), none, none)
    assert plan.status == PlanStatus.OK


def test_functions_name_the_argument(core: CoreName) -> None:
    with pytest.raises(IdError, match=r"mix64: ids has dtype torch\.int32"):
        mix64(torch.zeros(2, dtype=torch.int32), core=core)
    with pytest.raises(IdError, match=r"initial_rows: keys has shape \(2, 1\)"):
        initial_rows(make_specs()[0], torch.zeros(2, 1, dtype=torch.int64), core=core)


# ---- the host budget: the cores count their own bytes, but refuse alike --------------------------------------------


def one_table(num_slots: int) -> ShardSpec:
    return dataclasses.replace(make_specs()[0], num_slots=num_slots, dim=64)


def fill(group: ShardGroup, start: int, n: int) -> Any:
    return group.plan(
        keys(*range(start, start + n)), torch.tensor([0, n]), torch.tensor([0]), torch.empty(n, dtype=torch.int64)
    )


def test_a_batch_beyond_the_host_budget_is_refused_and_changes_nothing(core: CoreName) -> None:
    spec = one_table(1000)
    needed = ShardGroup([spec], core=core)
    first_bytes = needed.counters(0).host_bytes
    slots = Slots(spec, 1000)
    group = ShardGroup([spec], host_budget_bytes=first_bytes + 2**20, core=core)
    group.bind_slots(0, *slots.bind())
    assert fill(group, 0, 1000).status == PlanStatus.OK
    group.swap(1)
    group.commit(1)
    before = [a.tolist() for a in group.entries(0)]
    # The next 1,000 rows push the first out: their chunk of the store alone takes 2 MiB or so.
    plan = fill(group, 1000, 1000)
    assert (plan.status, plan.table, plan.ordinal) == (PlanStatus.HOST_BUDGET, 0, 0)
    assert plan.needed > plan.available >= 0
    assert [a.tolist() for a in group.entries(0)] == before
    assert group.counters(0).rejected == 1
    assert fill(group, 0, 1000).ordinal == 2  # what fits is served as before
    group.commit(2)
    with pytest.raises((CapacityError, StateError), match="host memory"):
        group.flush()
    counts, dirty = torch.empty(1, dtype=torch.int64), torch.empty(1000, dtype=torch.int64)
    group.flush_counts(counts)
    group.flush_slots(dirty)
    with pytest.raises((CapacityError, StateError), match="host memory"):
        group.flush_records(torch.zeros(1000 * (64 * 2 + 2)))
    group.flush_counts(counts)
    assert counts.tolist() == [1000]
    assert group.counters(0).host_bytes <= first_bytes + 2**20


def test_a_table_that_fits_its_slots_takes_no_store(core: CoreName) -> None:
    spec = one_table(5000)
    group = ShardGroup([spec], core=core)
    slots = Slots(spec, 5000)
    group.bind_slots(0, *slots.bind())
    empty = group.counters(0).host_bytes
    for start in range(0, 5000, 1000):
        plan = fill(group, start, 1000)
        group.swap(plan.ordinal)
        group.commit(plan.ordinal)
    index_only = group.counters(0).host_bytes
    assert index_only - empty < 5000 * 120  # 516 bytes a row would be the records
    group.flush()
    assert group.counters(0).host_bytes - index_only >= 5000 * 500
