"""A model with a sparse buffer, such as the graph of users and items: saved, loaded, compared before that."""

from __future__ import annotations

from pathlib import Path
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from hybridrec import ConfigError, checkpoint
from tests.checkpoint.runs import build
from tests.distributed import scenario as scenarios
from tests.distributed.pipelines import all_batches, mine
from tests.distributed.scenario import Scenario
from tests.ranks import RankPools

SCENARIO = Scenario(steps=4, ids_per_table=50)
LAYOUTS = {"sparse_coo": Tensor.to_sparse_coo, "sparse_csr": Tensor.to_sparse_csr}


class Graph(nn.Module):
    """Values that go along the edges of a graph."""

    def __init__(self, width: int, edges: Tensor) -> None:
        super().__init__()
        self.dense = nn.Linear(width, 1)
        self.register_buffer("edges", edges)

    def forward(self, values: Tensor) -> Tensor:
        return self.dense((self.edges @ values.T).T)


def edges_of(layout: str, width: int, value: float, num_edges: int) -> Tensor:
    edges = torch.zeros(width, width)
    edges.view(-1)[: num_edges * 3 : 3] = value
    return LAYOUTS[layout](edges)


def save_and_load(path: Path, layout: str) -> str:
    """What is said where the buffer cannot be the saved one; it is left alone then."""

    def built(value: float, kind: str = layout, num_edges: int = 9) -> tuple[nn.Module, nn.Module, object]:
        width = sum(t.dim * len(t.features) for t in SCENARIO.tables)
        graph = Graph(width, edges_of(kind, width, value, num_edges))
        with mock.patch.object(scenarios, "dense_of", lambda _: graph):
            dmp, pipeline = build(SCENARIO)
        return graph, dmp, pipeline

    graph, dmp, pipeline = built(2.0)
    pipeline.progress(iter(mine(SCENARIO, all_batches(SCENARIO))))
    checkpoint.save(path, dmp, pipeline._optimizer, pipeline=pipeline)
    again, dmp, pipeline = built(5.0)
    checkpoint.load(path, dmp, pipeline._optimizer, pipeline=pipeline)
    assert torch.equal(again.edges.to_dense(), graph.edges.to_dense()) and again.edges.layout == graph.edges.layout
    other, dmp, pipeline = built(5.0, next(name for name in LAYOUTS if name != layout))
    before = other.edges.to_dense()
    with pytest.raises(ConfigError) as error:
        checkpoint.load(path, dmp, pipeline._optimizer, pipeline=pipeline)
    assert torch.equal(other.edges.to_dense(), before)
    return str(error.value)


@pytest.mark.parametrize(("world_size", "layout"), [(1, "sparse_coo"), (1, "sparse_csr"), (2, "sparse_coo")])
def test_a_sparse_buffer_comes_back(pools: RankPools, tmp_path: Path, world_size: int, layout: str) -> None:
    for said in pools[world_size].run(save_and_load, tmp_path, layout):
        assert "edges' is torch.float32" in said and f"torch.{layout} in the snapshot" in said, said
