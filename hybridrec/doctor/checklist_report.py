"""The report of a checklist: a line a step, as text for people and as JSON for programs, in files."""

from __future__ import annotations

import dataclasses
import enum
import json
import os
import platform
import tempfile
from dataclasses import dataclass
from pathlib import Path

from hybridrec.doctor import versions
from hybridrec.doctor.report import wrap

_MARGIN = " " * 34


class Verdict(enum.StrEnum):
    """How a step ended."""

    PASSED = "passed"
    FAILED = "failed"
    SKIPPED = "skipped"


@dataclass(frozen=True, kw_only=True)
class Result:
    """One step."""

    step: str
    verdict: Verdict
    reason: str
    """What was seen; of what failed or was skipped: why, and what to do."""
    seconds: float = 0.0
    details: tuple[str, ...] = ()
    """Whatever helps to understand it: findings, timings, the last lines that were printed."""


@dataclass(frozen=True, kw_only=True)
class Report:
    """All steps so far."""

    device: str
    started: str
    """UTC, as ISO 8601."""
    is_complete: bool
    results: tuple[Result, ...]

    @property
    def exit_status(self) -> int:
        """0: no step failed."""
        return int(any(result.verdict is Verdict.FAILED for result in self.results))

    @property
    def summary(self) -> str:
        """The last line."""
        counts = {verdict: sum(r.verdict is verdict for r in self.results) for verdict in Verdict}
        text = ", ".join(f"{count} {verdict}" for verdict, count in counts.items())
        return f"device {self.device!r}: {text}" + ("" if self.is_complete else "; not complete")

    def to_json(self) -> str:
        """One JSON object."""
        machine = {"python": platform.python_version(), "machine": platform.machine(), "system": platform.system()}
        installed = {name: version for name in _distributions() if (version := versions.version_of(name))}
        fields = {
            "device": self.device,
            "started": self.started,
            "complete": self.is_complete,
            "exit_status": self.exit_status,
            "machine": machine,
            "versions": installed,
            "steps": [dataclasses.asdict(result) for result in self.results],
        }
        return json.dumps(fields, indent=2)

    def to_text(self) -> str:
        """For people."""
        lines = [f"hybridrec, checklist of device {self.device!r}, started {self.started}"]
        for result in self.results:
            lines += ["", line(result), *(f"{_MARGIN}{detail}" for detail in result.details)]
        return "\n".join([*lines, "", self.summary, ""])


def _distributions() -> list[str]:
    pinned = [name for pins in versions.stacks().values() for name in pins]
    return list(dict.fromkeys([*versions.SHOWN, *pinned]))


def line(result: Result) -> str:
    """A step as the terminal shows it."""
    first = f"  {result.verdict:<9}{result.step:<14}{result.seconds:>7.1f} s"
    return "\n".join(wrap(result.reason, first=first + "  ", margin=_MARGIN))


def write(path: Path, report: Report) -> None:
    """Both files, each replaced as a whole: a reader never sees half of one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    for suffix, text in ((".json", report.to_json()), (".txt", report.to_text())):
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}")
        try:
            with open(handle, "w", encoding="utf-8") as file:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
            os.chmod(name, 0o644)
            os.replace(name, f"{path}{suffix}")
        except BaseException:
            Path(name).unlink(missing_ok=True)
            raise
