"""Each planted fault is found, on threads and on the simulated device's streams; with and without a canary."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch

from tests.distributed.test_mutants import step_twice
from tests.model_check import mutants
from tests.model_check.checker import check_schedule
from tests.model_check.scheduler import WrongSchedule
from tests.property.test_shard_group_mutants import MUTANTS as CORE_MUTANTS
from tests.ranks import RankPools
from tests.simnpu.test_mutants import (
    forget_arrival,
    forget_fence,
    forget_ready,
    forget_record_stream,
    reuse_staging_early,
)

Mutant = Callable[[], AbstractContextManager[Any]]
MOST_SCHEDULES = 150
"""Within so many a fault must show."""


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def first_failure(**kwargs: Any) -> str:
    """What the first wrong schedule says; raises if there is none."""
    for seed in range(MOST_SCHEDULES):
        try:
            check_schedule(seed, **kwargs)
        except WrongSchedule as e:
            return str(e)
    raise AssertionError(f"{MOST_SCHEDULES} schedules are right")


@pytest.mark.parametrize(
    ("mutant", "tier", "core"),
    [
        (mutants.release_pins_at_the_lookup, "host", "compiled"),
        (mutants.release_pins_at_the_lookup, "staged", "compiled"),
        (mutants.scatter_nothing, "staged", "compiled"),
        (mutants.load_before_the_write_back_landed, "staged", "reference"),
        (mutants.commit_out_of_order, "host", "reference"),
        (mutants.undo_the_wrong_journal, "host", "reference"),
        (mutants.key_pins_by_the_wrong_context, "host", "reference"),
        (mutants.lose_a_commit_that_was_posted, "host", "compiled"),
        (mutants.count_a_step_too_many, "host", "compiled"),
        (step_twice, "host", "compiled"),
    ],
    ids=lambda value: getattr(value, "__name__", value),
)
def test_a_fault_is_found_on_threads(mutant: Mutant, tier: str, core: str) -> None:
    with mutant():
        assert first_failure(tier=tier, core=core)


@pytest.mark.parametrize(
    "name",
    [
        "skip_one_write_back",
        "load_before_write_back",
        "release_a_pin_early",
        "do_not_hand_a_new_row_over",
        "do_not_bring_evicted_rows_back",
        "evict_the_newest",
        "forget_that_a_trained_slot_is_dirty",
        "leave_states_as_they_were_in_the_slot",
    ],
)
def test_a_fault_of_the_core_is_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    CORE_MUTANTS[name](monkeypatch)
    assert first_failure(core="reference")


@pytest.mark.parametrize("name", ["skip_one_write_back", "load_before_write_back"])
def test_stale_values_are_found_without_a_canary(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory that holds old rows instead of the canary: plausible values, still other ones."""
    monkeypatch.setattr("hybridrec.native.reference.row_store.np.full", lambda shape, *_, dtype: _zeros(shape, dtype))
    CORE_MUTANTS[name](monkeypatch)
    assert " is not " in first_failure(core="reference", has_canary=False)


def _zeros(shape: Any, dtype: Any) -> Any:
    return torch.zeros(shape, dtype=torch.float32).numpy().astype(dtype)


def mutant_on_npu(mutant: Mutant) -> str:
    torch.set_num_threads(1)
    from tests.simnpu.memory import take_hazards

    with mutant():
        failure = ""
        for seed in range(MOST_SCHEDULES):
            try:
                check_schedule(seed, tier="npu", core="reference")
            except WrongSchedule as e:
                failure = str(e)
            failure += " ".join(take_hazards())
            if failure:
                break
    return failure


@pytest.mark.parametrize(
    ("mutant", "sign"),
    [
        (mutants.drop_one_fence, "without waiting for it"),
        (forget_fence, "without waiting for it"),
        (forget_ready, "without waiting for it"),
        (forget_record_stream, "was freed while stream"),
        (reuse_staging_early, "was changed"),
        (forget_arrival, " is not "),
        (mutants.release_pins_at_the_lookup, ""),
        (mutants.scatter_nothing, " is not "),
        (mutants.load_before_the_write_back_landed, " is not "),
        (mutants.undo_the_wrong_journal, ""),
        pytest.param(mutants.commit_out_of_order, "", marks=pytest.mark.slow),
        (mutants.key_pins_by_the_wrong_context, ""),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_a_fault_is_found_on_streams(npu_pools: RankPools, mutant: Mutant, sign: str) -> None:
    (failure,) = npu_pools[1].run(mutant_on_npu, mutant)
    assert failure and sign in failure, failure
