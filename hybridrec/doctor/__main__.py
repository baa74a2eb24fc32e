"""The command line of the doctor. Imports nothing but the standard library, so that it starts on any machine."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from hybridrec.doctor import checklist, versions
from hybridrec.doctor.examination import examine
from hybridrec.doctor.report import Finding, exit_status, render, summary, to_json

DEFAULT_SECONDS = 120.0


def main(argv: list[str] | None = None) -> int:
    """Print the report. Returns the exit status."""
    args = _parse(argv)
    if args.checklist is not None:
        report = args.report or Path(f"hybridrec_{args.checklist}_checklist")
        return checklist.verify(
            args.checklist, chosen=args.steps or checklist.STEPS, seconds=args.seconds, report=report, as_json=args.json
        )
    printed: list[Finding] = []

    def show(finding: Finding) -> None:
        if not args.json:
            if not printed or printed[-1].section != finding.section:
                print(("\n" if printed else "") + finding.section)
            print(render(finding), flush=True)
        printed.append(finding)

    examination = examine(args.device, seconds=args.seconds, show=show, imports=args.imports)
    status = exit_status(printed, is_strict=args.strict)
    if args.json:
        print(to_json(printed, device=examination.device, status=status))
    else:
        print("\n" + summary(printed, device=examination.device))
    return status


def _parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m hybridrec.doctor",
        description="Say what of this machine and of its installation training can use, and what to do about the rest. "
        "That takes about half a minute, more if the machine is busy or has accelerators to test. Every check has a "
        "time limit.",
        epilog="Status of a line: ok; off (not there and not needed); warn (works, but slower, less safe or not what "
        "was tested); fail. Exit status: 0 if training on the device can start, 1 if it cannot, "
        "2 if an option is wrong. Of a checklist: 0 if no step failed, 1 if one did, 3 if there is no such device.",
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
    _add_checklists(parser)
    args = parser.parse_args(argv)
    known = versions.known_devices()
    if known and args.device not in ("auto", *known):
        parser.error(
            f"argument --device: there is no backend for {args.device!r}. Pass one of auto, {', '.join(known)}, or "
            "install a package with a backend of that name."
        )
    if args.checklist is None and (args.steps or args.report):
        parser.error("--step and --report belong to a checklist.")
    if args.checklist is not None and (args.device != "auto" or args.strict or args.imports):
        parser.error("--device, --strict and --import do not go with a checklist, which is of one device.")
    return args


def _add_checklists(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group(
        "checklists",
        "Verify one device from end to end: the doctor's checks, collectives and kernels at real sizes, and, in a "
        "checkout, the tests marked for it, the demo and the benchmarks. That may take an hour.",
    )
    for name in versions.known_devices():
        group.add_argument(
            f"--{name}-checklist", dest="checklist", action="store_const", const=name, help=f"of device {name!r}"
        )
    group.set_defaults(checklist=None)
    group.add_argument(
        "--step",
        dest="steps",
        action="append",
        choices=checklist.STEPS,
        help="only this step, and the doctor's checks; may be given several times",
    )
    group.add_argument(
        "--report",
        type=Path,
        metavar="PATH",
        help="write PATH.txt and PATH.json (default: hybridrec_DEVICE_checklist, in the current folder)",
    )


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < 86_400:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds above 0")
    return value


if __name__ == "__main__":
    sys.exit(main())
