"""What is checked: the real lookup, transaction log, swapper, kernels and native core of one collection on one rank.

A canary fills memory that nobody may read: free slots, staging buffers when they are lent. Any bit of it in a lookup,
a row or a state differs from the oracle.
"""

from __future__ import annotations

from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import Tensor
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from device_backends.cpu import CpuBackend
from hybridrec.backend import resolve_backend
from hybridrec.cache import StagedSwapper
from hybridrec.distributed.lookup import PooledLookup
from hybridrec.distributed.placement import Placement, ShardPlacement
from hybridrec.distributed.shard_table import ShardTable
from hybridrec.native import mix64, table_seed, unmix64
from hybridrec.native.protocol import ShardSpec
from hybridrec.store.row_state_layout import RowStateLayout
from tests.model_check.case import Case, CheckedBatch
from tests.model_check.oracle import UnlimitedTables, kernel_of, require_equal
from tests.model_check.scheduler import Scheduler, WrongSchedule

CANARY = 0xFF
GROUP_CALLS = (
    "plan",
    "swap",
    "gather_loads",
    "scatter_victims",
    "commit",
    "undo",
    "flush",
    "flush_slots",
    "flush_records",
    "read_plan",
    "read_rows",
    "resize_slots",
)


class StagedOnHost(CpuBackend):
    """The host as a device that must be staged: every half of a swap is a call of its own."""

    is_host_memory = False


TIERS = ("host", "staged", "npu")


def poison(tensor: Tensor) -> None:
    """Fill a tensor with the canary."""
    tensor.view(-1).view(torch.uint8).fill_(CANARY) if tensor.is_contiguous() else tensor.fill_(torch.nan)


class World:
    """A `PooledLookup` under a scheduler, beside its oracle."""

    def __init__(self, case: Case, threads: Scheduler, *, tier: str, core: str, has_canary: bool = True) -> None:
        self.case, self.threads, self.tier, self.core = case, threads, tier, core
        self._has_canary = has_canary
        self.device = torch.device("npu" if tier == "npu" else "cpu")
        self.oracle = UnlimitedTables(case, self.device)
        backend = StagedOnHost() if tier == "staged" else resolve_backend(self.device.type)
        groups = [[self._shard_table(t) for t in group] for group in self.oracle.groups]
        with mock.patch("hybridrec.native.shard_group.serving_core", lambda: core):
            self.lookup = PooledLookup(
                groups,
                is_weighted=case.is_weighted,
                device=self.device,
                backend=backend,
                rank=0,
                world_size=1,
                host_budget_bytes=0,
            )
        self.backend = backend
        self.lookup.growth.batches_in_flight = case.depth
        self.log, self.group = self.lookup.log, self.lookup.log.group
        self.table_of = {name: t for t, name in enumerate(self.lookup.table_names)}  # name -> index in the lookup
        self._keys = [f for features in self.oracle.features for f in features]
        self._universe = torch.tensor(case.universe, dtype=torch.int64)
        self._unseen: list[tuple[Tensor, Tensor, str]] = []
        if has_canary:
            for t in range(len(case.tables)):
                arrays = self.lookup.table_kernels.slot_arrays(t)
                for array in (arrays.weights, *arrays.row_states, *arrays.row_wise_states):
                    array.fill_(torch.nan) if tier == "npu" else poison(array)
        if tier == "npu":
            backend.synchronize(self.device)
        self._put_points()

    def _shard_table(self, t: int) -> ShardTable:
        case, table, optimizer = self.case, self.case.tables[t], self.case.optimizers[t]
        layout = RowStateLayout(table.dim, optimizer.row_states())
        placement = Placement.HOST if case.grows else Placement.CACHED
        return ShardTable(
            name=table.name,
            spec=ShardSpec(
                name=table.name,
                dim=table.dim,
                num_row_states=len(layout.row_states),
                num_row_wise_states=len(layout.row_wise_states),
                state_initial_values=layout.initial_values,
                num_slots=case.slots[t],
                planned_rows=len(case.universe),
                max_rows=case.quota,
                full_policy="evict" if case.quota else "grow",
                table_seed=table_seed(table.seed, table.name),
                init_a=-0.1,
                init_b=0.1,
            ),
            placed=ShardPlacement(
                placement=placement, num_slots=case.slots[t], planned_rows=len(case.universe), max_rows=case.quota
            ),
            layout=layout,
            optimizer=optimizer,
            num_features=len(table.features),
            kernel=kernel_of(case, t, self.device),
        )

    # ---- points and canaries -------------------------------------------------------------------------------------

    def _put_points(self) -> None:
        """Stop at every call that another thread could come between."""
        self.log.lock, self.log._news = self.threads.lock(), self.threads.condition()
        for name in GROUP_CALLS:
            self._before(self.group, name)
        if isinstance(self.log.swapper, StagedSwapper):
            for ring in (self.log.swapper._loads, self.log.swapper._victims):
                self._before(ring, "take")
                self._before(ring, "give_back")
                if self._has_canary:
                    self._fill_what_is_lent(ring)
            self._before(self.log.swapper, "_write_slots")
            self._before(self.log.swapper, "_read_slots")

    def _before(self, owner: Any, name: str) -> None:
        real = getattr(owner, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            self.threads.point(name)
            return real(*args, **kwargs)

        setattr(owner, name, call)

    @staticmethod
    def _fill_what_is_lent(ring: Any) -> None:
        take = ring.take

        def filled(num: int) -> Tensor:
            buffer: Tensor = take(num)
            poison(ring._lent)
            return buffer

        ring.take = filled

    def poison_free_slots(self) -> None:
        """No batch may be planned and not moved. Not on a device, where this would itself be a use of the slots."""
        if not self._has_canary or self.tier == "npu":
            return
        for t in range(len(self.case.tables)):
            arrays = self.lookup.table_kernels.slot_arrays(t)
            is_free = torch.ones(arrays.weights.shape[0], dtype=torch.bool)
            slots = torch.from_numpy(np.asarray(self.group.entries(t)[3]).copy())
            is_free[slots[slots >= 0]] = False
            for array in (arrays.weights, *arrays.row_states, *arrays.row_wise_states):
                array.view(torch.int32)[is_free] = -1  # 0xFF.. in every byte

    # ---- what is fed and seen ------------------------------------------------------------------------------------

    def keys_of(self, batch: CheckedBatch) -> KeyedJaggedTensor:
        """What this rank owns of a batch: all of it."""
        bags = [bag for f in self._keys for bag in batch.bags[f]]
        entries = [entry for bag in bags for entry in bag]
        return KeyedJaggedTensor(
            keys=[str(f) for f in self._keys],
            values=mix64(torch.tensor([i for i, _ in entries], dtype=torch.int64)),
            lengths=torch.tensor([len(bag) for bag in bags], dtype=torch.int64),
            weights=torch.tensor([w for _, w in entries], dtype=torch.float32) if self.case.is_weighted else None,
            stride=len(batch.bags[0]),
        )

    def see(self, what: str, pooled: Tensor, expected: Tensor) -> None:
        """A lookup's result. On a device it is looked at in the end: looking now would order streams."""
        if self.tier == "npu":
            self._unseen.append((pooled.detach().clone(), expected, what))
        else:
            require_equal(what, pooled.detach().numpy(), expected.numpy())

    def check_rows(self, live: list[set[int]]) -> None:
        """Every row is there once, where the group says, and equals the oracle's; no other id has one.

        Args:
            live: [T] ids that must live: committed, or in flight. No batch may be planned and not moved.
        """
        if self.tier == "npu":
            self.backend.synchronize(self.device)
            for pooled, expected, what in self._unseen:
                require_equal(what, pooled.cpu().numpy(), expected.numpy())
            self._unseen.clear()
        if self.core == "compiled":
            self.group._core._group.check()
        for t, table in enumerate(self.case.tables):
            self._check_table(t, self.table_of[table.name], live[t])
        if self.tier == "npu":
            self.backend.synchronize(self.device)

    def _check_table(self, t: int, place: int, live: set[int]) -> None:
        name = self.case.tables[t].name
        keys, rows, scores, slots, _ = (np.asarray(a) for a in self.group.entries(place))
        ids = unmix64(torch.from_numpy(np.ascontiguousarray(keys))).tolist()
        resident = slots[slots >= 0]
        if (
            len(set(ids)) != len(ids)
            or len(set(rows.tolist())) != len(rows)
            or len(set(resident.tolist())) != len(resident)
        ):
            raise WrongSchedule(f"table {name}: ids {ids}, rows {rows}, slots {slots} are no bijection")
        if set(ids) != live:
            raise WrongSchedule(f"table {name}: ids {sorted(ids)} live, not {sorted(live)}")
        if self.case.quota and dict(zip(ids, scores.tolist(), strict=True)) != self.oracle.live(t):
            raise WrongSchedule(
                f"table {name}: scores {dict(zip(ids, scores, strict=True))}, not {self.oracle.live(t)}"
            )
        arrays = self.lookup.table_kernels.slot_arrays(place)
        columns = [arrays.weights, *arrays.row_states, *(a.unsqueeze(1) for a in arrays.row_wise_states)]
        in_slots = torch.cat(columns, 1).cpu().numpy()
        records = np.empty((len(ids), in_slots.shape[1]), np.float32)
        records[slots >= 0] = in_slots[resident]
        records[slots < 0] = self.group.read_records(place, np.ascontiguousarray(rows[slots < 0].astype(np.uint32)))
        position = {id_: row for row, id_ in enumerate(self.case.universe)}
        expected = self.oracle.records(t)[[position[i] for i in ids]]
        if records.tobytes() != expected.tobytes():
            for id_, got, right, slot in zip(ids, records, expected, slots.tolist(), strict=True):
                require_equal(f"table {name}, id {id_}, slot {slot}", got, right)

    def check_no_pins(self) -> None:
        """All batches are final."""
        for stats in self.lookup.stats():
            if stats.pins:
                raise WrongSchedule(f"pins after the last batch: {stats}")
