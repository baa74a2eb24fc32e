"""Jobs of several ranks under torchrun, and what they leave behind."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import re
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
DATA = "--device cpu --data powerlaw --rows 40000 --ids 4000 --exponent 0.3 --features 3 --batch-size 128 --workers 0"


@dataclass(kw_only=True)
class Job:
    """One start of torchrun."""

    process: subprocess.Popen[bytes]
    folder: Path
    log_from: int
    """Where in the log its part begins."""

    def wait(self) -> int:
        """Its exit status; what it started is gone then."""
        try:
            return self.process.wait(JOB_SECONDS)
        finally:
            self.end()

    def log(self) -> str:
        """What the launcher and its ranks said."""
        return (self.folder / "log").read_bytes()[self.log_from :].decode(errors="replace")

    def end(self) -> None:
        """Kill what is left."""
        self.process.kill()
        self.process.wait()
        for path in self.folder.glob("pid_*"):
            with contextlib.suppress(OSError):  # it is gone
                pid = int(path.read_text())
                if str(self.folder).encode() in Path(f"/proc/{pid}/cmdline").read_bytes():  # and not another one's now
                    os.kill(pid, signal.SIGKILL)


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
    for path in folder.glob("pid_*"):
        path.unlink()
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={world_size}"]
    command = [sys.executable, *launcher, f"--max-restarts={max_restarts}", "--monitor-interval=0.05", "-m", module]
    environment = os.environ | {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    if max_restarts:  # docs/checkpoint.md says why
        environment["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    with open(log, "ab") as out:
        log_from = out.tell()
        process = subprocess.Popen([*command, *arguments], cwd=ROOT, env=environment, stdout=out, stderr=out)
    return Job(process=process, folder=folder, log_from=log_from)


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


@functools.cache
def uninterrupted(root: Path, world_size: int, *options: str) -> list[dict[str, Any]]:
    """What each rank of the demo computes if nothing happens. In a folder of its own below ``root``."""
    folder = root / f"uninterrupted_{world_size}_{'_'.join(options)}"
    job = start_demo(folder, folder / "snapshots", *options, world_size=world_size)
    assert job.wait() == 0, job.log()
    return end_of(folder, world_size)


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
    auc = re.findall(r"held-out AUC: ([0-9.]+)", (folder / "log").read_text(errors="replace"))
    ends = [json.loads((folder / f"end_{rank}.json").read_text()) for rank in range(world_size)]
    return [end | {"auc": auc[-1:], "losses": losses_in(folder, rank)} for rank, end in enumerate(ends)]


def times_trained(folder: Path, rank: int = 0) -> Counter[int]:
    """Batch -> how often it was trained."""
    return Counter(int(line.split()[0]) for line in (folder / f"losses_{rank}").read_text().splitlines())
