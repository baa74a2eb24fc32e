"""A batch may come in many forms; what is trained does not depend on the form."""

from __future__ import annotations

import dataclasses

import pytest
import torch
import torch.distributed as dist
from torchrec import KeyedJaggedTensor

from hybridrec.distributed.batch_contents import is_as_before, versions_of
from hybridrec.distributed.pipelined_call import _is_same
from tests.distributed.kjt_forms import FORMS, IDS, MIXED_TABLES, form_of, train_mixed
from tests.distributed.oracle import Table
from tests.distributed.scenario import OPTIMIZERS, Scenario, build
from tests.ranks import RankPool

DIMS = (1, 2, 3, 5, 7, 9, 31, 33, 127, 257, 2048)
MIXED = Scenario(tables=MIXED_TABLES, steps=2 * len(FORMS))


def test_every_form_is_used_on_every_rank() -> None:
    for rank in range(3):
        assert {form_of(step, rank) for step in range(MIXED.steps)} == set(FORMS)


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_all_forms_equal_the_oracle(pools: dict[int, RankPool], world_size: int) -> None:
    """Another form at every step and on every rank; keys in random order, interleaved over tables; weights unread."""
    pools[world_size].run(train_mixed, MIXED)


@pytest.mark.parametrize("world_size", [1, 2])
def test_all_forms_equal_the_oracle_weighted_in_a_pipeline(pools: dict[int, RankPool], world_size: int) -> None:
    pools[world_size].run(train_mixed, dataclasses.replace(MIXED, is_weighted=True, optimizer="adam"), 3)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("world_size", [1, 2])
def test_dims_of_all_kinds_equal_the_oracle(pools: dict[int, RankPool], world_size: int, optimizer: str) -> None:
    """One table a dim, every third with MEAN, and two features each whose keys are interleaved."""
    tables = tuple(
        Table(name=f"t{dim}", dim=dim, features=(f"x{dim}", f"y{dim}"), is_mean=i % 3 == 1)
        for i, dim in enumerate(DIMS)
    )
    pools[world_size].run(train_mixed, Scenario(tables=tables, steps=6, optimizer=optimizer))


# ---- what is refused, by every rank --------------------------------------------------------------------------------


def _good() -> KeyedJaggedTensor:
    return KeyedJaggedTensor(keys=["x", "y"], values=torch.tensor([1, 2, 3]), lengths=torch.tensor([1, 1, 0, 1]))


def _bad(kind: str) -> KeyedJaggedTensor:
    fields = {"keys": ["x", "y"], "values": torch.tensor([1, 2, 3, 4, 5])}
    if kind == "no keys":
        return KeyedJaggedTensor.empty()
    if kind == "trailing ids":
        return KeyedJaggedTensor(**fields, offsets=torch.tensor([0, 1, 2, 2, 3]))
    if kind == "too few ids":
        return KeyedJaggedTensor(**fields, lengths=torch.tensor([1, 1, 0, 4]))
    if kind == "decreasing offsets":
        return KeyedJaggedTensor(**fields, offsets=torch.tensor([0, 3, 2, 4, 5]))
    return KeyedJaggedTensor(**fields, lengths=torch.tensor([1, 1, 3]), stride=2)


REFUSALS = {
    "no keys": r"lacks 'x' (table 't'), 'y' (table 't'). It has no feature",
    "trailing ids": "lengths add up to 3 but there are 5 ids (by feature: 'x' 2, 'y' 1)",
    "too few ids": "lengths add up to 6 but there are 5 ids (by feature: 'x' 2, 'y' 4)",
    "decreasing offsets": "a length is -1 (feature 'x', bag 1)",
    "wrong number of lengths": "3 lengths for 2 features of 2 bags",
}


def refusals() -> dict[str, str]:
    """The last rank's batch is bad in one way after the other; the others' are good. Then all train on."""
    scenario = Scenario(tables=(Table(name="t", dim=4, features=("x", "y")),), steps=1, ids_per_table=20)
    dmp, _ = build(scenario, {"t": 20})
    texts = {}
    labels = torch.ones(2)
    for kind in REFUSALS:
        is_bad = dist.get_rank() == dist.get_world_size() - 1
        try:
            dmp(_bad(kind) if is_bad else _good(), labels)
        except ValueError as e:
            texts[kind] = f"{type(e).__name__}: {e}"
        stats = dmp.module.ebc.stats()
        assert all(s.rows == 0 and s.pins == 0 for s in stats), (kind, stats)
    dmp(_good(), labels).backward()
    return texts


@pytest.mark.parametrize("world_size", [1, 2])
def test_what_is_malformed_is_refused_on_all_ranks(pools: dict[int, RankPool], world_size: int) -> None:
    results = pools[world_size].run(refusals)
    assert all(result == results[0] for result in results)
    assert results[0].keys() == REFUSALS.keys()
    for kind, text in results[0].items():
        assert text.startswith("IdError") and REFUSALS[kind] in text, text


# ---- what a pipeline takes for the batch that it prepared ----------------------------------------------------------


def _variable(
    values: torch.Tensor, lengths: torch.Tensor, index: torch.Tensor, strides: list[int]
) -> KeyedJaggedTensor:
    return KeyedJaggedTensor(
        keys=["x", "y"],
        values=values,
        lengths=lengths,
        stride_per_key_per_rank=[[s] for s in strides],
        inverse_indices=(["x", "y"], index),
    )


def test_a_pipeline_tells_variable_batches_of_the_same_ids_apart() -> None:
    values, lengths, index = torch.arange(3), torch.tensor([1, 1, 1]), torch.zeros(2, 4, dtype=torch.int64)
    prepared = _variable(values, lengths, index, [2, 1])
    assert _is_same(prepared, _variable(values, lengths, index, [2, 1]))
    assert not _is_same(prepared, _variable(values, lengths, index.clone(), [2, 1]))
    assert not _is_same(prepared, _variable(values, lengths, index, [1, 2]))


def test_a_pipeline_sees_inverse_indices_that_are_written_in_place() -> None:
    index = torch.zeros(2, 4, dtype=torch.int64)
    versions = versions_of([_variable(torch.arange(3), torch.tensor([1, 1, 1]), index, [2, 1])])
    assert is_as_before(versions)
    index[0, 0] = 1
    assert not is_as_before(versions)


def test_ids_of_the_whole_range_are_among_those_that_are_tried() -> None:
    assert {0, -1, 2**63 - 1, -(2**63)} <= set(IDS)
