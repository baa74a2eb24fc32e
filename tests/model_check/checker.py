"""Run one schedule, and say what it was if anything is wrong."""

from __future__ import annotations

import collections
import gc
from concurrent.futures import ThreadPoolExecutor

from tests.model_check.actors import Actors
from tests.model_check.case import Case, draw_case
from tests.model_check.scheduler import FreeThreads, ReplayedThreads, Tape, WrongSchedule
from tests.model_check.world import World

WORKERS = ThreadPoolExecutor(max_workers=1, thread_name_prefix="model check")
TRACE_LINES = 60


def check_schedule(
    source: bytes | int,
    *,
    tier: str = "host",
    core: str = "compiled",
    case: Case | None = None,
    has_canary: bool = True,
    is_free: bool = False,
) -> collections.Counter[str]:
    """One case and one order of its stages, both from ``source``.

    Args:
        source: A seed, or the tape itself.
        tier: "host" (slots are host memory), "staged" (staged, in host memory) or "npu" (the simulated device).
        core: "compiled" or "reference".
        case: Take this one; the tape then decides the order alone.
        has_canary: Whether free memory is poisoned.
        is_free: Let threads run freely, with sleeps, instead of by the tape.

    Returns:
        How often what happened.

    Raises:
        WrongSchedule: With the case, the last steps and the call that replays them.
    """
    tape = Tape(source)
    case = case or draw_case(tape)
    threads = FreeThreads(0, WORKERS) if is_free else ReplayedThreads(tape, WORKERS)
    world = World(case, threads, tier=tier, core=core, has_canary=has_canary)
    actors = Actors(world, tape)
    try:
        threads.run(actors.programs())
    except BaseException as e:
        steps = "\n  ".join(threads.trace[-TRACE_LINES:])
        raise WrongSchedule(
            f"{type(e).__name__}: {e}\nafter\n  {steps}\nof\n  {case}\nReplay it: check_schedule({source!r}, "
            f"tier={tier!r}, core={core!r}, has_canary={has_canary})"
        ) from e
    for t in range(len(case.tables)):
        counters = world.group.counters(t)
        actors.num_events["evictions from slots"] += counters.victims
        actors.num_events["write-backs"] += counters.write_backs
        actors.num_events["loads"] += counters.loads
        actors.num_events["evicted"] += counters.evicted
    actors.num_events["posted"] += any("try lock" in line for line in threads.trace)
    return actors.num_events


def check_many(seeds: range, **kwargs: object) -> collections.Counter[str]:
    """Some schedules, one after the other."""
    total: collections.Counter[str] = collections.Counter()
    for seed in seeds:
        total += check_schedule(seed, **kwargs)  # type: ignore[arg-type]
    gc.collect()
    return total
