"""A signal that reaches a job in a chosen stage of training, saving or loading: before it, in it, or after it."""

from __future__ import annotations

import itertools
import json
import os
import random
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from hybridrec.cache.swap import HostMemorySwapper
from hybridrec.checkpoint import Checkpointer, exchange, files, saving, snapshot
from hybridrec.distributed.hybrid_train_pipeline import HybridTrainPipelineSparseDist
from hybridrec.distributed.lookup import PooledLookup
from hybridrec.distributed.sharded_collection import ShardedHashCollection
from hybridrec.native import ShardGroup

Matches = Callable[..., bool]


def _is_of_rows(file: files.HashedFile, *args: Any, **kwargs: Any) -> bool:
    return file._name.startswith("rows/")


def _is_manifest(folder: Path, name: str, *args: Any) -> bool:
    return name == saving.MANIFEST


def _always(*args: Any, **kwargs: Any) -> bool:
    return True


TRAINING: dict[str, tuple[Any, str, Matches]] = {
    "load": (HybridTrainPipelineSparseDist, "_load", _always),
    "copy": (HybridTrainPipelineSparseDist, "_copy", _always),
    "dist": (ShardedHashCollection, "input_dist", _always),
    "map": (ShardedHashCollection, "map_batch", _always),
    "swap": (HostMemorySwapper, "swap", _always),
    "forward": (PooledLookup, "compute", _always),
    "backward": (HybridTrainPipelineSparseDist, "_backward", _always),
    "commit": (PooledLookup, "update", _always),
    "optimizer": (HybridTrainPipelineSparseDist, "_optimizer_step", _always),
}
SAVING: dict[str, tuple[Any, str, Matches]] = {
    "list": (ShardGroup, "export_begin", _always),
    "export": (ShardGroup, "export_next", _always),
    "rows": (files.HashedFile, "write", _is_of_rows),
}
SAVING_BY_RANK_0: dict[str, tuple[Any, str, Matches]] = {
    "begin": (snapshot, "begin", _always),
    "manifest": (saving, "write_file", _is_manifest),
    "publish": (snapshot, "publish", _always),
    "latest": (snapshot, "replace_file", _always),
    "remove": (snapshot, "remove_folder", _always),
}
TALKING: dict[str, tuple[Any, str, Matches]] = {
    "told": (exchange.Ranks, "gather", _always),
    "agree": (Checkpointer, "_agree", _always),
}
"""Where a rank that dies leaves the others waiting."""
LOADING: dict[str, tuple[Any, str, Matches]] = {"import": (ShardGroup, "import_rows", _always)}
STAGES = TRAINING | SAVING | SAVING_BY_RANK_0 | LOADING | TALKING


@dataclass(frozen=True, kw_only=True)
class Strike:
    """One signal."""

    stage: str
    """Of `STAGES`, or "moment": ``when`` seconds after the first batch."""
    number: int = 1
    """The n-th call."""
    when: float = 0.0
    """0: before the call, 1: after it; between: after this share of the time that the call before took."""
    rank: int = 0
    """Whose call."""
    target: str = "one"
    """Who gets the signal: that rank; "all" ranks; the "job": all ranks and their launcher; the "launcher"."""
    signal: str = "SIGKILL"
    restart: int = 0
    """In which life of the job, where its launcher starts it anew."""


class Striker:
    """Sends it, and writes down where it did: ``folder/strikes``, a line a strike."""

    def __init__(self, strike: Strike, folder: Path, pids: Callable[[str], list[int]]) -> None:
        self._strike, self._folder, self._pids = strike, folder, pids
        self._lock, self._is_over, self._seconds = threading.Lock(), False, 0.0
        self._calls = itertools.count(1)  # files are written by several threads

    def arm(self) -> None:
        if self._strike.stage == "moment":
            self._arm_moment()
            return
        owner, name, matches = STAGES[self._strike.stage]
        original: Callable[..., Any] = getattr(owner, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            if not matches(*args, **kwargs):
                return original(*args, **kwargs)
            if next(self._calls) == self._strike.number:
                return self._struck(original, *args, **kwargs)
            start = time.perf_counter()
            result = original(*args, **kwargs)
            self._seconds = time.perf_counter() - start
            return result

        setattr(owner, name, call)

    def _arm_moment(self) -> None:
        original = HybridTrainPipelineSparseDist.progress

        def progress(pipeline: HybridTrainPipelineSparseDist, iterator: Any) -> Any:
            if next(self._calls) == 1:
                threading.Timer(self._strike.when, self._hit, ("moment",)).start()
            return original(pipeline, iterator)

        HybridTrainPipelineSparseDist.progress = progress  # type: ignore[method-assign]

    def _struck(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        when = self._strike.when
        if when == 0.0:
            self._hit("before")
        elif when < 1.0:
            threading.Timer(when * self._seconds, self._hit, ("within",)).start()
        result = original(*args, **kwargs)
        self._hit("after")
        return result

    def _hit(self, position: str) -> None:
        with self._lock:
            if self._is_over:
                return
            self._is_over = True
            told = asdict(self._strike) | {"position": position, "time": time.time()}
            with open(self._folder / "strikes", "a") as file:
                file.write(json.dumps(told) + "\n")
            for pid in self._pids(self._strike.target):
                os.kill(pid, signal.Signals[self._strike.signal])


def drawn(rng: random.Random, stage: str, target: str, world_size: int, **kwargs: Any) -> Strike:
    """A strike at a random call of a stage, early enough for any run to reach it."""
    often = {"rows": 4, "export": 4, "list": 4} | dict.fromkeys((*SAVING_BY_RANK_0, *LOADING), 1)
    if stage == "moment":
        return Strike(stage=stage, when=rng.random() / 2, rank=rng.randrange(world_size), target=target, **kwargs)
    return Strike(
        stage=stage,
        number=rng.randint(1, often.get(stage, 15)),
        when=rng.choice((0.0, rng.random(), 1.0)),
        rank=0 if stage in SAVING_BY_RANK_0 else rng.randrange(world_size),
        target=target,
        **kwargs,
    )
