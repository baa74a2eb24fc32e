"""Jobs of several ranks under torchrun, and what they leave behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tests.checkpoint.strikes import Strike

ROOT = Path(__file__).parents[2]
JOB_SECONDS = 400.0
"""On a busy machine; a job takes seconds."""
DATA = "--device cpu --data powerlaw --rows 40000 --ids 4000 --features 3 --batch-size 128 --workers 0"


@dataclass(kw_only=True)
class Job:
    """One start of torchrun."""

    process: subprocess.Popen[bytes]
    log: Path

    def wait(self) -> int:
        """Its exit status; what it started is gone then."""
        try:
            return self.process.wait(JOB_SECONDS)
        finally:
            self.end()

    def end(self) -> None:
        """Kill what is left: torchrun and its ranks are a session of their own, each rank a group."""
        listed = subprocess.run(["ps", "-s", str(self.process.pid), "-o", "pid="], capture_output=True, text=True)
        for pid in map(int, listed.stdout.split()):
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:  # it ended meanwhile
                continue
        self.process.wait()


def start(
    folder: Path,
    module: str,
    arguments: Sequence[str],
    *,
    world_size: int = 2,
    max_restarts: int = 0,
) -> Job:
    """Start a module on so many ranks."""
    folder.mkdir(parents=True, exist_ok=True)
    log = folder / "log"
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={world_size}"]
    command = [sys.executable, *launcher, f"--max-restarts={max_restarts}", "--monitor-interval=0.05", "-m", module]
    environment = os.environ | {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    with open(log, "a") as out:
        process = subprocess.Popen(
            [*command, *arguments], cwd=ROOT, env=environment, stdout=out, stderr=out, start_new_session=True
        )
    return Job(process=process, log=log)


def start_demo(
    folder: Path,
    snapshots: Path,
    *options: str,
    strikes: Sequence[Strike] = (),
    in_background: bool = False,
    **kwargs: Any,
) -> Job:
    """Start the Little Demo; it resumes if there is a snapshot."""
    told = [str(folder), json.dumps([asdict(s) for s in strikes]), "background" if in_background else "foreground"]
    given = [*DATA.split(), "--snapshots", str(snapshots), "--picture", str(folder / "picture.png"), *options]
    return start(folder, "tests.checkpoint.struck_demo", [*told, *given, "--resume"], **kwargs)


def strikes_in(folder: Path) -> list[dict[str, Any]]:
    """Where signals were sent."""
    path = folder / "strikes"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def losses_in(folder: Path, rank: int) -> dict[int, set[str]]:
    """Batch -> its losses, of all times that it was trained."""
    found: dict[int, set[str]] = defaultdict(set)
    path = folder / f"losses_{rank}"
    for line in path.read_text().splitlines() if path.exists() else []:
        number, loss = line.split()
        found[int(number)].add(loss)
    return found


def end_of(folder: Path, world_size: int) -> list[dict[str, Any]]:
    """What each rank computed: its end, and every batch's loss."""
    ends = [json.loads((folder / f"end_{rank}.json").read_text()) for rank in range(world_size)]
    return [end | {"losses": losses_in(folder, rank)} for rank, end in enumerate(ends)]


def times_trained(folder: Path, rank: int = 0) -> Counter[int]:
    """Batch -> how often it was trained."""
    return Counter(int(line.split()[0]) for line in (folder / f"losses_{rank}").read_text().splitlines())
