"""Drives shard groups and their model through the same calls and compares everything after each one."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from hybridrec.errors import HybridRecError, StateError
from hybridrec.native import ShardGroup, has_compiled_core
from hybridrec.native.protocol import InitKind, Plan, PlanStatus, ShardSpec
from tests.property import plain
from tests.property.oracle import GroupModel

EXTREME_IDS = (0, -1, -(2**63), 2**63 - 1)


class DisagreementError(Exception):
    """A core did something else than the model says."""


def make_specs(policy: str = "grow", *, slots: Sequence[int] = (7, 5), max_rows: int = 9) -> list[ShardSpec]:
    """Two tiny tables: uniform rows with all kinds of states, and a bank without any."""
    bank = np.random.default_rng(7).standard_normal((5, 2)).astype(np.float32)
    quota = 0 if policy == "grow" else max_rows
    return [
        ShardSpec(
            name="uniform",
            dim=3,
            num_row_states=1,
            num_row_wise_states=2,
            state_initial_values=(0.5, 0.25, -1.0),
            num_slots=slots[0],
            planned_rows=6,
            max_rows=quota,
            full_policy=policy,
            table_seed=plain.table_seed(3, "uniform"),
            init_a=-0.5,
            init_b=1.5,
        ),
        ShardSpec(
            name="bank",
            dim=2,
            num_row_states=0,
            num_row_wise_states=0,
            state_initial_values=(),
            num_slots=slots[1],
            planned_rows=3,
            table_seed=plain.table_seed(3, "bank"),
            init_kind=InitKind.BANK,
            bank=bank,
        ),
    ]


class Slots:
    """The slots of one table. Fresh memory is NaN: a row that was never put there shows."""

    def __init__(self, spec: ShardSpec, num_slots: int) -> None:
        self.weights = torch.full((num_slots, spec.weight_words), torch.nan)
        self.row_states = [torch.full((num_slots, spec.dim), torch.nan) for _ in range(spec.num_row_states)]
        self.row_wise = [torch.full((num_slots,), torch.nan) for _ in range(spec.num_row_wise_states)]

    def bind(self) -> tuple[torch.Tensor, list[torch.Tensor], list[torch.Tensor]]:
        return self.weights, self.row_states, self.row_wise

    def columns(self) -> list[torch.Tensor]:
        return [self.weights, *self.row_states, *(a[:, None] for a in self.row_wise)]

    def read(self, slots: torch.Tensor) -> torch.Tensor:
        return torch.cat([column[slots] for column in self.columns()], 1)

    def write(self, slots: torch.Tensor, records: torch.Tensor) -> None:
        for column, part in zip(self.columns(), records.split([c.shape[1] for c in self.columns()], 1), strict=True):
            column[slots] = part


class System:
    """One core under test: a group and the memory of its slots."""

    def __init__(self, name: str, group: ShardGroup, specs: list[ShardSpec]) -> None:
        self.name, self.group, self.specs = name, group, specs
        self.slots = [Slots(spec, spec.num_slots) for spec in specs]
        self.leaving: dict[int, torch.Tensor] = {}  # ordinal -> records of victims that the group does not have yet
        self.bind()

    def bind(self) -> None:
        for t, slots in enumerate(self.slots):
            self.group.bind_slots(t, *slots.bind())

    def grow(self, table: int, num_slots: int) -> None:
        self.group.resize_slots(table, num_slots)
        grown = Slots(self.specs[table], num_slots)
        old = self.slots[table]
        n = torch.arange(len(old.weights))
        grown.write(n, old.read(n))
        self.slots[table] = grown
        self.bind()

    def counts(self, ordinal: int) -> list[list[int]]:
        counts = torch.empty((len(self.specs), 2), dtype=torch.int64)
        self.group.swap_counts(ordinal, counts)
        return counts.tolist()

    def staged(self, ordinal: int, plan: Plan) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Per table, the slots of loads and of dirty victims."""
        loads = torch.empty(plan.num_loads + plan.num_inits, dtype=torch.int64)
        victims = torch.empty(plan.num_write_backs, dtype=torch.int64)
        self.group.swap_slots(ordinal, loads, victims)
        counts = self.counts(ordinal)
        return list(loads.split([c[0] for c in counts])), list(victims.split([c[1] for c in counts]))

    def scatter(self, ordinal: int, plan: Plan) -> None:
        """Victims that were in their slots until now, or were read out of them by `gather`."""
        victims = self.leaving.pop(ordinal, None)
        self.group.scatter_victims(ordinal, self._victims(ordinal, plan) if victims is None else victims)

    def gather(self, ordinal: int, plan: Plan, *, victims_are_left: bool) -> None:
        if plan.num_write_backs and not victims_are_left:
            self.leaving[ordinal] = self._victims(ordinal, plan)
        loads, _ = self.staged(ordinal, plan)
        widths = [sum(c.shape[1] for c in slots.columns()) for slots in self.slots]
        sizes = [len(part) * width for part, width in zip(loads, widths, strict=True)]
        staging = torch.full((sum(sizes),), torch.nan)
        self.group.gather_loads(ordinal, staging)
        for slots, part, records, width in zip(self.slots, loads, staging.split(sizes), widths, strict=True):
            slots.write(part, records.view(-1, width))

    def _victims(self, ordinal: int, plan: Plan) -> torch.Tensor:
        _, victims = self.staged(ordinal, plan)
        return torch.cat([slots.read(v).reshape(-1) for slots, v in zip(self.slots, victims, strict=True)])


class Driver:
    """Every public method is one call to all systems and the model, and a comparison of all that can be seen."""

    def __init__(self, groups: dict[str, Callable[[list[ShardSpec]], ShardGroup]], specs: list[ShardSpec]) -> None:
        self.specs = specs
        self.model = GroupModel(specs)
        self.systems = [System(name, make(specs), specs) for name, make in groups.items()]
        self.plans: dict[int, Plan] = {}
        self.num_operations = 0

    # ---- calls ---------------------------------------------------------------------------------------------------

    def plan(self, ids: list[list[int]], *, is_aside: bool = False) -> Plan:
        """One batch: per feature its ids; features 0 and 2 are of table 0, feature 1 of table 1."""
        keys = [[plain.signed(plain.mix64(i)) for i in feature] for feature in ids]
        expected, slots = self.model.plan([keys[0] + keys[2], keys[1]], is_aside=is_aside)
        offsets = [0, *np.cumsum([len(k) for k in keys]).tolist()]
        keys_N = torch.tensor([key for k in keys for key in k], dtype=torch.int64)
        for system in self.systems:
            slots_N = torch.full_like(keys_N, -7)
            counts = [torch.full((2,), -7)] if is_aside else []
            batch = keys_N, torch.tensor(offsets), torch.tensor([0, 1, 0]), slots_N
            plan = self._call(system, "plan_aside" if is_aside else "plan", *batch, *counts)
            if is_aside and plan.status == PlanStatus.OK:
                unique = [len(table.batch(plan.ordinal).rows) for table in self.model.tables]
                self._same(system, "unique counts", counts[0].tolist(), unique)
            self._same(system, "plan", tuple(plan), tuple(expected))
            if plan.status == PlanStatus.OK:
                first, second, third = slots_N.split([len(k) for k in keys])
                self._same(system, "slots of table 0", [*first.tolist(), *third.tolist()], slots[0])
                self._same(system, "slots of table 1", second.tolist(), slots[1])
        if expected.status == PlanStatus.OK:
            self.plans[expected.ordinal] = expected
        self.check()
        return expected

    def swap(self, ordinal: int) -> None:
        self._step("swap", ordinal, is_legal=self.model.can_swap(ordinal))

    def swap_staged(self, ordinal: int, *, gather_first: bool = False) -> None:
        """The way of a device that is not host memory: scatter what leaves, gather what comes, in either order."""
        halves = [self.gather, self.scatter] if gather_first else [self.scatter, self.gather]
        for half in halves:
            half(ordinal)

    def scatter(self, ordinal: int) -> None:
        self._move_half("scatter_victims", ordinal, self.model.can_scatter(ordinal))

    def gather(self, ordinal: int) -> None:
        self._move_half("gather_loads", ordinal, self.model.can_gather(ordinal))

    def _move_half(self, call: str, ordinal: int, is_legal: bool) -> None:
        if self.model.has_no_moves(ordinal):
            return
        victims_are_left = ordinal in self.model.is_scattered
        for system in self.systems:
            if not is_legal:
                self._call(system, call, ordinal, torch.empty(1000), is_legal=False)
            elif call == "scatter_victims":
                self._guard(system, lambda s: s.scatter(ordinal, self.plans[ordinal]))
            else:
                self._guard(system, lambda s: s.gather(ordinal, self.plans[ordinal], victims_are_left=victims_are_left))
        if is_legal:
            {"scatter_victims": self.model.scattered, "gather_loads": self.model.gathered}[call](ordinal)
        self.check()

    def commit(self, ordinal: int) -> None:
        """Train the batch's rows in their slots, as a kernel would, and commit."""
        is_legal = self.model.can_commit(ordinal)
        if is_legal and self.model.tables[0].batch(ordinal).is_aside:
            if not self.model.can_read():
                return  # nobody writes records while rows of later batches are on their way
            self.flush()
            self._train_records(ordinal)
        elif is_legal:
            self._train(ordinal)
        self._step("commit", ordinal, is_legal=is_legal)

    def undo(self, ordinal: int) -> None:
        self._step("undo", ordinal, is_legal=self.model.can_undo(ordinal))

    def flush(self) -> None:
        is_legal = self.model.can_read()
        for system in self.systems:
            self._call(system, "flush", is_legal=is_legal)
        if is_legal:
            for table in self.model.tables:
                table.dirty.clear()
            self._check_records()
        self.check()

    def flush_staged(self) -> None:
        """The flush of a device that is not host memory."""
        is_legal = self.model.can_read()
        dirty = [[s for s, row in sorted(m.slots.items()) if row in m.dirty] for m in self.model.tables]
        for system in self.systems:
            counts = torch.empty(len(self.specs), dtype=torch.int64)
            self._call(system, "flush_counts", counts, is_legal=is_legal)
            if not is_legal:
                self._call(system, "flush_records", torch.empty(1000), is_legal=False)
                continue
            self._same(system, "counts of dirty slots", counts.tolist(), [len(d) for d in dirty])
            slots = torch.empty(sum(map(len, dirty)), dtype=torch.int64)
            self._call(system, "flush_slots", slots)
            self._same(system, "dirty slots", slots.tolist(), sum(dirty, []))
            parts = zip(system.slots, slots.split(counts.tolist()), strict=True)
            staging = torch.cat([memory.read(part).reshape(-1) for memory, part in parts])
            self._call(system, "flush_records", staging)
            self._call(system, "flush_records", staging, is_legal=False)
        if is_legal:
            for table in self.model.tables:
                table.dirty.clear()
            self._check_records()
        self.check()

    def resize(self, table: int, more: int) -> None:
        model = self.model.tables[table]
        new = model.num_slots + more
        is_legal = not any(model.pins(row) for row in model.slots.values())
        for system in self.systems:
            if is_legal:
                self._guard(system, lambda s: s.grow(table, new))
            else:
                self._call(system, "resize_slots", table, new, is_legal=False)
        if is_legal:
            model.free_slots += range(model.num_slots, new)
            model.num_slots = new
        self.check()

    def read(self, ids: list[list[int]]) -> None:
        keys = [[plain.signed(plain.mix64(i)) for i in feature] for feature in ids]
        per_table = [keys[0] + keys[2], keys[1]]
        uniques = [list(dict.fromkeys(k)) for k in per_table]
        expected = [
            np.array([self._value(t, key) for key in u], dtype=np.float32).reshape(len(u), spec.dim)
            for t, (u, spec) in enumerate(zip(uniques, self.specs, strict=True))
        ]
        for system in self.systems:
            self._read(system, keys, per_table, uniques, expected)
        self.check()

    # ---- inside --------------------------------------------------------------------------------------------------

    def _step(self, call: str, ordinal: int, *, is_legal: bool) -> None:
        for system in self.systems:
            self._call(system, call, ordinal, is_legal=is_legal)
        if is_legal:
            {"swap": self.model.swapped, "commit": self.model.commit, "undo": self.model.undo}[call](ordinal)
        self.check()

    def _train(self, ordinal: int) -> None:
        for t, table in enumerate(self.model.tables):
            rows = list(table.batch(ordinal).rows.values())
            slots = torch.tensor([table.slot_of(row) for row in rows], dtype=torch.int64)
            width = self._width(t)
            steps = np.random.default_rng([ordinal, t]).standard_normal((len(rows), width)).astype(np.float32)
            expected = np.array([table.values[row] for row in rows], dtype=np.float32).reshape(-1, width)
            for system in self.systems:
                found = system.slots[t].read(slots)
                self._same(system, f"rows of batch {ordinal} in their slots", found.tolist(), expected.tolist())
                system.slots[t].write(slots, found + torch.from_numpy(steps))
            for row, value in zip(rows, expected + steps, strict=True):
                table.values[row] = value

    def _train_records(self, ordinal: int) -> None:
        """The batch has no slots: its rows are read from the store and written there, and to slots they are in too."""
        for t, table in enumerate(self.model.tables):
            rows = list(table.batch(ordinal).rows.values())
            expected = np.array([table.values[row] for row in rows], dtype=np.float32).reshape(-1, self._width(t))
            steps = np.random.default_rng([ordinal, t]).standard_normal(expected.shape).astype(np.float32)
            resident = [i for i, row in enumerate(rows) if table.slot_of(row) >= 0]
            for system in self.systems:
                found, slots = self._call(system, "batch_rows", ordinal, t)
                self._same(system, f"rows of batch {ordinal}", found.tolist(), rows)
                self._same(system, f"slots of batch {ordinal}", slots.tolist(), [table.slot_of(row) for row in rows])
                records = self._call(system, "read_records", t, found)
                self._same(system, f"records of batch {ordinal}", records.tolist(), expected.tolist())
                self._call(system, "write_records", t, found, records + steps)
                system.slots[t].write(torch.from_numpy(slots[resident]), torch.from_numpy((records + steps)[resident]))
            for row, value in zip(rows, expected + steps, strict=True):
                table.values[row] = value

    def _read(
        self,
        system: System,
        keys: list[list[int]],
        per_table: list[list[int]],
        uniques: list[list[int]],
        expected: list[np.ndarray],
    ) -> None:
        keys_N = torch.tensor([key for k in keys for key in k], dtype=torch.int64)
        offsets = torch.tensor([0, *np.cumsum([len(k) for k in keys]).tolist()])
        index_N, counts = torch.full_like(keys_N, -7), torch.empty(2, dtype=torch.int64)
        handle = self._call(system, "read_plan", keys_N, offsets, torch.tensor([0, 1, 0]), index_N, counts)
        first, second, third = (part.tolist() for part in index_N.split([len(k) for k in keys]))
        self._same(system, "unique counts", counts.tolist(), [len(u) for u in uniques])
        for t, index in enumerate((first + third, second)):
            self._same(system, "index", [uniques[t][i] for i in index], per_table[t])
        is_legal = self.model.can_read()
        buffers = [torch.full((n + 1, s.dim), torch.nan) for n, s in zip(counts.tolist(), self.specs, strict=True)]
        self._call(system, "read_rows", handle, buffers, True, is_legal=is_legal)
        if is_legal:
            for t, buffer in enumerate(buffers):
                positions, slots = self._call(system, "read_resident", handle, t)
                buffer[positions] = system.slots[t].weights[slots]
                self._same(system, "rows read to a device", buffer[:-1].tolist(), expected[t].tolist())
                buffer[:-1] = torch.nan
            self._call(system, "read_rows", handle, buffers, False)
            for buffer, rows in zip(buffers, expected, strict=True):
                self._same(system, "rows read", buffer[:-1].tolist(), rows.tolist())
                self._same(system, "beyond the rows read", bool(buffer[-1].isnan().all()), True)
        self._call(system, "end_read", handle)

    def _value(self, table: int, key: int) -> np.ndarray:
        model = self.model.tables[table]
        live, _ = model.replay()
        return (model.values[live[key][0]] if key in live else model.initial(key))[: self.specs[table].dim]

    def _width(self, table: int) -> int:
        spec = self.specs[table]
        return spec.dim * (1 + spec.num_row_states) + spec.num_row_wise_states

    def _check_records(self) -> None:
        for t, model in enumerate(self.model.tables):
            live, _ = model.replay()
            rows = np.array([row for row, _ in live.values()], dtype=np.uint32)
            expected = [model.values[row].tolist() for row in rows.tolist()]
            for system in self.systems:
                self._same(system, "records", self._call(system, "read_records", t, rows).tolist(), expected)

    def check(self) -> None:
        """Compare all that can be seen without changing anything."""
        self.num_operations += 1
        for t, model in enumerate(self.model.tables):
            entries, counters = model.entries(), model.counters()
            for system in self.systems:
                found = list(zip(*(a.tolist() for a in self._call(system, "entries", t)), strict=True))
                self._same(system, f"entries of table {t}", found, entries)
                seen = self._call(system, "counters", t)._asdict()
                del seen["host_bytes"]
                self._same(system, f"counters of table {t}", seen, {name: counters[name] for name in seen})

    def _call(self, system: System, call: str, *args: Any, is_legal: bool = True) -> Any:
        if is_legal:
            return self._guard(system, lambda s: getattr(s.group, call)(*args))
        try:
            getattr(system.group, call)(*args)
        except StateError:
            return None
        raise DisagreementError(f"{system.name}: {call}{args} is not legal now and was not refused")

    def _guard(self, system: System, act: Callable[[System], Any]) -> Any:
        try:
            return act(system)
        except (HybridRecError, LookupError, ValueError, AssertionError) as e:
            raise DisagreementError(f"{system.name}: raised {type(e).__name__}: {e}") from e

    def _same(self, system: System, what: str, found: object, expected: object) -> None:
        if found != expected:
            raise DisagreementError(f"{system.name}: {what}\n  found    {found}\n  expected {expected}")


def random_batch(rng: random.Random, *, num_ids: int, longest: int) -> list[list[int]]:
    """Ids of three features; repetitions and extreme ids included."""
    ids = [*range(num_ids), *EXTREME_IDS]
    return [[rng.choice(ids) for _ in range(rng.randint(0, longest))] for _ in range(3)]


def run_random(driver: Driver, rng: random.Random, num_operations: int, *, num_ids: int = 12) -> None:
    """A random walk through legal and illegal calls."""
    while driver.num_operations < num_operations:
        random_operation(driver, rng, num_ids)


def random_operation(driver: Driver, rng: random.Random, num_ids: int) -> None:
    model = driver.model
    in_flight = model.in_flight()
    unmoved = [o for o in in_flight if not model.is_moved[o]]
    # Ordinals that were never planned, or are over, are tried too.
    some = rng.choice([*in_flight, *in_flight, rng.randint(1, model.ordinal + 1)])
    draw = rng.random()
    if draw < 0.33 and len(in_flight) < 5:
        longest = 8 if rng.random() < 0.05 else 2
        driver.plan(random_batch(rng, num_ids=num_ids, longest=longest), is_aside=rng.random() < 0.1)
    elif draw < 0.6 and unmoved:
        draw = rng.random()
        if draw < 0.4:
            driver.swap(unmoved[0])
        elif draw < 0.6:
            driver.swap_staged(unmoved[0], gather_first=rng.random() < 0.5)
        else:
            rng.choice([driver.scatter, driver.gather])(unmoved[0])
            if rng.random() < 0.1:
                driver.undo(unmoved[0])
    elif draw < 0.82 and in_flight:
        driver.commit(in_flight[0] if rng.random() < 0.8 else some)
    elif draw < 0.9:
        driver.undo(some)
    elif draw < 0.94:
        driver.read(random_batch(rng, num_ids=num_ids + 3, longest=3))
    elif draw < 0.97:
        rng.choice([driver.flush, driver.flush_staged])()
    elif draw < 0.972 and max(len(s.slots[0].weights) for s in driver.systems) < 9:
        driver.resize(rng.randrange(2), rng.randint(0, 2))
    elif draw > 0.98 and unmoved:
        rng.choice([driver.swap, driver.scatter, driver.gather])(rng.choice(unmoved))


def all_cores() -> dict[str, Callable[[list[ShardSpec]], ShardGroup]]:
    """Every core that is there, and the compiled one once more with threads."""
    groups: dict[str, Callable[[list[ShardSpec]], ShardGroup]] = {
        "reference": lambda specs: ShardGroup(specs, core="reference")
    }
    if has_compiled_core():
        groups["compiled"] = lambda specs: ShardGroup(specs, core="compiled")
        groups["compiled, 3 threads"] = lambda specs: ShardGroup(specs, core="compiled", num_threads=3)
    return groups
