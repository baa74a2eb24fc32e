"""A resume adds the ranks' gradients in the order of the run before, with the wrapper that TorchRec has by itself."""

from __future__ import annotations

import functools
import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torchrec.distributed import DistributedModelParallel
from torchrec.distributed.model_parallel import DefaultDataParallelWrapper

from hybridrec import checkpoint
from hybridrec._compat import data_parallel
from hybridrec.checkpoint import loading, saving
from hybridrec.distributed.model_parts import dense_tensors
from tests.checkpoint.runs import build, records_of
from tests.distributed import scenario as scenarios
from tests.distributed.pipelines import all_batches, mine
from tests.distributed.scenario import Scenario
from tests.ranks import RankPools

SCENARIO = Scenario(steps=9, ids_per_table=200)


class Head(nn.Module):
    """Layers that are not used in the order in which they are defined; some are not used at all."""

    def __init__(self, width: int, *, has_unused: bool) -> None:
        super().__init__()
        torch.manual_seed(11)
        self.last, self.first, self.middle = nn.Linear(16, 1), nn.Linear(width, 40), nn.Linear(40, 16)
        self.scale = nn.Parameter(torch.rand(16))
        self.unused = nn.Linear(9, 9) if has_unused else None

    def forward(self, values: Tensor) -> Tensor:
        return self.last(torch.tanh(self.middle(torch.tanh(self.first(values)))) * self.scale)


@dataclass(frozen=True, kw_only=True)
class Case:
    """A way to train."""

    wrapper: tuple[tuple[str, Any], ...] = ()
    """Arguments of TorchRec's default wrapper."""
    has_pipeline: bool = True
    keeps_gradients: bool = False
    """Whether they are zeroed in place."""
    has_unused: bool = False
    at: int = 4
    """Step of the snapshot."""


CASES = {
    "default": Case(),
    "default, before it has put its buckets anew": Case(at=2),
    "default, before the first step": Case(at=0),
    "plain loop": Case(has_pipeline=False),
    "gradients zeroed in place": Case(has_pipeline=False, keeps_gradients=True),
    "several buckets, parameters without gradient": Case(wrapper=(("bucket_cap_mb", 0.001),), has_unused=True),
    "no static graph, after the first step": Case(wrapper=(("static_graph", False),), at=1),
    "no static graph, gradients zeroed in place": Case(
        wrapper=(("static_graph", False),), has_pipeline=False, keeps_gradients=True
    ),
    "unused are looked for": Case(
        wrapper=(("static_graph", False), ("find_unused_parameters", True)),
        has_pipeline=False,
        keeps_gradients=True,
        has_unused=True,
    ),
    "communication hook": Case(wrapper=(("allreduce_comm_precision", "fp16"), ("bucket_cap_mb", 0.001))),
}


class Run:
    """One rank's model, new, and its loop."""

    def __init__(self, case: Case) -> None:
        head = functools.partial(
            Head, sum(t.dim * len(t.features) for t in SCENARIO.tables), has_unused=case.has_unused
        )
        parallel = functools.partial(
            DistributedModelParallel, data_parallel_wrapper=DefaultDataParallelWrapper(**dict(case.wrapper))
        )
        with (
            mock.patch.object(scenarios, "dense_of", lambda _: head()),
            mock.patch.object(scenarios, "DistributedModelParallel", parallel),
        ):
            self.dmp, pipeline = build(SCENARIO)
        self.case, self.optimizer, self.pipeline = case, pipeline._optimizer, pipeline if case.has_pipeline else None

    def train(self, first: int, last: int) -> list[float]:
        batches = iter(mine(SCENARIO, all_batches(SCENARIO)[first:]))
        if self.pipeline is not None:
            return [self.pipeline.progress(batches).item() for _ in range(first, last)]
        return [self._step(next(batches)) for _ in range(first, last)]

    def _step(self, batch: Any) -> float:
        if self.case.keeps_gradients:
            self.dmp.fused_optimizer.zero_grad()
            self.dmp.zero_grad(set_to_none=False)
        else:
            self.optimizer.zero_grad()
        loss, _ = self.dmp(batch)
        loss.backward()
        self.optimizer.step()
        return float(loss.item())

    def save(self, path: Path) -> Path:
        return checkpoint.save(path, self.dmp, self.optimizer, pipeline=self.pipeline)

    def load(self, path: Path) -> None:
        checkpoint.load(path, self.dmp, self.optimizer, pipeline=self.pipeline)

    def state(self) -> list[Any]:
        (_, dense) = self.optimizer.optimizers[1]
        tensors = [*dict(dense_tensors(self.dmp)).values(), *(dense.state[p]["sum"] for p in dense.params.values())]
        return [records_of(self.dmp), [tensor.detach().numpy().tobytes() for tensor in tensors]]


MUTANTS: dict[str, tuple[Any, str, Any]] = {
    "": (data_parallel, "Buckets", data_parallel.Buckets),
    "nothing is put back": (loading, "put_gradient_order", lambda *_: []),
    "buckets are not put back": (data_parallel, "put_buckets", lambda *_: True),
    "gradients are not put back": (torch, "zeros_like", lambda _: None),
    "what was just learned is not saved": (data_parallel, "buckets_of", lambda _: None),
    "communication hooks are forgotten": (dist, "_register_comm_hook", lambda *_: None),
}
"""Name -> what is another in a load, and in a save."""


def mutated(mutant: str) -> Any:
    owner, name, value = MUTANTS[mutant]
    return mock.patch.object(owner, name, value)


def interrupted(case: Case, path: Path, mutant: str = "", trained: int = 0) -> list[str]:
    """What of a run that saves, and of one that loads, is not as that of one which does neither.

    Args:
        case: All of them.
        path: Folder of snapshots.
        mutant: What is wrong.
        trained: Steps that the run which loads has made before.
    """
    alone, saved, again = Run(case), Run(case), Run(case)
    expected, losses = alone.train(0, SCENARIO.steps), saved.train(0, case.at)
    with mutated(mutant):
        saved.save(path)
    losses += saved.train(case.at, SCENARIO.steps)
    again.train(0, trained)
    with mutated(mutant):
        again.load(path)
    found = {
        "losses of the run that saved": losses == expected,
        "state of the run that saved": saved.state() == alone.state(),
        "losses of the run that loaded": again.train(case.at, SCENARIO.steps) == expected[case.at :],
        "state of the run that loaded": again.state() == alone.state(),
    }
    return [what for what, is_same in found.items() if not is_same]


@pytest.mark.parametrize("name", CASES)
def test_a_resume_adds_gradients_in_the_order_of_the_run_before(pools: RankPools, tmp_path: Path, name: str) -> None:
    assert pools[3].run(interrupted, CASES[name], tmp_path) == [[]] * 3


@pytest.mark.parametrize("at", [0, 5])
def test_a_run_that_has_trained_goes_back(pools: RankPools, tmp_path: Path, at: int) -> None:
    assert pools[3].run(interrupted, Case(at=at), tmp_path, trained=3) == [[]] * 3


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [1, 2, 4])
@pytest.mark.parametrize("name", CASES)
def test_at_other_numbers_of_ranks(pools: RankPools, tmp_path: Path, name: str, world_size: int) -> None:
    assert pools[world_size].run(interrupted, CASES[name], tmp_path) == [[]] * world_size


@pytest.mark.parametrize(
    ("name", "mutant"),
    [
        ("default", "nothing is put back"),
        ("default", "buckets are not put back"),
        ("several buckets, parameters without gradient", "buckets are not put back"),
        ("gradients zeroed in place", "gradients are not put back"),
        ("unused are looked for", "gradients are not put back"),
        ("default, before it has put its buckets anew", "what was just learned is not saved"),
        ("communication hook", "communication hooks are forgotten"),
    ],
)
def test_mutants_are_caught(pools: RankPools, tmp_path: Path, name: str, mutant: str) -> None:
    for differing in pools[3].run(interrupted, CASES[name], tmp_path, mutant):
        assert "state of the run that loaded" in differing
        assert "state of the run that saved" not in differing


# ---- what cannot be put back is told ---------------------------------------------------------------------------------


class Logged(logging.Handler):
    """What was said of the order inside."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        if "adds gradients" in record.getMessage():
            self.messages.append(record.getMessage())

    def __enter__(self) -> Logged:
        logging.getLogger("hybridrec").addHandler(self)
        return self

    def __exit__(self, *_: Any) -> None:
        logging.getLogger("hybridrec").removeHandler(self)


def said(path: Path, saved: Case, loaded: Case, *, is_older: bool = False, is_gone: bool = False) -> list[str]:
    """What a load says: of an older snapshot, with a torch that lacks something."""
    run = Run(saved)
    run.train(0, saved.at)
    with mock.patch.object(saving, "gradient_order", lambda _: {}) if is_older else mutated(""):
        run.save(path)
    again = Run(loaded)
    with mock.patch.object(data_parallel, "_OF_REDUCER", ("_gone",)) if is_gone else mutated(""), Logged() as logged:
        again.load(path)
    again.train(saved.at, saved.at + 3)
    return logged.messages


FEW = Case(wrapper=(("bucket_cap_mb", 0.001),))


@pytest.mark.parametrize(
    ("saved", "loaded", "given", "expected"),
    [
        (Case(at=1), Case(), {}, "the snapshot is of the first step of a static graph"),
        (Case(), FEW, {}, "its buckets are others here (bucket_cap_mb"),
        (Case(), Case(), {"is_older": True}, "the snapshot does not tell it"),
        (Case(), Case(), {"is_gone": True}, "has no Reducer._gone"),
        (Case(), Case(), {}, ""),
        (CASES["unused are looked for"], CASES["unused are looked for"], {"is_older": True}, ""),
    ],
)
def test_what_cannot_be_put_back_is_told_once(
    pools: RankPools, tmp_path: Path, saved: Case, loaded: Case, given: dict[str, bool], expected: str
) -> None:
    first, *others = pools[3].run(said, tmp_path, saved, loaded, **given)
    assert others == [[], []] and len(first) == bool(expected)
    assert all(expected in message and "find_unused_parameters=True" in message for message in first)


def test_two_ranks_add_in_one_order(pools: RankPools, tmp_path: Path) -> None:
    assert pools[2].run(said, tmp_path, Case(), Case(), is_older=True) == [[], []]
