"""Initial rows as a graph of tensor operations: the bits of the native core, however the graph is run."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hybridrec import Constant, HashEmbeddingBagConfig, Normal, Uniform
from hybridrec.config import TableConfig, resolve_table
from hybridrec.inference import initial_rows as graph
from hybridrec.inference.initial_rows import initial_rows_of
from hybridrec.native import initial_rows, mix64, table_seed
from hybridrec.native.protocol import ShardSpec

SOURCES: dict[str, dict[str, Any]] = {
    "uniform": {"initializer": Uniform(-0.3, 0.7)},
    "normal": {"initializer": Normal(0.1, 2.0)},
    "constant": {"initializer": Constant(0.1)},
    "bank": {"init_fn": lambda rows: nn.init.normal_(rows)},
}


def ids(count: int = 3000) -> Tensor:
    generator = torch.Generator().manual_seed(7)
    extremes = torch.tensor([0, 1, -1, 2**63 - 1, -(2**63), 2**32, -(2**32), 2**31, -(2**31)])
    return torch.cat([extremes, torch.randint(-(2**63), 2**63 - 1, (count,), generator=generator)])


def table(source: str, dim: int, seed: int = 5) -> TableConfig:
    return resolve_table(HashEmbeddingBagConfig(10, dim, "user", seed=seed, **SOURCES[source]))


def native_rows(config: TableConfig, ids_n: Tensor) -> Tensor:
    spec = ShardSpec(
        name=config.name,
        dim=config.embedding_dim,
        num_row_states=0,
        num_row_wise_states=0,
        state_initial_values=(),
        num_slots=0,
        planned_rows=1,
        table_seed=table_seed(config.seed, config.name),
        **config.initializer.to_spec_fields(),
    )
    return initial_rows(spec, mix64(ids_n))


def test_keys_are_those_of_the_core() -> None:
    assert torch.equal(graph.mix64(ids()), mix64(ids()))


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize(("dim", "seed"), [(1, 0), (3, -(2**63)), (8, 2**63 - 1), (33, 12345)])
def test_rows_are_those_of_the_core(source: str, dim: int, seed: int) -> None:
    config = table(source, dim, seed)
    module = initial_rows_of(config)
    assert torch.equal(module(ids()), native_rows(config, ids()))
    assert module(ids()[:0]).shape == (0, dim)


@pytest.mark.parametrize("source", SOURCES)
def test_scripted_and_traced_graphs_have_the_same_rows(source: str) -> None:
    config = table(source, 3)
    module, want = initial_rows_of(config), native_rows(config, ids())
    traced = torch.fx.symbolic_trace(module)
    assert torch.equal(traced(ids()), want)
    scripted = torch.jit.script(module)
    for _ in range(3):  # its optimiser starts with the second call
        assert torch.equal(scripted(ids()), want)


@pytest.mark.parametrize("source", ["uniform", "bank"])
def test_an_exported_graph_has_the_same_rows(source: str) -> None:
    config = table(source, 6)
    exported = torch.export.export(
        initial_rows_of(config), (ids(),), dynamic_shapes=({0: torch.export.Dim("n")},)
    ).module()
    for count in (3000, 17):
        assert torch.equal(exported(ids(count)), native_rows(config, ids(count)))


def test_seed_and_name_tell_tables_apart() -> None:
    rows = [initial_rows_of(table("uniform", 4, seed))(ids()) for seed in (0, 1)]
    assert not torch.equal(*rows)
