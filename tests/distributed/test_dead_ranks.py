"""A rank is killed or stopped: the others raise in time, say who it was and where they waited, and can end."""

from __future__ import annotations

import contextlib
import gc
import json
import os
import re
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from hybridrec import ConfigError
from hybridrec.distributed import watchdog
from hybridrec.distributed.watchdog import Watch, watch_of
from tests.distributed.dying_ranks import WORLD_SIZE
from tests.distributed.test_pipeline_life import Run
from tests.distributed.test_uneven_ranks import Kept
from tests.ports import free_port
from tests.ranks import RankFailure, RankPool

SECONDS = 100.0
"""From the death to the error, on a machine that may be loaded: a quarter of a minute on a quiet one."""
START_SECONDS = 300.0
"""Three processes import torch and train a few steps, beside whatever else runs."""
EXIT_SECONDS = 60.0


def survivors(depth: str, victim: int, signal_name: str, directory: Path) -> dict[int, dict[str, object]]:
    """Rank -> what it was told."""
    arguments = [str(free_port()), depth, str(victim), signal_name, str(directory)]
    command = [sys.executable, "-W", "ignore", "-m", "tests.distributed.dying_ranks"]
    processes = []
    for rank in range(WORLD_SIZE):
        with open(directory / f"rank_{rank}.txt", "w") as out:
            root = Path(__file__).parents[2]
            processes.append(subprocess.Popen([*command, str(rank), *arguments], cwd=root, stdout=out, stderr=out))
    try:
        deadline = time.monotonic() + START_SECONDS
        while not (directory / "time").exists() and time.monotonic() < deadline:
            time.sleep(0.2)
        for rank, process in enumerate(processes):
            if rank != victim:
                status = process.wait(SECONDS + EXIT_SECONDS)
                assert status == 3, (rank, status, (directory / f"rank_{rank}.txt").read_text()[-3000:])
    finally:
        for process in processes:
            process.kill()
            process.wait()
    ranks = [rank for rank in range(WORLD_SIZE) if rank != victim]
    return {rank: json.loads((directory / f"rank_{rank}.json").read_text()) for rank in ranks}


@pytest.mark.parametrize(
    ("depth", "victim", "signal_name"),
    [
        ("3", 1, "SIGKILL"),
        pytest.param("3", 0, "SIGKILL", marks=pytest.mark.slow),  # the store lives there
        pytest.param("3", 1, "SIGSTOP", marks=pytest.mark.slow),
        pytest.param("1", 2, "SIGSTOP", marks=pytest.mark.slow),
        pytest.param("1", 0, "SIGSTOP", marks=pytest.mark.slow),
        pytest.param("plain", 1, "SIGKILL", marks=pytest.mark.slow),
        pytest.param("plain", 1, "SIGSTOP", marks=pytest.mark.slow),
    ],
)
def test_survivors_name_the_dead_rank_and_the_stage(depth: str, victim: int, signal_name: str, tmp_path: Path) -> None:
    for rank, told in survivors(depth, victim, signal_name, tmp_path).items():
        error = str(told["error"])
        assert f"rank {victim} of {WORLD_SIZE}" in error, error
        assert f"while rank {rank} waited in" in error, error
        assert "FORWARD" in error if depth == "plain" else " of batch " in error, error
        assert float(str(told["seconds"])) < SECONDS, told


@contextlib.contextmanager
def impatient() -> Iterator[None]:
    """All that a watch does, in a second."""
    with (
        mock.patch.object(watchdog, "BEAT_SECONDS", 0.1),
        mock.patch.object(watchdog, "SUSPICION_SECONDS", 0.2),
        mock.patch.object(watchdog, "BROKEN_SECONDS", 0.5),
    ):
        yield


def slow_loader(folder: Path) -> list[str]:
    """Rank 1 loads its third batch until both ranks have told where they are, and longer than a silent one may."""
    rank = dist.get_rank()

    def told(kept: Kept) -> list[str]:
        return [text for text in kept.texts if "all ranks live" in text]

    with impatient(), Kept() as kept, pytest.MonkeyPatch.context() as patch:
        run = Run(1)
        watch: Watch = run.pipeline._watch
        watch.dead_seconds = 4.0  # alive: never given up

        def tell_once_both_are_there() -> None:
            until(lambda: watch._places() == ("LOAD of batch 2" if rank == 1 else "DIST of batch 2"))
            until(lambda: watch._store.get("place/1") == b"LOAD of batch 2" and 1 - rank in watch._heard)
            patch.setattr(watchdog, "STALL_SECONDS", 1.0)
            until(lambda: told(kept) != [])
            (folder / f"told_{rank}").touch()

        teller = threading.Thread(target=tell_once_both_are_there)
        teller.start()

        def loader() -> Iterator[Any]:
            for number, batch in enumerate(run.mine[:4]):
                if (number, rank) == (2, 1):
                    time.sleep(6.0)
                    until(lambda: len(list(folder.iterdir())) == 2)
                yield batch

        iterator = loader()
        for _ in range(4):
            run.pipeline.progress(iterator)
        teller.join()
        dist.barrier()  # a rank whose watch has ended is silent
        watch.end()
        return told(kept)


def until(is_true: Callable[[], bool]) -> None:
    """Wait; the job's watchdog ends it."""
    while not is_true():
        time.sleep(0.02)


def test_a_rank_that_is_slow_is_named_once_and_nobody_is_given_up(pool_2: RankPool, tmp_path: Path) -> None:
    first, second = pool_2.run(slow_loader, tmp_path)
    assert len(first) == len(second) == 1
    assert re.search(r"rank 0 of 2 has been in DIST of batch 2 for \d+ s", first[0])
    assert "Rank 1 is in LOAD of batch 2." in first[0]


def silent_without_death(path: str) -> None:
    """Rank 1's heartbeat stops although the process lives. The ranks' connections are broken afterwards."""
    with impatient():
        group = dist.new_group(backend="gloo")
        watch = watch_of(group)
        assert watch is not None
        watch.dead_seconds = 3.0
        dist.barrier()
        if dist.get_rank() == 1:
            watch.end()
            until(Path(path).exists)
        else:
            with pytest.raises(RuntimeError), watch.stage("map", 5):
                dist.all_reduce(torch.ones(1), group=group)
            Path(f"{path}.part").write_text(str(watch.verdict))
            Path(f"{path}.part").rename(path)
        raise RuntimeError("the pool's own group is broken too")


def test_a_silent_rank_is_given_up_and_whoever_waits_in_gloo_returns(pool_2: RankPool, tmp_path: Path) -> None:
    with pytest.raises(RankFailure, match="the pool's own group is broken too"):
        pool_2.run(silent_without_death, str(tmp_path / "told"))
    told = (tmp_path / "told").read_text()
    assert re.search(r"rank 1 of 2 has not been heard of for \d+ s while rank 0 waited in MAP of batch 5", told), told


def life_of_a_watch() -> None:
    assert watch_of(dist.new_group([dist.get_rank()], use_local_synchronization=True)) is None
    with impatient():
        group = dist.new_group(backend="gloo")
        watch = watch_of(group)
        assert watch is not None and watch_of(group) is watch
        threads, gone = watch._threads, weakref.ref(group)
        child = os.fork()
        if child == 0:
            with watch.stage("map", 1):
                is_quiet = watch.explain(RuntimeError("Connection closed by peer")) is None
            watch.end()
            os._exit(7 if is_quiet else 8)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
        dist.barrier()
        dist.destroy_process_group(group)
        del group, watch
        gc.collect()
        until(lambda: gone() is None)  # the threads do not keep it, but for the moment in which they look whether it is
        for thread in threads:
            thread.join()


def test_a_watch_ends_with_its_group_and_is_quiet_in_a_fork(pool_2: RankPool) -> None:
    pool_2.run(life_of_a_watch)


def never_given_up() -> None:
    for seconds in (0, 9.9, True, "20", float("nan"), torch.tensor(20.0)):
        with pytest.raises(ConfigError, match=r"dead_rank_seconds=.*\. Pass a number of seconds from 10 on"):
            Run(1, dead_rank_seconds=seconds)
    with impatient(), mock.patch.object(watchdog, "DEAD_SECONDS", 0.5):
        run = Run(1, dead_rank_seconds=None)
        watch: Watch = run.pipeline._watch
        iterator = run.loader(0, 4)
        run.train(iterator, range(1))
        if dist.get_rank() == 1:
            watch.end()
            time.sleep(3.0)
        run.train(iterator, range(1, 4))
        assert watch.verdict is None


def test_a_user_may_wait_for_ever(pool_2: RankPool) -> None:
    pool_2.run(never_given_up)


def other_errors() -> None:
    run = Run(1)
    watch: Watch = run.pipeline._watch
    with mock.patch.object(watchdog, "BROKEN_SECONDS", 10_000.0):  # to wait for a verdict would be to hang
        assert watch.explain(RuntimeError("mat1 and mat2 shapes cannot be multiplied")) is None
        assert watch.explain(ConfigError("a connection")) is None


def test_errors_of_other_causes_are_left_alone(pool_2: RankPool) -> None:
    pool_2.run(other_errors)


@pytest.mark.parametrize(
    "text", ["DataLoader timed out after 5 s", "could not open connection to the database", "peer"]
)
def test_a_user_s_own_error_is_raised_at_once(pool_2: RankPool, text: str) -> None:
    pool_2.run(raises_its_own_error, text)


def raises_its_own_error(text: str) -> None:
    run = Run(1)

    def loader() -> Iterator[Any]:
        yield run.mine[0]
        raise RuntimeError(text)

    iterator = loader()
    run.pipeline.progress(iterator)
    with mock.patch.object(watchdog, "BROKEN_SECONDS", 10_000.0), pytest.raises(RuntimeError, match=text):
        run.pipeline.progress(iterator)
    run.pipeline.reset()


def suspended() -> str | None:
    """All ranks are stopped for 9 s, in the middle of a stage, and go on."""
    group = dist.new_group(backend="gloo")
    watch = watch_of(group)
    assert watch is not None
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, os.getpid())
    pids = " ".join(map(str, everyone))
    with impatient():
        watch.dead_seconds = 6.0
        with watch.stage("load", 0):
            time.sleep(1.0)
            if dist.get_rank() == 0:
                subprocess.Popen(["sh", "-c", f"kill -STOP {pids}; sleep 9; kill -CONT {pids}"]).wait()
            dist.barrier()
            time.sleep(1.5)
        dist.barrier()  # a rank whose watch has ended is silent
        verdict = watch.verdict
    watch.end()
    return verdict


def test_a_job_that_was_suspended_as_a_whole_goes_on(pool_2: RankPool) -> None:
    assert pool_2.run(suspended) == [None, None]
