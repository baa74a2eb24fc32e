"""What must never change between versions, cores and devices: owners of ids, initial rows, slot decisions.

python -m tests.golden.values   # writes the files anew: only if a change of stored tables is meant
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import torch

from hybridrec.native import ShardGroup, initial_rows, mix64, table_seed
from hybridrec.native.core import CoreName
from hybridrec.native.protocol import InitKind, ShardSpec

FOLDER = Path(__file__).parent
WORLD_SIZES = (1, 2, 3, 4, 8, 16, 1024)
NUM_BATCHES = 40


def some_ids() -> list[int]:
    rng = random.Random("golden")
    return [0, 1, -1, 2, 2**31, 2**53 + 1, 2**63 - 1, -(2**63), *(rng.randrange(-(2**63), 2**63) for _ in range(24))]


def spec(name: str = "user", kind: InitKind = InitKind.UNIFORM, a: float = -0.1, b: float = 0.1) -> ShardSpec:
    return ShardSpec(
        name=name,
        dim=3,
        num_row_states=1,
        num_row_wise_states=1,
        state_initial_values=(0.5, 0.25),
        num_slots=6,
        planned_rows=20,
        max_rows=15 if name == "evicting" else 0,
        full_policy="evict" if name == "evicting" else "grow",
        table_seed=table_seed(7, name),
        init_kind=kind,
        init_a=a,
        init_b=b,
    )


def routing(core: CoreName) -> Any:
    """Id -> key, and its owner at every world size."""
    keys = mix64(torch.tensor(some_ids()), core=core).tolist()
    owners = {id_: [(key % 2**64) % w for w in WORLD_SIZES] for id_, key in zip(some_ids(), keys, strict=True)}
    return {
        "world sizes": list(WORLD_SIZES),
        "keys": dict(zip(map(str, some_ids()), keys, strict=True)),
        "owners": {str(id_): of_world for id_, of_world in owners.items()},
    }


def rows(core: CoreName) -> Any:
    """Initial rows, float32 in hexadecimal."""
    ids = some_ids()[:12]
    result: dict[str, Any] = {"seeds": {name: table_seed(7, name, core=core) for name in ("user", "", "商品")}}
    for kind, a, b in ((InitKind.UNIFORM, -0.1, 0.1), (InitKind.NORMAL, 0.0, 0.02), (InitKind.CONSTANT, 0.5, 0.0)):
        values = initial_rows(spec("user", kind, a, b), mix64(torch.tensor(ids), core=core), core=core)
        result[kind.name] = {str(i): [x.hex() for x in row] for i, row in zip(ids, values.tolist(), strict=True)}
    return result


def slots(core: CoreName) -> Any:
    """Every decision of a group of two tables over batches that insert, hit, evict from slots and from the store."""
    rng = random.Random("slots")
    specs = [spec("user"), spec("evicting")]
    group = ShardGroup(specs, core=core)
    memory = [(torch.zeros(6, 3), [torch.zeros(6, 3)], [torch.zeros(6)]) for _ in specs]
    for t, arrays in enumerate(memory):
        group.bind_slots(t, *arrays)
    ids = some_ids()
    batches = []
    for _ in range(NUM_BATCHES):
        counts = [rng.randrange(6), rng.randrange(6)]
        batch = [ids[min(len(ids) - 1, int(rng.expovariate(0.12)))] for _ in range(sum(counts))]
        placed = torch.full((len(batch),), -1)
        offsets = torch.tensor([0, counts[0], sum(counts)])
        keys = mix64(torch.tensor(batch, dtype=torch.int64), core=core)
        plan = group.plan(keys, offsets, torch.tensor([0, 1]), placed)
        if plan.status == 0:
            group.swap(plan.ordinal)
            group.commit(plan.ordinal)
        taken = placed.tolist() if plan.status == 0 else None  # of a refusal nothing is promised
        batches.append({"ids": batch, "offsets": offsets.tolist(), "slots": taken, "plan": [int(x) for x in plan]})
    weights = [[[float(x).hex() for x in row] for row in arrays[0].tolist()] for arrays in memory]
    # how much memory a core takes is its own matter
    counters = [{k: v for k, v in group.counters(t)._asdict().items() if k != "host_bytes"} for t in range(2)]
    return {"batches": batches, "counters": counters, "weights": weights}


GOLDEN = {"routing": routing, "rows": rows, "slots": slots}


def stored(name: str) -> Any:
    return json.loads((FOLDER / f"{name}.json").read_text(encoding="utf-8"))


def main() -> None:
    for name, compute in GOLDEN.items():
        text = json.dumps(compute("reference"), indent=None, separators=(",", ":"), ensure_ascii=True)
        (FOLDER / f"{name}.json").write_text(text.replace("},", "},\n").replace("],", "],\n") + "\n", encoding="utf-8")


if __name__ == "__main__":
    np.seterr(all="raise")
    main()
