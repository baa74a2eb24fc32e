"""Runs that save, and runs that load what others saved: one rank's side of the comparisons."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist
from torchrec.distributed import DistributedModelParallel

from hybridrec import HashEmbeddingBagConfig, HybridTrainPipelineSparseDist, checkpoint
from hybridrec.distributed.model_parts import dense_tensors
from tests.distributed import scenario as scenarios
from tests.distributed.oracle import Oracle, Part, parts_of
from tests.distributed.pipelines import all_batches, build_oracle, build_pipelined, mine
from tests.distributed.scenario import Scenario, compare_state, raise_together, state_of

Records = dict[str, dict[int, tuple[bytes, int]]]
"""Table, or columns of one -> id -> (record, score)."""


@contextlib.contextmanager
def evicting(max_rows: int | None, policy: str = "evict") -> Iterator[None]:
    """Tables built inside drop rows beyond ``max_rows``."""
    limited = functools.partial(HashEmbeddingBagConfig, max_rows=max_rows, full_policy=policy)
    with mock.patch.object(scenarios, "HashEmbeddingBagConfig", limited) if max_rows else contextlib.nullcontext():
        yield


def build(
    scenario: Scenario, depth: int = 3, max_rows: int | None = None, policy: str = "evict"
) -> tuple[DistributedModelParallel, HybridTrainPipelineSparseDist]:
    with evicting(max_rows, policy):
        return build_pipelined(scenario, all_batches(scenario), depth)


def records_of(dmp: DistributedModelParallel) -> Records:
    """This rank's rows with their scores, wherever they are."""
    lookup = dmp.module.ebc.lookup
    scores = {}
    for t, name in enumerate(lookup.table_names):
        keys, _, found, _, _ = lookup.log.group.entries(t)
        ids = scenarios.unmix64(torch.from_numpy(np.ascontiguousarray(keys))).tolist()
        scores[name] = dict(zip(ids, found.tolist(), strict=True))
    order = [c.name for c in dmp.module.ebc.table_configs]
    parts = sorted(dmp.module.ebc.parts, key=lambda part: (order.index(part.table.name), part.first_column))
    return {
        part.name: {i: (record.tobytes(), scores[part.name][i]) for i, record in table.items()}
        for part, table in zip(parts, state_of(dmp), strict=True)
    }


def name_of(part: Part) -> str:
    """As the package names it."""
    table = part.table
    return table.name if part.dim == table.dim else f"{table.name}[{part.first}:{part.first + part.dim}]"


def save_and_go_on(scenario: Scenario, path: Path, at: int, *, max_rows: int | None = None) -> dict[str, Any]:
    """Train, save at a step while batches are in flight, train on: what a run that loads is compared with."""
    dmp, pipeline = build(scenario, max_rows=max_rows)
    batches = iter(mine(scenario, all_batches(scenario)))
    losses, saved = [], {}
    for step in range(scenario.steps):
        losses.append(pipeline.progress(batches).item())
        if step + 1 == at:
            folder = checkpoint.save(path, dmp, pipeline._optimizer, pipeline=pipeline, extra={"rank": dist.get_rank()})
            dense = {name: tensor.detach().to("cpu", copy=True) for name, tensor in dense_tensors(dmp)}
            saved = {"folder": folder, "records": records_of(dmp), "dense": dense, "dense_sum": dense_sum_of(pipeline)}
    stats = dmp.module.ebc.stats()
    return saved | {"losses": losses, "final": records_of(dmp), "evicted": sum(s.evicted for s in stats)}


def load_and_go_on(scenario: Scenario, path: Path, *, max_rows: int | None = None, depth: int = 3) -> dict[str, Any]:
    """Load into a new model, and train the rest."""
    dmp, pipeline = build(scenario, depth, max_rows)
    loaded = checkpoint.load(path, dmp, pipeline._optimizer, pipeline=pipeline)
    found = {"records": records_of(dmp), "dense": {n: t.detach().to("cpu", copy=True) for n, t in dense_tensors(dmp)}}
    if pipeline.batches_committed != loaded.batches_committed:
        raise AssertionError(f"{pipeline.batches_committed} is not {loaded.batches_committed}")
    batches = iter(mine(scenario, all_batches(scenario)[loaded.batches_committed :]))
    losses = [pipeline.progress(batches).item() for _ in range(scenario.steps - loaded.batches_committed)]
    return found | {"losses": losses, "final": records_of(dmp), "loaded": loaded}


def go_on_against_oracle(scenario: Scenario, path: Path, everything: Records, dense_sum: Any) -> int:
    """At another number of ranks: the rows are those that were saved, and training is that of an oracle put there."""
    dmp, pipeline = build(scenario)
    loaded = checkpoint.load(path, dmp, pipeline._optimizer, pipeline=pipeline)
    rank, world_size = dist.get_rank(), dist.get_world_size()
    here = [part for table in scenario.tables for part in parts_of(table, world_size) if part.owner in (None, rank)]
    expected = {
        name_of(part): {i: r for i, r in everything[name_of(part)].items() if part.has(i, rank, world_size)}
        for part in here
    }
    raise_together("" if records_of(dmp) == expected else "rows or scores are not those that were saved", 0)
    oracle, optimizer = build_oracle(scenario)
    _put(oracle, everything, loaded.batches_committed)
    oracle.dense.module.load_state_dict(_dense_of(dmp))
    for parameter, value in zip(oracle.dense.parameters(), dense_sum, strict=True):
        optimizer.state[parameter]["sum"].copy_(value)
    steps = all_batches(scenario)[loaded.batches_committed :]
    batches = iter(mine(scenario, steps))
    for step, everyone in enumerate(steps):
        loss, wanted = pipeline.progress(batches).item(), oracle.step(everyone, optimizer).item()
        difference = "" if loss == wanted else f"loss {loss!r}, not {wanted!r}"
        pipeline._thread.settle()
        raise_together(difference or compare_state(scenario, oracle, state_of(dmp)), step)
    return sum(map(len, expected.values()))


def _dense_of(dmp: DistributedModelParallel) -> dict[str, torch.Tensor]:
    return {n.removeprefix("dense."): t.detach() for n, t in dense_tensors(dmp)}


def dense_sum_of(pipeline: HybridTrainPipelineSparseDist) -> list[torch.Tensor]:
    """Adagrad's state of the dense part, in the order of its parameters."""
    (_, dense) = pipeline._optimizer.optimizers[1]
    return [dense.state[p]["sum"].to("cpu", copy=True) for p in dense.params.values()]


def _put(oracle: Oracle, everything: Records, step: int) -> None:
    oracle.step_number = step
    for part, rows, kernel in zip(oracle.mine, oracle.rows, oracle.kernels, strict=True):
        arrays, saved = kernel.slot_arrays(0), everything[name_of(part)]
        for id_, row in rows.items():
            if id_ not in saved:
                continue
            record = torch.from_numpy(np.frombuffer(saved[id_][0], np.float32).copy())
            columns = [arrays.weights, *arrays.row_states, *(a.unsqueeze(1) for a in arrays.row_wise_states)]
            for array, values in zip(columns, record.split([a.shape[1] for a in columns]), strict=True):
                array[row] = values
