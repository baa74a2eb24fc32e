"""One rank of three, started by itself: trains until one of them is killed or stopped, then says what it was told.

Arguments: rank, port, depth, which rank goes, by which signal, a directory; "plain" instead of a depth trains without
a pipeline.
"""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from hybridrec import BackendError
from tests.distributed.pipelines import PipelinedModel, all_batches, build_pipelined, mine
from tests.distributed.scenario import build, device_rows
from tests.distributed.test_pipeline_life import SCENARIO

WORLD_SIZE = 3
BATCHES_BEFORE = 6


def main() -> None:
    rank, port, depth, victim, name, directory = sys.argv[1:]
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=int(rank), world_size=WORLD_SIZE)
    scenario = dataclasses.replace(SCENARIO, steps=12)
    batches = all_batches(scenario)

    def until_the_end() -> Any:
        for number in range(10**9):
            if rank == victim and number == BATCHES_BEFORE:
                time.sleep(1.0)
                Path(directory, "time").write_text(str(time.time()))
                os.kill(os.getpid(), signal.Signals[name])
            yield mine(scenario, [batches[number % len(batches)]])[0]

    iterator = until_the_end()
    try:
        if depth == "plain":
            slots = {t.name: device_rows(scenario, t, batches, WORLD_SIZE) for t in scenario.tables}
            dmp, optimizer = build(scenario, slots, PipelinedModel)
            for batch in iterator:
                optimizer.zero_grad()
                dmp(batch)[0].backward()
                optimizer.step()
        _, pipeline = build_pipelined(scenario, batches, int(depth))
        while True:
            pipeline.progress(iterator)
    except BackendError as e:
        told = time.time() - float(Path(directory, "time").read_text())
        answer = {"seconds": told, "error": str(e), "cause": str(e.__cause__)}
        Path(directory, f"rank_{rank}.json").write_text(json.dumps(answer))
        sys.exit(3)


if __name__ == "__main__":
    main()
