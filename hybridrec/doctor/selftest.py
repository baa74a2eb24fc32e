"""Collectives between processes of this machine, with a time limit; and why they fail where they do."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from hybridrec.doctor import network
from hybridrec.doctor.child import Outcome, run_children
from hybridrec.doctor.report import Finding, Status

SECTION = "Collectives"
HOST_COLLECTIVE = "gloo"
"""What ids and verdicts travel over, whatever the device."""
_MODULE = "hybridrec.doctor.collectives"


def host_findings(host_type: str, *, seconds: float, environment: Mapping[str, str] = os.environ) -> Iterator[Finding]:
    """Two processes exchange a known pattern between their host memories, in the environment as it is."""
    what = f"{HOST_COLLECTIVE}, 2 ranks"
    outcomes = run_ranks(HOST_COLLECTIVE, host_type, 2, seconds=seconds, environment=environment)
    problem = problem_of(outcomes)
    if not problem:
        yield Finding(section=SECTION, what=what, value=timings_of(outcomes))
        return
    variable = network.HOST_VARIABLE
    loopback = network.loopback()
    remedy = "Every rank needs this group. See what the error names."
    if loopback is not None and environment.get(variable) != loopback:
        again = run_ranks(
            HOST_COLLECTIVE, host_type, 2, seconds=seconds, environment={**environment, variable: loopback}
        )
        if not problem_of(again):
            problem += f". It works over {loopback}"
            remedy = network.interface_hint()
    elif loopback is not None:
        remedy = f"It fails over {loopback} itself: look for a firewall, or a sandbox without sockets."
    yield Finding(section=SECTION, what=what, value=problem, status=Status.FAIL, remedy=remedy)


def device_findings(
    backend: str, device_type: str, count: int, *, seconds: float, environment: Mapping[str, str] = os.environ
) -> Iterator[Finding]:
    """The device's own collectives between two devices; with one device, by itself."""
    world_size = min(2, count)
    what = f"{backend}, {world_size} rank{'s' if world_size > 1 else ''}"
    outcomes = run_ranks(backend, device_type, world_size, seconds=seconds, environment=environment)
    problem = problem_of(outcomes)
    if not problem:
        yield Finding(section=SECTION, what=what, value=timings_of(outcomes))
        return
    remedy = (
        f"Check driver and firmware of the devices, and {backend.upper()}_SOCKET_IFNAME; {backend.upper()}_DEBUG=INFO, "
        "where the library knows it, says more."
    )
    yield Finding(section=SECTION, what=what, value=problem, status=Status.FAIL, remedy=remedy)


def run_ranks(
    backend: str,
    device_type: str,
    world_size: int,
    *,
    seconds: float,
    environment: Mapping[str, str],
    units: Sequence[int] = (),
) -> list[Outcome]:
    """Start the ranks of one self-test and wait for them.

    Args:
        backend: Of the process group.
        device_type: Where what is sent lies.
        world_size: Ranks, each on a device of its own.
        seconds: When ranks that still run are killed.
        environment: The ranks' whole environment.
        units: Elements that the smallest message has, one round each; none: one round of few.
    """
    with tempfile.TemporaryDirectory(prefix="hybridrec_doctor_") as folder:
        common = ["--store", str(Path(folder, "store")), "--device-type", device_type, "--backend", backend]
        # The group gives up by itself a little earlier, so that the error is its own rather than ours.
        common += ["--world-size", str(world_size), "--seconds", str(max(1.0, seconds - 10))]
        common += ["--units", *map(str, units)] if units else []
        arguments = [[*common, "--rank", str(rank)] for rank in range(world_size)]
        return run_children(_MODULE, arguments, seconds=seconds, environment=environment)


def problem_of(outcomes: list[Outcome]) -> str:
    """What went wrong, from the first rank that knows; empty if nothing did."""
    if all(outcome.exit_code == 0 and outcome.get("done") for outcome in outcomes):
        return ""
    for rank, outcome in enumerate(outcomes):
        if outcome.get("error"):
            lines = str(outcome.get("error")).splitlines()
            return f"rank {rank}, {outcome.last_begun}: {lines[0][:400]}"
    for rank, outcome in enumerate(outcomes):
        if outcome.end:
            tail = outcome.tail.splitlines()[-1:]
            return f"rank {rank}: {outcome.end}" + (f": {tail[0][:200]}" if tail else "")
    return "a rank ended without an answer"


def timings_of(outcomes: list[Outcome]) -> str:
    """Milliseconds of every collective, as rank 0 measured them."""
    times: dict[str, float] = {}
    for record in outcomes[0].records:
        times.update(record.get("milliseconds", {}))
    return "exact: " + ", ".join(f"{name} {milliseconds:.1f} ms" for name, milliseconds in times.items())
