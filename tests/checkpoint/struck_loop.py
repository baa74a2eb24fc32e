"""One rank of a script whose loop is the one of docs/checkpoint.md, read from there; it may be struck by signals.

Arguments: a folder, strikes as JSON, a folder of snapshots. What it leaves is what `struck_demo` leaves.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests.checkpoint.jobs import ROOT
from tests.checkpoint.runs import build
from tests.checkpoint.strikes import Strike
from tests.checkpoint.struck_demo import arm, end_of_training
from tests.distributed.pipelines import all_batches, mine
from tests.distributed.scenario import Scenario

SCENARIO = Scenario(optimizer="adam", steps=30, ids_per_table=60)
EVERY = 5


def documented_loop() -> str:
    """The first example of the page, with numbers for a run that is this short."""
    block = re.search(r"```python\n(.*?)```", (ROOT / "docs" / "checkpoint.md").read_text(), re.DOTALL)
    if block is None or "every=1000" not in block[1] or '"snapshots"' not in block[1]:
        raise AssertionError("docs/checkpoint.md begins with another example")
    return block[1].replace("every=1000", f"every={EVERY}").replace('"snapshots"', "snapshots")


def run(snapshots: Path) -> dict[str, Any]:
    """From the newest snapshot to the end of the data."""
    model, pipeline = build(SCENARIO)

    def batches_from(first: int) -> Iterator[Any]:
        return iter(mine(SCENARIO, all_batches(SCENARIO)[first:]))

    names = {
        "model": model,
        "pipeline": pipeline,
        "optimizer": pipeline._optimizer,
        "snapshots": snapshots,
        "batches_from": batches_from,
    }
    with contextlib.suppress(StopIteration):
        exec(documented_loop(), names)
    return end_of_training(pipeline, model)


def main() -> None:
    folder, strikes, snapshots = Path(sys.argv[1]), json.loads(sys.argv[2]), Path(sys.argv[3])
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = arm(folder, [Strike(**strike) for strike in strikes])
    (folder / f"end_{rank}.json").write_text(json.dumps(run(snapshots)))
    (folder / f"left_{rank}").write_text("0")
    sys.stdout.flush()
    os._exit(0)  # gloo's threads can abort a process that takes itself apart


if __name__ == "__main__":
    main()
