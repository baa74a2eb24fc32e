"""The oracle of sequences must be able to fail: each named mutation of the code breaks it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from hybridrec.distributed import sequence_input_dist
from hybridrec.distributed.routing import Routing
from hybridrec.kernels.sequence_kernel import SequenceKernel
from tests.distributed.scenario import Scenario, run_against_oracle
from tests.distributed.test_mutants import lose_a_write_back
from tests.distributed.test_sequence_oracle import COLUMNS, SEQUENCES
from tests.ranks import RankPool


@contextlib.contextmanager
def permutation_for_its_inverse() -> Iterator[None]:
    """Gradients go to the places that the rows came from."""
    with mock.patch.object(sequence_input_dist, "_inverse", lambda permutation: permutation):
        yield


@contextlib.contextmanager
def rows_as_they_lie() -> Iterator[None]:
    """Rows are sent in the order of the lookup, not by the rank that asked."""

    def by_source(counts_FW: Tensor) -> Tensor:
        return torch.arange(int(counts_FW.sum()))

    with mock.patch.object(sequence_input_dist, "_by_source", by_source):
        yield


@contextlib.contextmanager
def sum_backwards() -> Iterator[None]:
    """The gradients of a row are added from the last occurrence to the first."""
    forward, backward = SequenceKernel.forward, SequenceKernel.backward

    def mirrored(self: SequenceKernel, slots_N: Tensor, offsets: Tensor, weights_N: Any) -> tuple[Tensor, object]:
        rows_N = self._rows(slots_N, offsets).flip(0)
        values, saved = self._inner.forward(rows_N, torch.arange(len(rows_N) + 1), None)
        return values.flip(0), saved

    def mirrored_back(self: SequenceKernel, saved: object, grad: Tensor, *, step: int) -> None:
        backward(self, saved, grad.flip(0), step=step)

    assert forward is not mirrored
    with (
        mock.patch.object(SequenceKernel, "forward", mirrored),
        mock.patch.object(SequenceKernel, "backward", mirrored_back),
    ):
        yield


@contextlib.contextmanager
def lose_an_occurrence() -> Iterator[None]:
    """The last occurrence of an id that repeats is taken for another id."""
    real = sequence_input_dist._unique_by_block

    def unique_by_block(values_N: Tensor, counts: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        unique_U, unique_counts, number_N = real(values_N, counts)
        repeats = torch.bincount(number_N, minlength=len(unique_U))[number_N] > 1
        starts = (unique_counts.cumsum(0) - unique_counts).repeat_interleave(counts)
        candidates = (repeats & (number_N != starts)).nonzero().flatten()
        if len(candidates):
            number_N[candidates[-1]] = starts[candidates[-1]]
        return unique_U, unique_counts, number_N

    with mock.patch.object(sequence_input_dist, "_unique_by_block", unique_by_block):
        yield


@contextlib.contextmanager
def cells_of_other_rows() -> Iterator[None]:
    """Pieces of rows of several widths take the places of others."""
    real = sequence_input_dist._of_cells

    def of_cells(index_N: Tensor, cells_M: Tensor) -> Tensor:
        return real(index_N, cells_M).flip(0)

    with mock.patch.object(sequence_input_dist, "_of_cells", of_cells):
        yield


@contextlib.contextmanager
def columns_backwards() -> Iterator[None]:
    """The parts of a column-wise table come out in the other order."""
    real = Routing.first_features.func

    def first_features(self: Routing) -> dict[str, list[int]]:
        return {name: starts[::-1] for name, starts in real(self).items()}

    with mock.patch.object(Routing, "first_features", property(first_features)):
        yield


MUTATIONS: dict[str, Callable[[], contextlib.AbstractContextManager[None]]] = {
    f.__name__: f
    for f in (
        permutation_for_its_inverse,
        rows_as_they_lie,
        sum_backwards,
        lose_an_occurrence,
        lose_a_write_back,
        cells_of_other_rows,
        columns_backwards,
        contextlib.nullcontext,
    )
}


def run_mutant(name: str, scenario: Scenario) -> str:
    """What the oracle comparison says of a mutated run."""
    with MUTATIONS[name]():
        try:
            run_against_oracle(scenario)
        except AssertionError as e:
            return f"caught: {e}"
    return "not caught"


@pytest.mark.parametrize(
    ("name", "world_size", "dedups"),
    [
        ("permutation_for_its_inverse", 2, False),
        ("rows_as_they_lie", 3, False),
        ("sum_backwards", 1, False),
        ("lose_an_occurrence", 2, True),
        ("lose_a_write_back", 1, False),
    ],
)
def test_oracle_catches(pools: dict[int, RankPool], name: str, world_size: int, dedups: bool) -> None:
    ids = 200 if name == "lose_a_write_back" else 40  # few: repeats matter
    scenario = Scenario(is_sequence=True, tables=SEQUENCES, dedups=dedups, steps=30, ids_per_table=ids)
    results = pools[world_size].run(run_mutant, name, scenario)
    assert any(r.startswith("caught") for r in results), results


@pytest.mark.parametrize("name", ["cells_of_other_rows", "columns_backwards"])
def test_oracle_of_columns_catches(pool_2: RankPool, name: str) -> None:
    scenario = Scenario(is_sequence=True, tables=COLUMNS, steps=5, batch_size=5, ids_per_table=60)
    results = pool_2.run(run_mutant, name, scenario)
    assert all(r.startswith("caught") for r in results), results


def test_without_a_mutation_nothing_is_caught(pool_2: RankPool) -> None:
    scenario = Scenario(is_sequence=True, tables=SEQUENCES, dedups=True, steps=10, ids_per_table=40)
    assert pool_2.run(run_mutant, "nullcontext", scenario) == ["not caught"] * 2
