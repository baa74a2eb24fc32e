"""The Little Demo under torchrun, killed in every stage of training, saving, loading: it ends as if it had not been."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.checkpoint.jobs import end_of, start_demo, strikes_in, times_trained, uninterrupted
from tests.checkpoint.strikes import STAGES, TALKING, TRAINING, Strike, drawn

BATCHES, SAVE_EVERY = 120, 10  # far enough apart for rows to be written back between two snapshots
OPTIONS = ("--batches", str(BATCHES), "--save-every", str(SAVE_EVERY))
TARGETS = ("one", "all", "job")
Expected = Callable[[int], list[dict[str, Any]]]


@dataclass(frozen=True, kw_only=True)
class Chain:
    """A job that is killed, resumes, is killed .. and then ends."""

    stages: tuple[str, ...]
    world_size: int = 2
    in_background: bool = False

    def strikes(self, seed: str) -> list[Strike]:
        rng = random.Random(seed)
        return [
            drawn(rng, stage, TARGETS[(number + len(seed)) % 3], self.world_size)
            for number, stage in enumerate(self.stages)
        ]


# Loading needs a snapshot, and a moment a job that is not yet at its end.
SAVED = ("list", "export", "rows", "begin", "manifest", "publish", "latest", "remove")
CHAINS = {
    "training": Chain(stages=("moment", *TRAINING)),
    "saving": Chain(stages=("moment", *SAVED, "import")),
    "beside the steps": Chain(
        stages=("moment", "rows", "export", "rows", "commit", "publish", "latest", "map", "rows", "import"),
        in_background=True,
    ),
    "three ranks": Chain(stages=("dist", "swap", "commit", "rows", "latest", "import"), world_size=3),
    "one rank": Chain(stages=("moment", "map", "commit", "export", "latest", "remove", "import"), world_size=1),
}


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("demo")


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> Expected:
    """World size -> what each rank computes if nothing happens."""

    def of(world_size: int) -> list[dict[str, Any]]:
        ends = uninterrupted(tmp_path_factory.getbasetemp(), world_size, *OPTIONS)
        assert all(set(end["losses"]) == set(range(1, BATCHES + 1)) and end["written_back"] for end in ends)
        return ends

    return of


def kill_and_resume(folder: Path, strikes: Iterable[Strike], world_size: int, *, in_background: bool = False) -> None:
    """One start a strike, and one more, which comes to the end."""
    snapshots = folder / "snapshots"
    given: dict[str, Any] = {"world_size": world_size, "in_background": in_background}
    for number, strike in enumerate(strikes):
        job = start_demo(folder, snapshots, *OPTIONS, strikes=[strike], **given)
        status = job.wait()
        hits = strikes_in(folder)
        assert len(hits) == number + 1, f"{strike} did not come: status {status}\n{job.log()}"
        assert status != 0, job.log()
        if strike.target == "one" and world_size > 1:
            name = f"rank {strike.rank} of {world_size} has not been heard of"
            assert name in job.log() and "waited in" in job.log(), job.log()
    job = start_demo(folder, snapshots, *OPTIONS, **given)
    assert job.wait() == 0, job.log()


def check_as_uninterrupted(folder: Path, expected: list[dict[str, Any]]) -> None:
    """Rows, states, scores, dense part, its optimizer, every loss of every time that a batch was trained: each bit."""
    for rank, (before, after) in enumerate(zip(expected, end_of(folder, len(expected)), strict=True)):
        differing = [name for name in before if before[name] != after[name]]
        assert not differing, f"rank {rank}: {differing} differ"


def test_a_killed_demo_goes_on(root: Path, expected: Expected) -> None:
    strikes = [
        Strike(stage="dist", number=14, when=0.5, rank=1, target="all"),
        Strike(stage="rows", number=5, when=1.0, rank=1, target="job"),
        Strike(stage="commit", number=16, when=0.5, rank=0, target="all"),
        Strike(stage="latest", number=2, target="all"),
    ]
    kill_and_resume(root / "fast", strikes, 2)
    check_as_uninterrupted(root / "fast", expected(2))
    assert max(times_trained(root / "fast").values()) > 1  # batches were lost, and trained again


@pytest.mark.slow
@pytest.mark.parametrize("name", CHAINS)
def test_a_demo_that_is_killed_again_and_again(root: Path, expected: Expected, name: str) -> None:
    chain, folder = CHAINS[name], root / name
    kill_and_resume(folder, chain.strikes(name), chain.world_size, in_background=chain.in_background)
    hits = Counter(hit["stage"] for hit in strikes_in(folder))
    assert hits == Counter(chain.stages)
    check_as_uninterrupted(folder, expected(chain.world_size))


def test_every_stage_has_its_kills() -> None:
    strikes = [strike for name, chain in CHAINS.items() for strike in chain.strikes(name)]
    assert len(strikes) >= 40
    assert {strike.stage for strike in strikes} == {*STAGES, "moment"} - {*TALKING}
    assert {strike.target for strike in strikes} == set(TARGETS)
    for target in TARGETS:
        assert sum(strike.target == target for strike in strikes) >= 10
    assert len({strike.rank for strike in strikes}) == 3
