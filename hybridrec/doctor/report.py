"""What the doctor found: one `Finding` a line, as text for people and as JSON for programs."""

from __future__ import annotations

import dataclasses
import enum
import json
import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from hybridrec.errors import ConfigError

_WIDTH = 118
_STATUS_COLUMN, _WHAT_COLUMN = 6, 30


class Status(enum.StrEnum):
    """What a finding means for training on the chosen device."""

    OK = "ok"
    OFF = "off"
    """Not there, and not needed."""
    WARN = "warn"
    """Training works, but is slower, less safe or not what was tested."""
    FAIL = "fail"
    """Training does not work until this is mended."""


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One line of the report."""

    section: str
    what: str
    value: str
    status: Status = Status.OK
    remedy: str = ""
    """What to do; never empty for WARN and FAIL."""

    def __post_init__(self) -> None:
        if self.status in (Status.WARN, Status.FAIL) and not self.remedy:
            raise ConfigError(f"{self.section}, {self.what}: {self.status} without a remedy. Say what to do.")

    def to_dict(self) -> dict[str, str]:
        """Plain strings, for JSON."""
        return {name: str(value) for name, value in dataclasses.asdict(self).items()}

    @staticmethod
    def from_dict(fields: dict[str, Any]) -> Finding:
        """The reverse of `to_dict`."""
        return Finding(**{**fields, "status": Status(fields["status"])})


def exit_status(findings: Iterable[Finding], *, is_strict: bool) -> int:
    """0: training can start. 1: something fails, or, if strict, is warned of."""
    bad = {Status.FAIL, Status.WARN} if is_strict else {Status.FAIL}
    return int(any(finding.status in bad for finding in findings))


def to_json(findings: Sequence[Finding], *, device: str, status: int) -> str:
    """The whole report as one JSON object."""
    report = {"device": device, "exit_status": status, "findings": [finding.to_dict() for finding in findings]}
    return json.dumps(report, indent=2)


def render(finding: Finding) -> str:
    """One finding as text: status, what, value; beneath it what to do."""
    margin = " " * (2 + _STATUS_COLUMN + _WHAT_COLUMN)
    head = f"  {finding.status:<{_STATUS_COLUMN}}{finding.what:<{_WHAT_COLUMN}}"
    if len(finding.what) >= _WHAT_COLUMN:
        head += " "
    lines = wrap(finding.value, first=head, margin=margin)
    if finding.remedy:
        lines += wrap(finding.remedy, first=margin + "-> ", margin=margin + "   ")
    return "\n".join(lines)


def summary(findings: Sequence[Finding], *, device: str) -> str:
    """The last line."""
    counts = {status: sum(f.status is status for f in findings) for status in Status}
    subject = "training" if device == "auto" else f"training on {device!r}"
    verdict = "cannot start" if counts[Status.FAIL] else "can start"
    return (
        f"{subject} {verdict}: {count_of(counts[Status.FAIL], 'failure')}, {count_of(counts[Status.WARN], 'warning')}"
    )


def count_of(number: int, noun: str) -> str:
    """``1 failure``, ``2 failures``."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


def wrap(text: str, *, first: str, margin: str) -> list[str]:
    """Lines of the report's width; ``first`` begins the first one, ``margin`` the others."""
    lines = []
    for number, paragraph in enumerate(text.splitlines() or [""]):
        indent = first if number == 0 else margin
        lines += textwrap.wrap(
            paragraph,
            _WIDTH,
            initial_indent=indent,
            subsequent_indent=margin,
            break_long_words=False,
            break_on_hyphens=False,
        ) or [indent.rstrip()]
    return lines
