"""One rank of the Little Demo, started by torchrun, which writes down what it computes and may be struck by signals.

Arguments: a folder, strikes as JSON, then the demo's own options. It leaves in the folder: ``losses_RANK``, a line a
batch; ``end_RANK.json``, the end of training as digests; ``left_RANK``, the exit statuses.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import runpy
import sys
from pathlib import Path
from typing import Any

import torch

from hybridrec import HybridTrainPipelineSparseDist
from hybridrec.checkpoint import Checkpointer, contents
from hybridrec.distributed.model_parts import dense_tensors
from tests.checkpoint.runs import records_of
from tests.checkpoint.strikes import Strike, Striker


def pids_in(folder: Path, rank: int, world_size: int, target: str) -> list[int]:
    """Whom a strike of this rank reaches, this process last."""
    others = [int((folder / f"pid_{r}").read_text()) for r in range(world_size) if r != rank]
    return {
        "one": [os.getpid()],
        "all": [*others, os.getpid()],
        "job": [os.getppid(), *others, os.getpid()],
        "launcher": [os.getppid()],
    }[target]


def write_losses(folder: Path, rank: int) -> None:
    """Of every training batch, with its number; a batch that is trained again, after a kill, has a line again."""
    original = HybridTrainPipelineSparseDist.progress

    def progress(pipeline: HybridTrainPipelineSparseDist, iterator: Any) -> Any:
        result = original(pipeline, iterator)
        if pipeline._model.training:
            loss = result[0] if isinstance(result, tuple) else result
            with open(folder / f"losses_{rank}", "a") as file:
                file.write(f"{pipeline.batches_committed} {loss.item().hex()}\n")
        return result

    HybridTrainPipelineSparseDist.progress = progress  # type: ignore[method-assign]


def digest_of(value: Any) -> str:
    """Of tensors, and plain values, in lists and dicts: every bit counts."""
    digest = hashlib.sha256()

    def add(part: Any) -> None:
        if isinstance(part, dict):
            for key in sorted(part, key=str):
                add((str(key), part[key]))
        elif isinstance(part, (list, tuple)):
            digest.update(f"{len(part)}:".encode())
            for one in part:
                add(one)
        elif isinstance(part, torch.Tensor):
            digest.update(f"{part.dtype}{list(part.shape)}".encode() + part.detach().cpu().numpy().tobytes())
        else:
            digest.update(repr(part).encode())

    add(value)
    return digest.hexdigest()


def end_of_training(pipeline: HybridTrainPipelineSparseDist, model: Any) -> dict[str, Any]:
    """What training ended with, on this rank."""
    pipeline.withdraw()
    return {
        "batches": pipeline.batches_committed,
        "rows": digest_of(records_of(model)),
        "written_back": sum(stats.write_backs for stats in model.module.ebc.stats()) > 0,
        "dense": digest_of(dict(dense_tensors(model))),
        "optimizer": digest_of(contents.optimizer_state(pipeline._optimizer)),
    }


def watch_demo(folder: Path, rank: int, *, in_background: bool) -> None:
    """Training is over when the demo evaluates."""
    from examples.little_demo import main

    original = main.evaluate

    def evaluate(pipeline: Any, model: Any, *args: Any) -> Any:
        (folder / f"end_{rank}.json").write_text(json.dumps(end_of_training(pipeline, model)))
        return original(pipeline, model, *args)

    main.evaluate = evaluate
    if in_background:
        main.Checkpointer = functools.partial(Checkpointer, in_background=True)  # type: ignore[misc, assignment]


def arm(folder: Path, strikes: list[Strike]) -> int:
    """Of this rank and this life; the rank."""
    rank, life = int(os.environ["RANK"]), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    (folder / f"pid_{rank}").write_text(str(os.getpid()))
    pids = functools.partial(pids_in, folder, rank, int(os.environ["WORLD_SIZE"]))
    for strike in strikes:
        if (strike.rank, strike.restart) == (rank, life):
            Striker(strike, folder, pids).arm()
    write_losses(folder, rank)
    return rank


def main() -> None:
    folder, strikes, in_background = Path(sys.argv[1]), json.loads(sys.argv[2]), sys.argv[3] == "background"
    rank = arm(folder, [Strike(**strike) for strike in strikes])
    watch_demo(folder, rank, in_background=in_background)
    sys.argv = ["examples.little_demo", *sys.argv[4:]]
    try:
        runpy.run_module("examples.little_demo", run_name="__main__", alter_sys=True)
    except SystemExit as e:
        (folder / f"left_{rank}").write_text(str(e.code))
        raise


if __name__ == "__main__":
    main()
