"""The steps of a checklist: each a function of what the examination found, that never raises for what it tests."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import hybridrec
from hybridrec.doctor import network, selftest
from hybridrec.doctor.checklist_report import Result, Verdict
from hybridrec.doctor.child import run_children
from hybridrec.doctor.examination import Examination
from hybridrec.doctor.report import Status, count_of

LONG_SECONDS = 3600.0
"""Time limit of tests, demo and benchmarks, each."""
UNITS = (1 << 10, 1 << 16, 1 << 20)
"""Elements of a message: a few ids; pools of a batch; 4 to 32 MiB from each rank to each other."""
_PYTEST_NOTHING = 5
_TAIL_LINES = 15
_REAP_SECONDS = 10.0
_NO_CHECKOUT = "run the checklist in a checkout of hybridrec, installed with pip install -e"


def doctor(examination: Examination, seconds: float) -> Result:
    """What the examination found: warnings and failures are the details."""
    bad = [f for f in examination.findings if f.status in (Status.WARN, Status.FAIL)]
    failures = sum(f.status is Status.FAIL for f in bad)
    reason = f"{len(examination.findings)} checks, {count_of(failures, 'failure')}, " + count_of(
        len(bad) - failures, "warning"
    )
    details = tuple(f"{f.status} {f.what}: {f.value} -> {f.remedy}" for f in bad)
    verdict = Verdict.FAILED if failures else Verdict.PASSED
    return Result(step="doctor", verdict=verdict, reason=reason, seconds=seconds, details=details)


def run(step: str, examination: Examination, *, seconds: float) -> Result:
    """One of the other steps, with the time it took."""
    started = time.monotonic()
    result = _STEPS[step](examination, seconds)
    return replace(result, seconds=time.monotonic() - started)


def _collectives(examination: Examination, seconds: float) -> Result:
    """Known patterns of real sizes between all devices, and between as many host processes."""
    groups = [(examination.collective, examination.device, examination.count)]
    if examination.host is not None and not examination.is_host:
        groups.append((selftest.HOST_COLLECTIVE, examination.host, max(2, examination.count)))
    details, problems = [], []
    for backend, device_type, world_size in groups:
        environment = _on_this_machine(examination.environment)
        outcomes = selftest.run_ranks(
            backend, device_type, world_size, seconds=seconds, environment=environment, units=UNITS
        )
        what = f"{backend}, {count_of(world_size, 'rank')}"
        problem = selftest.problem_of(outcomes)
        problems += [f"{what}: {problem}"] if problem else []
        details += [] if problem else [f"{what}: {selftest.timings_of(outcomes)}"]
    if problems:
        remedy = "do not train on it; run the doctor for what to do"
        return _failed("collectives", f"{'; '.join(problems)}: {remedy}", details)
    text = "; ".join(f"{backend} between {count_of(world_size, 'rank')}" for backend, _, world_size in groups)
    note = "" if examination.count > 1 else "; one device, so that nothing travelled between devices"
    return Result(step="collectives", verdict=Verdict.PASSED, reason=f"exact: {text}{note}", details=tuple(details))


def _kernels(examination: Examination, seconds: float) -> Result:
    """Every optimizer and several dims at a real size, against the optimizers' formulas."""
    (outcome,) = run_children(
        "hybridrec.doctor.kernel_sizes",
        [["--device", examination.device]],
        seconds=max(seconds, LONG_SECONDS / 6),
        environment=examination.environment,
    )
    right = [f"{record['kernel']}: {record['seconds']} s" for record in outcome.records if "kernel" in record]
    wrong = [str(record["error"]) for record in outcome.records if "error" in record]
    if outcome.end:
        wrong.append(f"{outcome.end} {outcome.tail}")
    if wrong or not outcome.get("done"):
        reason = f"{len(wrong)} wrong, {len(right)} right; the first: {wrong[0] if wrong else 'no answer'}"
        return _failed("kernels", reason, [*wrong, *right])
    reason = f"{len(right)} kernels right, to 5e-6 relative"
    return Result(step="kernels", verdict=Verdict.PASSED, reason=reason, details=tuple(right))


def _tests(examination: Examination, seconds: float) -> Result:
    """The tests that are marked for the device."""
    root = checkout()
    if root is None:
        return _skipped("tests", f"there are no tests beside this installation: {_NO_CHECKOUT}")
    if importlib.util.find_spec("pytest") is None:
        return _skipped("tests", "pytest is not installed: pip install 'hybridrec[test]'")
    command = [sys.executable, "-m", "pytest", "-m", examination.device, "-q", "-rfE", "--color=no", "tests"]
    ended = run_command(command, folder=root, seconds=LONG_SECONDS, environment=examination.environment)
    summary = ended.lines[-1] if ended.lines else ""
    if ended.exit_code == _PYTEST_NOTHING:
        return _skipped("tests", f"no test is marked {examination.device!r}")
    if ended.exit_code != 0:
        return _failed("tests", f"{ended.how}: {summary}", ended.lines)
    if not re.search(r"\d+ passed", summary):
        return _skipped("tests", f"no test ran: {summary}", ended.lines)
    return Result(step="tests", verdict=Verdict.PASSED, reason=summary, details=tuple(ended.lines))


def _demo(examination: Examination, seconds: float) -> Result:
    """One epoch, whose held-out AUC the demo judges itself."""
    arguments = ["--device", examination.device, "--ranks", str(min(2, examination.count))]
    with tempfile.TemporaryDirectory(prefix="hybridrec_demo_") as folder:
        return _program(
            "demo", "examples.little_demo", [*arguments, "--picture", str(Path(folder, "demo.png"))], examination
        )


def _benchmarks(examination: Examination, seconds: float) -> Result:
    """Steps with 10, 40 and 100 % of the rows on the device, against all-device tables."""
    return _program("benchmarks", "benchmarks.device_ratio", ["--device", examination.device], examination)


def _program(step: str, module: str, arguments: Sequence[str], examination: Examination) -> Result:
    root = checkout()
    file = None if root is None else root.joinpath(*module.split("."))
    if root is None or file is None or not (file.is_dir() or file.with_suffix(".py").is_file()):
        return _skipped(step, f"there is no {module} beside this installation: {_NO_CHECKOUT}")
    environment = _on_this_machine(examination.environment)
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, [str(root), environment.get("PYTHONPATH")]))
    command = [sys.executable, "-m", module, *arguments]
    ended = run_command(command, folder=root, seconds=LONG_SECONDS, environment=environment)
    if ended.exit_code != 0:
        last = ended.lines[-1] if ended.lines else "it printed nothing"
        return _failed(step, f"{ended.how}: {last}", ended.lines)
    return Result(
        step=step, verdict=Verdict.PASSED, reason=f"python -m {module}: exit status 0", details=tuple(ended.lines)
    )


def checkout() -> Path | None:
    """The folder of the source tree that hybridrec is imported from; None if it is a plain installation."""
    root = Path(hybridrec.__file__).resolve().parents[1]
    return root if (root / "tests" / "conftest.py").is_file() and (root / "pyproject.toml").is_file() else None


def _on_this_machine(environment: Mapping[str, str]) -> dict[str, str]:
    """All ranks are here, so that gloo needs no more than the loopback interface."""
    loopback = network.loopback()
    return {**({network.HOST_VARIABLE: loopback} if loopback else {}), "OMP_NUM_THREADS": "1", **environment}


@dataclass(frozen=True, kw_only=True)
class Ended:
    """What became of a command."""

    exit_code: int | None
    """None: its time was over."""
    how: str
    lines: tuple[str, ...]
    """The last that it printed."""


def run_command(command: Sequence[str], *, folder: Path, seconds: float, environment: Mapping[str, str]) -> Ended:
    """Run a command that may start others; when its time is over, or this process is interrupted, all are ended."""
    with tempfile.TemporaryFile() as log:
        child = subprocess.Popen(
            command,
            cwd=folder,
            env=dict(environment),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            code: int | None = child.wait(seconds)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            with contextlib.suppress(ProcessLookupError):  # nobody is left of the group
                os.killpg(child.pid, signal.SIGKILL)
            with contextlib.suppress(subprocess.TimeoutExpired):  # held by a driver: the system will reap it
                child.wait(_REAP_SECONDS)
        log.seek(0)
        lines = [text.rstrip() for text in log.read().decode(errors="replace").splitlines() if text.strip()]
    how = f"no end within {seconds:.0f} s" if code is None else f"exit status {code}"
    return Ended(exit_code=code, how=how, lines=tuple(lines[-_TAIL_LINES:]))


def _failed(step: str, reason: str, details: Sequence[str]) -> Result:
    return Result(step=step, verdict=Verdict.FAILED, reason=reason, details=tuple(details))


def _skipped(step: str, reason: str, details: Sequence[str] = ()) -> Result:
    return Result(step=step, verdict=Verdict.SKIPPED, reason=reason, details=tuple(details))


_STEPS: dict[str, Callable[[Examination, float], Result]] = {
    "collectives": _collectives,
    "kernels": _kernels,
    "tests": _tests,
    "demo": _demo,
    "benchmarks": _benchmarks,
}
