"""One rank of three, started by itself: saves, trains on, and saves again, when one of them is killed.

Arguments: rank, port, folder, how it saves ("save", "Saving", "Checkpointer"), the strike as JSON. Survivors leave
``told_RANK.json``.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from hybridrec import BackendError, checkpoint
from tests.checkpoint.runs import build
from tests.checkpoint.strikes import Strike, Striker
from tests.distributed.pipelines import all_batches, mine
from tests.distributed.scenario import Scenario

WORLD_SIZE = 3
SCENARIO = Scenario(optimizer="adagrad", steps=8, ids_per_table=40)
EVERY = 3


def save_again(kind: str, snapshots: Path, model: Any, pipeline: Any, batches: Any) -> None:
    """The snapshot that does not come to its end."""
    what = snapshots, model, pipeline._optimizer
    if kind == "save":
        checkpoint.save(*what, pipeline=pipeline)
    elif kind == "Saving":
        saving = checkpoint.Saving(*what, pipeline=pipeline)
        saving.start()
        while not saving.is_written:
            time.sleep(0.01)
        saving.finish()
    else:
        with checkpoint.Checkpointer(*what, pipeline, every=EVERY) as checkpointer:
            while True:
                pipeline.progress(batches)
                checkpointer.after_batch()


def main() -> None:
    rank, port, folder, kind, strike = int(sys.argv[1]), sys.argv[2], Path(sys.argv[3]), sys.argv[4], sys.argv[5]
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=WORLD_SIZE)
    model, pipeline = build(SCENARIO)
    batches = iter(mine(SCENARIO, all_batches(SCENARIO)))
    for _ in range(EVERY):
        pipeline.progress(batches)
    checkpoint.save(folder / "snapshots", model, pipeline._optimizer, pipeline=pipeline)
    pipeline.progress(batches)
    if (given := Strike(**json.loads(strike))).rank == rank:
        Striker(given, folder, lambda target: [os.getpid()]).arm()
    try:
        save_again(kind, folder / "snapshots", model, pipeline, batches)
    except BackendError as e:
        died = json.loads((folder / "strikes").read_text())["time"]
        (folder / f"told_{rank}.json").write_text(json.dumps({"seconds": time.time() - died, "error": str(e)}))
        os._exit(3)
    os._exit(4)


if __name__ == "__main__":
    main()
