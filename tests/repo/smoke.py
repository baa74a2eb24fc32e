"""Use hybridrec as it is installed, outside of its checkout. The argument: which core must serve.

Run by test_packaging.py in a new environment, as ``python -c``: one table is planned, swapped, updated and read back.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch

import hybridrec
from hybridrec.backend import resolve_backend
from hybridrec.native import ShardGroup, has_compiled_core, initial_rows, mix64, table_seed, unmix64
from hybridrec.native.protocol import PlanStatus, ShardSpec

IDS = (0, -1, 7, 2**63 - 1, -(2**63), 7)
NUM_UNIQUE = 5
DIM = 4

assert Path(sys.prefix) in Path(hybridrec.__file__).parents, hybridrec.__file__
assert has_compiled_core() == (sys.argv[1] == "compiled")
assert resolve_backend("cpu").device_type == "cpu"

ids = torch.tensor(IDS)
keys = mix64(ids)
assert torch.equal(unmix64(keys), ids) and keys.unique().numel() == NUM_UNIQUE

spec = ShardSpec(
    name="table",
    dim=DIM,
    num_row_states=0,
    num_row_wise_states=0,
    state_initial_values=(),
    num_slots=NUM_UNIQUE,
    planned_rows=NUM_UNIQUE,
    table_seed=table_seed(0, "table"),
)
weights, slots = torch.zeros(NUM_UNIQUE, DIM), torch.empty(len(IDS), dtype=torch.int64)
group = ShardGroup([spec])
group.bind_slots(0, weights, [], [])
for step in (1, 2):
    plan = group.plan(keys, torch.tensor([0, len(IDS)]), torch.tensor([0]), slots)
    assert (plan.status, plan.ordinal, plan.num_unique) == (PlanStatus.OK, step, NUM_UNIQUE), plan
    group.swap(plan.ordinal)
    expected = initial_rows(spec, keys) + (step - 1)
    assert torch.equal(weights[slots], expected) and expected.unique().numel() > NUM_UNIQUE
    weights += 1
    group.commit(plan.ordinal)
