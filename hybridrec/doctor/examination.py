"""The doctor's whole examination of one machine, finding by finding."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

from hybridrec.doctor import machine, network, selftest, versions
from hybridrec.doctor.causes import AUTOLOAD_VARIABLE
from hybridrec.doctor.child import Outcome, run_children
from hybridrec.doctor.report import Finding, Status

LIBRARIES = "Libraries"
_STACK_MODULE = "hybridrec.doctor.stack"
_USABLE = ("device", "count", "collective", "is_host")


@dataclass(frozen=True, kw_only=True)
class Examination:
    """What was found, and what the tests of a device need to know of it."""

    findings: tuple[Finding, ...]
    device: str
    """The device type that training would use, or what was asked for if there is none."""
    host: str | None = None
    """The device type of host memory; None if torch is not usable."""
    count: int = 0
    """Devices of the type; 0 if it is not usable."""
    collective: str = ""
    """The device's process group backend."""
    is_host: bool = False
    """Whether the device is the host itself."""
    environment: Mapping[str, str]
    """With which torch can be imported."""


def examine(
    device: str, *, seconds: float, show: Callable[[Finding], None], imports: Sequence[str] = ()
) -> Examination:
    """Look at everything; each check has a time limit.

    Args:
        device: A device type, or ``"auto"``.
        seconds: Time limit of each of the checks that run in processes of their own.
        show: Told of each finding as it is made.
        imports: Modules of the user's to import before looking for patches.
    """
    found: list[Finding] = []

    def note(findings: Iterable[Finding]) -> None:
        for finding in findings:
            found.append(finding)
            show(finding)

    note(versions.findings(None if device == "auto" else device))
    note(chain(machine.findings(), network.findings()))
    environment = dict(os.environ)
    if any(f.section == versions.SECTION and f.status is Status.FAIL for f in found):
        skipped = "not tried: install what is missing first"
        note([Finding(section=LIBRARIES, what="torch, devices, kernels", value=skipped, status=Status.OFF)])
        return Examination(findings=tuple(found), device=device, environment=environment)
    outcome = _run_stack(device, imports, seconds, environment)
    note(outcome.findings)
    if outcome.get("autoload_failed"):
        environment[AUTOLOAD_VARIABLE] = "0"
        value = f"what follows is as with {AUTOLOAD_VARIABLE}=0"
        note([Finding(section=LIBRARIES, what="without the extension", value=value, status=Status.OFF)])
        outcome = _run_stack(device, imports, seconds, environment)
        note(outcome.findings)
    note(_end_of_stack(outcome))
    usable: dict[str, Any] = next((r for r in reversed(outcome.records) if "device" in r), {})
    known: dict[str, Any] = {"device": device, **{name: usable[name] for name in _USABLE if name in usable}}
    examination = Examination(findings=(), host=outcome.get("host"), environment=environment, **known)
    note(_collectives(examination, seconds))
    return replace(examination, findings=tuple(found))


def _run_stack(device: str, imports: Sequence[str], seconds: float, environment: Mapping[str, str]) -> Outcome:
    arguments = ["--device", device, *chain.from_iterable(("--import", name) for name in imports)]
    (outcome,) = run_children(_STACK_MODULE, [arguments], seconds=seconds, environment=environment)
    return outcome


def _end_of_stack(outcome: Outcome) -> list[Finding]:
    """A finding if the process died or hung; what it printed last says more than its exit status."""
    if not outcome.end:
        return []
    value = outcome.end + (f"\n{outcome.tail}" if outcome.tail else "")
    remedy = (
        f"Try the step by itself (`python -X faulthandler -m {_STACK_MODULE} --out /dev/stdout --device auto`); "
        "--seconds allows more time."
    )
    return [Finding(section=LIBRARIES, what="process", value=value, status=Status.FAIL, remedy=remedy)]


def _collectives(examination: Examination, seconds: float) -> Iterator[Finding]:
    if examination.host is None:
        value = "not tried: torch is not usable"
        yield Finding(section=selftest.SECTION, what="self-tests", value=value, status=Status.OFF)
        return
    environment = examination.environment
    yield from selftest.host_findings(examination.host, seconds=seconds, environment=environment)
    if examination.count and examination.collective != selftest.HOST_COLLECTIVE:
        yield from selftest.device_findings(
            examination.collective, examination.device, examination.count, seconds=seconds, environment=environment
        )
