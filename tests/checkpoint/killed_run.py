"""One rank of a run that saves and, told so, kills itself at the n-th call of a stage. Resumes if there is a snapshot.

Arguments: rank, world size, port, folder, stage ("none": runs to its end), number of the call; "deltas" to write some.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from hybridrec.cache.swap import HostMemorySwapper
from hybridrec.checkpoint import Checkpointer, delta_chain, delta_saving, files, snapshot
from hybridrec.distributed.hybrid_train_pipeline import HybridTrainPipelineSparseDist
from hybridrec.distributed.lookup import PooledLookup
from hybridrec.distributed.sharded_collection import ShardedHashCollection
from hybridrec.native import ShardGroup
from tests.checkpoint.runs import build, records_of
from tests.distributed.pipelines import all_batches, mine
from tests.distributed.scenario import Scenario

SCENARIO = Scenario(optimizer="adam", steps=20, ids_per_table=60)
STAGES: dict[str, tuple[Any, str]] = {
    "load": (HybridTrainPipelineSparseDist, "_load"),
    "distribute": (ShardedHashCollection, "input_dist"),
    "map": (ShardedHashCollection, "map_batch"),
    "swap": (HostMemorySwapper, "swap"),
    "forward": (PooledLookup, "compute"),
    "backward": (PooledLookup, "update"),
    "optimizer": (HybridTrainPipelineSparseDist, "_optimizer_step"),
    "export": (ShardGroup, "export_next"),
    "write": (files.HashedFile, "write"),
    "publish": (snapshot, "publish"),
    "latest": (snapshot, "replace_file"),
    "remove": (snapshot, "remove_folder"),
    "import": (ShardGroup, "import_rows"),
}
DELTA_STAGES: dict[str, tuple[Any, str]] = {
    "publish delta": (delta_saving, "publish_delta"),
    "newest": (delta_chain, "replace_file"),
    "unfinished": (delta_chain, "remove_folder"),
    "removed": (ShardGroup, "removed_ids"),
}
"""Of runs that write deltas, too."""
DELTAS = {"every": 8, "delta_every": 2}
"""How they do."""


def kill_at(stage: str, number: int) -> None:
    """End this process before the n-th call, or, of an even n, after it."""
    owner, name = (STAGES | DELTA_STAGES)[stage]
    original: Callable[..., Any] = getattr(owner, name)
    calls = 0

    def call(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        is_time = calls >= number
        if is_time and number % 2:
            os.kill(os.getpid(), signal.SIGKILL)
        result = original(*args, **kwargs)
        if is_time:
            os.kill(os.getpid(), signal.SIGKILL)
        return result

    setattr(owner, name, call)


def run(path: Path, **kwargs: Any) -> dict[str, Any]:
    """Train to the end, saving every four batches; the end as digests. ``kwargs``: of `Checkpointer`."""
    dmp, pipeline = build(SCENARIO)
    arguments = {"every": 4, "keep": 2} | kwargs
    with Checkpointer(path, dmp, pipeline._optimizer, pipeline, **arguments) as checkpointer:
        first = checkpointer.resume()
        batches = iter(mine(SCENARIO, all_batches(SCENARIO)[first:]))
        losses = []
        while pipeline.batches_committed < SCENARIO.steps and not checkpointer.is_stopping:
            losses.append(pipeline.progress(batches).item())
            checkpointer.after_batch()
    rows = [sorted((i, r.hex(), s) for i, (r, s) in table.items()) for table in records_of(dmp).values()]
    return {
        "first": first,
        "last": pipeline.batches_committed,
        "losses": losses,
        "rows": hashlib.sha256(json.dumps(rows).encode()).hexdigest(),
    }


def main() -> None:
    rank, world_size, port, folder, stage, number, *options = sys.argv[1:]
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=int(rank), world_size=int(world_size))
    if stage != "none":
        kill_at(stage, int(number))
    result = run(Path(folder), **(DELTAS if options == ["deltas"] else {}))
    Path(folder, f"rank_{rank}.json").write_text(json.dumps(result))
    os._exit(0)


if __name__ == "__main__":
    main()
