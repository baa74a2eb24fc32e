"""The command line of the doctor. Imports nothing but the standard library, so that it starts on any machine."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator
from itertools import chain

from hybridrec.doctor import machine, network, selftest, versions
from hybridrec.doctor.child import Outcome, run_children
from hybridrec.doctor.report import Finding, Status, exit_status, render, summary, to_json

_STACK_MODULE = "hybridrec.doctor.stack"
DEFAULT_SECONDS = 120.0


def main(argv: list[str] | None = None) -> int:
    """Print the report. Returns the exit status."""
    args = _parse(argv)
    printed: list[Finding] = []
    device = args.device

    def show(findings: Iterator[Finding] | list[Finding]) -> None:
        for finding in findings:
            if not args.json:
                if not printed or printed[-1].section != finding.section:
                    print(("\n" if printed else "") + finding.section)
                print(render(finding), flush=True)
            printed.append(finding)

    show(versions.findings(None if device == "auto" else device))
    show(chain(machine.findings(), network.findings()))
    if any(f.section == versions.SECTION and f.status is Status.FAIL for f in printed):
        skipped = "not tried: install what is missing first"
        show([Finding(section="Libraries", what="torch, devices, kernels", value=skipped, status=Status.OFF)])
    else:
        outcome = _run_stack(args)
        show(outcome.findings)
        show(_end_of_stack(outcome))
        device = outcome.get("device") or device
        show(_collectives(outcome, args.seconds))
    status = exit_status(printed, is_strict=args.strict)
    if args.json:
        print(to_json(printed, device=device, status=status))
    else:
        print("\n" + summary(printed, device=device))
    return status


def _parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m hybridrec.doctor",
        description="Say what of this machine and of its installation training can use, and what to do about the rest. "
        "That takes about half a minute, more if the machine is busy or has accelerators to test. Every check has a "
        "time limit.",
        epilog="Status of a line: ok; off (not there and not needed); warn (works, but slower, less safe or not what "
        "was tested); fail. Exit status: 0 if training on the device can start, 1 if it cannot, "
        "2 if an option is wrong.",
    )
    add = parser.add_argument
    add("--device", default="auto", help="device type to train on (default auto: an accelerator if usable, else host)")
    add("--json", action="store_true", help="print one JSON object instead of text")
    add("--strict", action="store_true", help="exit status 1 for warnings too")
    add(
        "--import",
        dest="imports",
        metavar="MODULE",
        action="append",
        default=[],
        help="import this module of yours before looking for patches; may be given several times",
    )
    add(
        "--seconds",
        type=_seconds,
        default=DEFAULT_SECONDS,
        help=f"time limit of each of the checks that run in processes of their own (default {DEFAULT_SECONDS:g})",
    )
    args = parser.parse_args(argv)
    known = versions.known_devices()
    if known and args.device not in ("auto", *known):
        parser.error(
            f"argument --device: there is no backend for {args.device!r}. Pass one of auto, {', '.join(known)}, or "
            "install a package with a backend of that name."
        )
    return args


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < 86_400:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds above 0")
    return value


def _run_stack(args: argparse.Namespace) -> Outcome:
    arguments = ["--device", args.device, *chain.from_iterable(("--import", name) for name in args.imports)]
    (outcome,) = run_children(_STACK_MODULE, [arguments], seconds=args.seconds, environment=os.environ)
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
    return [Finding(section="Libraries", what="process", value=value, status=Status.FAIL, remedy=remedy)]


def _collectives(outcome: Outcome, seconds: float) -> Iterator[Finding]:
    host_type = outcome.get("host")
    if host_type is None:
        value = "not tried: torch is not usable"
        yield Finding(section=selftest.SECTION, what="self-tests", value=value, status=Status.OFF)
        return
    yield from selftest.host_findings(host_type, seconds=seconds)
    chosen = next((r for r in outcome.records if "device" in r), None)
    if chosen is not None and chosen["collective"] != selftest.HOST_COLLECTIVE:
        yield from selftest.device_findings(chosen["collective"], chosen["device"], chosen["count"], seconds=seconds)


if __name__ == "__main__":
    sys.exit(main())
