"""The tutorial runs as it is written, and its checks notice what they are there for."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn
from torchrec import KeyedJaggedTensor

from examples.torchrec_tutorial import (
    step_1_unsharded,
    step_2_data_types,
    step_3_sharded,
    step_4_optimizers,
    step_5_sequences,
    step_6_inference,
    step_7_snapshots,
    tell,
    twins,
)
from examples.torchrec_tutorial.tell import TutorialError
from tests.ranks import RankPool

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")


def test_it_runs_to_its_end() -> None:
    environment = {k: v for k, v in os.environ.items() if k not in ("GLOO_SOCKET_IFNAME", "OMP_NUM_THREADS")}
    done = subprocess.run(
        [ROOT / "examples" / "torchrec_tutorial" / "run.sh"],
        env=environment | {"HYBRIDREC_PYTHON": sys.executable},
        capture_output=True,
        text=True,
        timeout=550,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.findall(r"^==== (\d)\.", done.stdout, re.MULTILINE) == list("1234567")  # once: by rank 0
    assert len(re.findall(r"^  \[(?:same|close|holds)\] ", done.stdout, re.MULTILINE)) > 50
    assert done.stdout.rstrip().endswith("Everything is as it says.")
    assert "Warning" not in done.stdout + done.stderr


# ---- wrong results are noticed ------------------------------------------------------------------------------------


def neighbours(features: KeyedJaggedTensor) -> KeyedJaggedTensor:
    """Mutant of `twins.numbered`: one id of the batch stands for another row."""
    values = features.values().clone()
    values[-1] = twins.IDS[(twins.IDS == values[-1]).int().argmax() - 1]
    numbers = (values[:, None] == twins.IDS).int().argmax(dim=1)
    return KeyedJaggedTensor(keys=features.keys(), values=numbers, lengths=features.lengths())


def wrong_row() -> Any:
    return mock.patch.object(twins, "numbered", neighbours)


def no_load() -> Any:
    return mock.patch.object(step_7_snapshots, "load", lambda *args: None)


def never_frozen() -> Any:
    return mock.patch.object(nn.Parameter, "requires_grad_", lambda self, value=True: self)


def no_accumulation() -> Any:
    return mock.patch.object(step_4_optimizers, "accumulate_gradients", lambda model: None)


def another_pipeline() -> Any:
    return mock.patch.object(step_5_sequences, "pipelined", lambda model: [0.0] * step_5_sequences.STEPS)


def other_rates() -> Any:
    return mock.patch.object(step_4_optimizers, "WarmupOptimizer", _with_rates_of_its_own)


def _with_rates_of_its_own(fused: Any, stages: Any, lr: float) -> Any:
    if "Hash" in repr(fused):
        fused.param_groups[0]["lr"] *= 1.1
    return fused


def another_table() -> Any:
    return mock.patch.object(step_6_inference, "load", lambda path: twins.hashed_bags())


def attempt(mutant: Callable[[], Any], step: Callable[..., None], *args: Any) -> str:
    """What the step says about it: the text of its error."""
    with mutant():
        try:
            step(*args)
        except TutorialError as error:
            return str(error)
    return ""


MUTANTS = {
    "1": (wrong_row, step_1_unsharded.run),
    "2": (wrong_row, step_2_data_types.run),
    "3, row-wise": (wrong_row, step_3_sharded.by_hand, "row_wise"),
    "3, by default": (wrong_row, step_3_sharded.by_default),
    "4, fused_params": (wrong_row, step_4_optimizers.by_fused_params),
    "4, each table": (wrong_row, step_4_optimizers.by_apply),
    "4, rates": (other_rates, step_4_optimizers.with_schedules),
    "4, accumulated": (no_accumulation, step_4_optimizers.accumulated),
    "4, frozen": (never_frozen, step_4_optimizers.frozen),
    "5, unsharded": (wrong_row, step_5_sequences.unsharded),
    "5, pipeline": (another_pipeline, step_5_sequences.run),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_a_wrong_result_ends_the_tutorial(pool_2: RankPool, name: str) -> None:
    mutant, step, *args = MUTANTS[name]
    assert all(pool_2.run(attempt, mutant, step, *args))
    assert not any(pool_2.run(attempt, contextlib.nullcontext, step, *args))


def test_a_wrong_frozen_table_ends_the_tutorial(tmp_path: Path) -> None:
    ours, theirs = step_6_inference.trained()
    with mock.patch.object(twins, "numbered", neighbours), pytest.raises(TutorialError, match="8 bits"):
        step_6_inference.quantised(ours, theirs)
    with another_table(), pytest.raises(TutorialError, match="what was loaded"):
        step_6_inference.frozen_on_disk(ours, tmp_path)


def test_a_snapshot_that_is_not_loaded_ends_the_tutorial(pool_2: RankPool, tmp_path: Path) -> None:
    assert all("rows: not the same" in text for text in pool_2.run(attempt, no_load, step_7_snapshots.run, tmp_path))


@pytest.mark.parametrize(
    ("call", "ours", "theirs"),
    [
        (tell.same, [1], [2]),
        (tell.same, torch.zeros(2), torch.tensor([0.0, 1e-12])),
        (tell.same, torch.zeros(2), torch.zeros(2, 1)),
        (tell.same, torch.zeros(2), torch.zeros(2).double()),
        (tell.close, [1.0], [1.001]),
        (tell.close, [1.0, 1.0], [1.0]),
        (tell.close, [float("nan")], [float("nan")]),
    ],
)
def test_what_is_not_equal_is_refused(call: Callable[..., None], ours: Any, theirs: Any) -> None:
    with pytest.raises(TutorialError, match="what it is"):
        call("what it is", ours, theirs)
    with pytest.raises(TutorialError, match="not so"):
        tell.holds("what it is", False)
