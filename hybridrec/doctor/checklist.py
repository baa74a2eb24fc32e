"""One command that verifies a device from end to end, for whoever owns one; the report is text and JSON.

Every step runs, whatever became of the others, and ends as passed, failed or skipped, with a reason. The report is
written anew after each step, so that what was found remains if the machine or the patience ends.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from pathlib import Path

from hybridrec.doctor import steps
from hybridrec.doctor.checklist_report import Report, Result, Verdict, line, write
from hybridrec.doctor.examination import Examination, examine
from hybridrec.doctor.report import Status

STEPS = ("doctor", "collectives", "kernels", "tests", "demo", "benchmarks")
NO_DEVICE = 3
"""Exit status where there is nothing to verify."""


def verify(device: str, *, chosen: Sequence[str], seconds: float, report: Path, as_json: bool) -> int:
    """Run the steps and write the report.

    Args:
        device: A device type.
        chosen: Those to run; the doctor's checks always run, the others need them.
        seconds: Time limit of each of the doctor's checks.
        report: The files are this with ``.txt`` and ``.json``.
        as_json: Print the JSON at the end, rather than a line a step.

    Returns:
        0: no step failed. 1: one did. `NO_DEVICE`: there is no such device here; no file is written.
    """
    started = time.monotonic()
    now = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    if not as_json:
        print(f"checking whether {device!r} can be used ...", flush=True)
    examination = examine(device, seconds=seconds, show=lambda finding: None)
    if not examination.count:
        print(no_device(examination))
        return NO_DEVICE
    results = [steps.doctor(examination, time.monotonic() - started)]
    so_far = Report(device=device, started=now, is_complete=False, results=())
    for step in STEPS:
        if step != "doctor":
            result = steps.run(step, examination, seconds=seconds) if step in chosen else _not_asked_for(step)
            results.append(result)
        so_far = dataclasses.replace(so_far, results=tuple(results), is_complete=step == STEPS[-1])
        write(report, so_far)
        if not as_json:
            print(line(results[-1]), flush=True)
    print(so_far.to_json() if as_json else f"\n{so_far.summary}\nreport: {report}.txt, {report}.json")
    return so_far.exit_status


def _not_asked_for(step: str) -> Result:
    return Result(step=step, verdict=Verdict.SKIPPED, reason=f"not asked for: --step {step}")


def no_device(examination: Examination) -> str:
    """In one sentence why nothing can be verified, and what to do."""
    failed = [finding for finding in examination.findings if finding.status is Status.FAIL]
    of_device = [finding for finding in failed if finding.what == examination.device]
    cause = next(iter(of_device or failed), None)
    if cause is None:
        return f"device {examination.device!r} cannot be verified here: its backend gives no reason."
    problem = cause.value.removeprefix("not usable: ").strip().rstrip(".")
    return f"device {examination.device!r} cannot be verified here: {problem}; {_begun(cause.remedy)}"


def _begun(sentence: str) -> str:
    """With a small first letter, unless it begins with a name."""
    return sentence if sentence[1:2].isupper() else sentence[:1].lower() + sentence[1:]
