"""Bad luck on demand: random sleeps where threads and ranks meet, other ones on each rank. See "Timing" in the README.

`pytest --jitter SEED` puts the seed and this folder into the environment, where every Python process that a test
starts finds them. Nothing is imported for it: what is to be delayed is wrapped when something else imports it.

Each job of a rank draws anew how often each kind of place sleeps, from never to every second time, so that on one rank
the host thread is far ahead and on another far behind.
"""

from __future__ import annotations

import collections
import functools
import importlib.machinery
import os
import random
import sys
import threading
import time
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from pathlib import Path
from types import ModuleType
from typing import Any

SEED = "HYBRIDREC_TEST_JITTER"
"""Variable of the environment that holds the seed."""
SHORT_SECONDS, LONG_SECONDS = 0.03, 0.3
LONG_SHARE = 0.01
"""Of the sleeps: as long as a loaded machine keeps a thread from running."""
SHARES = (0.0, 0.1, 0.2, 0.5)
"""How often a kind of place may sleep, in one job."""
SWITCH_SECONDS = (0.0001, 0.005)
"""How long a thread may keep the interpreter while others wait for it; the second is Python's own."""

sleeps: collections.Counter[str] = collections.Counter()
"""Kind of place -> sleeps in this process."""
_random = random.Random()
_share: dict[str, float] = {}


def environment(seed: int) -> dict[str, str]:
    """What a process needs in its environment to be delayed."""
    folders = [str(Path(__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {SEED: str(seed), "PYTHONPATH": os.pathsep.join(folders)}


def begin(job: str, rank: int) -> None:
    """A job of a rank begins: the same seed, job and rank sleep alike, whatever ran before."""
    if SEED in os.environ:
        _random.seed(f"{os.environ[SEED]} {job} {rank}")
        _share.clear()
        sys.setswitchinterval(_random.choice(SWITCH_SECONDS))


def install() -> None:
    """Delay this process from now on. Objects that were imported from a module by name before stay as they are."""
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        begin(" ".join(sys.orig_argv[1:]), int(os.environ.get("RANK", "0")))
        sys.meta_path.insert(0, _Finder())
        _wrap(threading.Thread, "run", "thread")
        for name in _WRAPPED.keys() & sys.modules.keys():
            _WRAPPED[name](sys.modules[name])


def _sleep(kind: str) -> None:
    share = _share.setdefault(kind, _random.choice(SHARES))
    if _random.random() < share:
        sleeps[kind] += 1
        time.sleep(LONG_SECONDS if _random.random() < LONG_SHARE else _random.random() * SHORT_SECONDS)


def _late(function: Callable[..., Any], kind: str) -> Callable[..., Any]:
    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        _sleep(kind)
        try:
            return function(*args, **kwargs)
        finally:
            _sleep(f"after {kind}")

    return call


def _wrap(owner: Any, name: str, kind: str) -> None:
    setattr(owner, name, _late(vars(owner)[name], kind))


def _delay_jobs(module: ModuleType) -> None:
    """What the host thread does: late to begin, late to be done."""
    submit = module.HostThread.submit
    module.HostThread.submit = functools.wraps(submit)(lambda self, work: submit(self, _late(work, "job")))


def _delay_collectives(module: ModuleType) -> None:
    """Those that Python issues. As they are in the class: pybind's methods are bound by the descriptor alone."""

    def late(method: Any, name: str) -> Callable[..., Any]:
        def call(group: Any, *args: Any, **kwargs: Any) -> Any:
            _sleep("collective")
            return method.__get__(group)(*args, **kwargs)

        call.__name__ = name
        return call

    for name, method in list(vars(module.ProcessGroup).items()):
        if name in COLLECTIVES:
            setattr(module.ProcessGroup, name, late(method, name))


COLLECTIVES = (
    *("allreduce", "allgather", "_allgather_base", "all_gather_single", "alltoall_base", "all_to_all_single"),
    *("barrier", "broadcast", "gather", "_reduce_scatter_base", "reduce_scatter_single", "scatter"),
)
"""Methods of a process group, of any version of torch."""

_WRAPPED: dict[str, Callable[[ModuleType], None]] = {
    "torch.distributed.distributed_c10d": _delay_collectives,
    "hybridrec.distributed.host_thread": _delay_jobs,
    "hybridrec.distributed.hybrid_train_pipeline": lambda module: _wrap(
        module.HybridTrainPipelineSparseDist, "progress", "step"
    ),
    "hybridrec.checkpoint.files": lambda module: _wrap(module.HashedFile, "write", "file"),
    "hybridrec.checkpoint.saving": lambda module: _wrap(module.Saving, "_write_in_background", "saving"),
}
"""Module -> what is done to it once it is imported."""


class _Finder(MetaPathFinder):
    """Finds modules as the others do, and changes those of `_WRAPPED` at the end of their import."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname not in _WRAPPED:
            return None
        others = (finder for finder in sys.meta_path if finder is not self)
        spec = next((s for finder in others if (s := finder.find_spec(fullname, path, target)) is not None), None)
        if spec is not None and spec.loader is not None:
            spec.loader.exec_module = functools.partial(_load, spec.loader.exec_module)  # type: ignore[method-assign]
        return spec


def _load(exec_module: Callable[[ModuleType], None], module: ModuleType) -> None:
    exec_module(module)
    _WRAPPED[module.__name__](module)
