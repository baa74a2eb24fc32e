"""Processes that the doctor starts: they may crash or hang, the report goes on.

A child appends one JSON object a line to a file, so that what it had to say survives its end.
"""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from hybridrec.doctor.report import Finding

GRACE_SECONDS = 3.0
"""How long the others may go on once one of several has failed."""
_POLL_SECONDS = 0.05
_REAP_SECONDS = 5.0
_TAIL_LINES = 4


class Channel:
    """The child's side: what it writes."""

    def __init__(self, path: str) -> None:
        """The file at ``path`` is opened anew for every record, so that nothing waits in a buffer."""
        self._path: Final = path

    def begin(self, what: str) -> None:
        """Say what comes next: the last word of a child that dies or hangs."""
        self.send(begin=what)

    def finding(self, finding: Finding) -> None:
        """Report a finding."""
        self.send(finding=finding.to_dict())

    def send(self, **record: Any) -> None:
        """Write one record of plain values."""
        with open(self._path, "a", encoding="utf-8") as file:
            file.write(json.dumps(record) + "\n")


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What became of a child."""

    records: tuple[dict[str, Any], ...]
    exit_code: int | None
    """Negative: killed by that signal. None: it was stopped because its time was over."""
    seconds: float
    tail: str
    """The last lines that it printed."""

    @property
    def findings(self) -> list[Finding]:
        """What it reported, in order."""
        return [Finding.from_dict(record["finding"]) for record in self.records if "finding" in record]

    @property
    def last_begun(self) -> str:
        """What it was at."""
        return next((str(r["begin"]) for r in reversed(self.records) if "begin" in r), "starting")

    def get(self, name: str) -> Any:
        """The last record of that name, else None."""
        return next((record[name] for record in reversed(self.records) if name in record), None)

    @property
    def end(self) -> str:
        """How it ended, in words; empty if it ended well."""
        if self.exit_code is None:
            return f"no answer within {self.seconds:.0f} s while at: {self.last_begun}"
        if self.exit_code < 0:
            return f"killed by signal {-self.exit_code} while at: {self.last_begun}"
        return f"exit status {self.exit_code} while at: {self.last_begun}" if self.exit_code else ""


def run_children(
    module: str, arguments: Sequence[Sequence[str]], *, seconds: float, environment: Mapping[str, str]
) -> list[Outcome]:
    """Run ``python -m module --out FILE ...`` once for each list of arguments, all at once, and wait for all.

    Args:
        module: A module with a command line that takes ``--out``.
        arguments: Those of each child.
        seconds: When those that still run are killed.
        environment: The children's whole environment.

    Returns:
        In the order of ``arguments``. Never raises for what a child does.
    """
    with tempfile.TemporaryDirectory(prefix="hybridrec_doctor_") as folder, contextlib.ExitStack() as stack:
        started = time.monotonic()
        outs = [Path(folder, f"{number}.jsonl") for number in range(len(arguments))]
        logs = [stack.enter_context(open(Path(folder, f"{n}.log"), "w+b")) for n in range(len(arguments))]
        children: list[subprocess.Popen[bytes]] = []
        try:
            for out, log, more in zip(outs, logs, arguments, strict=True):
                command = [sys.executable, "-m", module, "--out", str(out), *more]
                children.append(
                    subprocess.Popen(
                        command,
                        env=dict(environment),
                        stdin=subprocess.DEVNULL,
                        stdout=log,
                        stderr=subprocess.STDOUT,
                    )
                )
            _wait(children, started + seconds)
            codes = [child.poll() for child in children]
        finally:
            for child in children:
                _end(child)
        elapsed = time.monotonic() - started
        return [
            Outcome(records=_records(out), exit_code=code, seconds=elapsed, tail=_tail(Path(log.name)))
            for out, log, code in zip(outs, logs, codes, strict=True)
        ]


def _wait(children: Sequence[subprocess.Popen[bytes]], deadline: float) -> None:
    has_failed = False
    while any(child.poll() is None for child in children) and time.monotonic() < deadline:
        if not has_failed and any(child.poll() not in (None, 0) for child in children):
            has_failed, deadline = True, min(deadline, time.monotonic() + GRACE_SECONDS)
        time.sleep(_POLL_SECONDS)


def _end(child: subprocess.Popen[bytes]) -> None:
    if child.poll() is None:
        child.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):  # held by a driver: the system will reap it
            child.wait(_REAP_SECONDS)


def _records(path: Path) -> tuple[dict[str, Any], ...]:
    """All whole lines; a child that was killed may have left half of one."""
    records = []
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines() if path.exists() else []:
        with contextlib.suppress(json.JSONDecodeError):
            records.append(json.loads(line))
    return tuple(record for record in records if isinstance(record, dict))


def _tail(path: Path) -> str:
    lines = [line.rstrip() for line in path.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
    return "\n".join(lines[-_TAIL_LINES:])
