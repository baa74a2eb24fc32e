"""Scripts that save and load with `torch.distributed.checkpoint` themselves."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException

from hybridrec import checkpoint
from hybridrec.distributed.fused_optimizer import HashFusedOptimizer
from tests.checkpoint.mixed import HASHED, MOVED, PLAN, build, same, tensors_of, train
from tests.checkpoint.runs import build as of_scenario
from tests.distributed.scenario import Scenario
from tests.ranks import RankPools

Rows = dict[str, dict[int, bytes]]
"""Hashed table -> id -> record."""


def rows_of(dmp: Any) -> Rows:
    """Of all ranks and columns, by `export_rows`. Collective."""
    mine: dict[str, dict[int, list[tuple[int, bytes]]]] = {}
    for part in dmp.module.hashed.routing.parts:
        of_table = mine.setdefault(part.table.name, {})
        for chunk in dmp.module.hashed.export_rows(part.name):
            values = [chunk.weights_ND, *chunk.states.values()]
            for i, id_ in enumerate(chunk.ids_N.tolist()):
                columns = torch.stack([v[i] for v in values], 1).contiguous()  # column after column
                of_table.setdefault(id_, []).append((part.first_column, columns.numpy().tobytes()))
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    found: Rows = {}
    for table in mine:
        pieces: dict[int, list[tuple[int, bytes]]] = {}
        for one in everyone:
            for id_, of_id in one[table].items():
                pieces.setdefault(id_, []).extend(of_id)
        found[table] = {id_: b"".join(data for _, data in sorted(of_id)) for id_, of_id in pieces.items()}
    return found


def dcp_save(path: Path) -> Any:
    """(losses behind it, rows, TorchRec's tensors, dense part)."""
    dmp, optimizer = build()
    train(dmp, optimizer, range(3))
    dcp.save({"model": dmp, "optimizer": optimizer}, checkpoint_id=path)
    saved = rows_of(dmp), tensors_of(dmp, optimizer), dense_of(dmp)
    return train(dmp, optimizer, range(3, 6)), *saved


def dense_of(dmp: Any) -> dict[str, Tensor]:
    return {name: tensor.detach().clone() for name, tensor in dmp.module.dense.named_parameters()}


def dcp_load(path: Path, plan: Mapping[str, str], hashed: Mapping[str, str], by_hand: bool) -> Any:
    dmp, optimizer = build(plan, hashed=hashed)
    train(dmp, optimizer, range(1))
    planner = checkpoint.HashedLoadPlanner()
    if by_hand:
        state = {"model": dmp.state_dict(), "optimizer": optimizer.state_dict()}
        dcp.load(state, checkpoint_id=path, planner=planner)
        dmp.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
    else:
        dcp.load({"model": dmp, "optimizer": optimizer}, checkpoint_id=path, planner=planner)
    found = rows_of(dmp), tensors_of(dmp, optimizer), dense_of(dmp)
    return train(dmp, optimizer, range(3, 6)), *found


@pytest.mark.parametrize(
    ("before", "after", "plan", "hashed", "by_hand"),
    [
        (2, 2, PLAN, HASHED, False),
        (2, 3, PLAN, HASHED, True),
        (3, 1, MOVED, {"h": "row_wise", "k": "column_wise"}, False),
        (1, 2, MOVED, {"h": "column_wise", "k": "table_wise"}, True),
    ],
    ids=["same", "more ranks", "one rank", "other plan"],
)
def test_everything_comes_back(
    pools: RankPools,
    tmp_path: Path,
    before: int,
    after: int,
    plan: Mapping[str, str],
    hashed: Mapping[str, str],
    by_hand: bool,
) -> None:
    saved = pools[before].run(dcp_save, tmp_path)
    found = pools[after].run(dcp_load, tmp_path, plan, hashed, by_hand)
    _, rows, tensors, dense = saved[0]
    for losses, rows_now, tensors_now, dense_now in found:
        assert rows_now == rows and sum(map(len, rows.values())) > 10
        assert same(tensors_now, tensors) and same(dense_now, dense)
        if before == after:
            assert losses in [one[0] for one in saved]


def needed_keys(path: Path) -> tuple[int, int]:
    """(rows that this rank reads, rows that it has) where nothing is sharded otherwise."""
    dmp, _ = build()
    state = {"model": dmp.state_dict()}
    dcp.load(state, checkpoint_id=path, planner=checkpoint.HashedLoadPlanner())
    dmp.load_state_dict(state["model"])
    read, owned = (
        sum(len(value) for key, value in one.items() if key.endswith(".ids"))
        for one in (state["model"], dmp.state_dict())
    )
    return read, owned


def test_a_rank_reads_its_own_rows_alone_where_it_can(pools: RankPools, tmp_path: Path) -> None:
    pools[2].run(dcp_save, tmp_path)
    for read, owned in pools[2].run(needed_keys, tmp_path):
        assert read == owned > 5


def load_wrongly(path: Path) -> list[str]:
    dmp, _ = build()
    texts = []
    for state in (dict(dmp.state_dict()), {"other": dmp.state_dict()}):
        with pytest.raises(CheckpointException) as caught:
            dcp.load(state, checkpoint_id=path, planner=checkpoint.HashedLoadPlanner())
        texts.append(str(caught.value))
    return texts


def test_what_cannot_come_back_is_refused_by_name(pools: RankPools, tmp_path: Path) -> None:
    pools[1].run(dcp_save, tmp_path)
    ((outermost, other),) = pools[1].run(load_wrongly, tmp_path)
    assert "are in the outermost dict" in outermost
    assert "no rows of the collection 'other.hashed.'" in other


RATES = Scenario(optimizer="adam", steps=2, ids_per_table=20)


def save_rates(path: Path, is_kept: bool) -> int:
    dmp, pipeline = of_scenario(RATES)
    optimizer = pipeline._optimizer
    optimizer.save_param_groups(is_kept)
    for number, group in enumerate(optimizer.param_groups):
        group["lr"] = 0.25 + number
    dcp.save({"model": dmp, "optimizer": optimizer}, checkpoint_id=path)
    return len(optimizer.param_groups)


def load_rates(path: Path, is_kept: bool) -> tuple[list[float], list[float]]:
    """(rates of all groups before, after); the kernels have theirs with the next batch."""
    dmp, pipeline = of_scenario(RATES)
    optimizer = pipeline._optimizer
    optimizer.save_param_groups(is_kept)
    before = [group["lr"] for group in optimizer.param_groups]
    dcp.load({"model": dmp, "optimizer": optimizer}, checkpoint_id=path, planner=checkpoint.HashedLoadPlanner())
    optimizer.zero_grad()
    found = [group["lr"] for group in optimizer.param_groups]
    kernels = [leaf._kernel.learning_rate for leaf in leaves_of(optimizer) if isinstance(leaf, HashFusedOptimizer)]
    assert kernels and found[: len(kernels)] == kernels
    return before, found


def leaves_of(optimizer: Any) -> list[Any]:
    parts = getattr(optimizer, "optimizers", None)
    return [optimizer] if parts is None else [leaf for _, part in parts for leaf in leaves_of(part)]


@pytest.mark.parametrize("is_kept", [True, False])
def test_learning_rates_come_back_where_param_groups_are_saved(pools: RankPools, tmp_path: Path, is_kept: bool) -> None:
    """As of TorchRec's own tables: its optimizers leave them out unless they are told otherwise."""
    num_groups = pools[2].run(save_rates, tmp_path, is_kept)[0]
    saved = [0.25 + number for number in range(num_groups)]
    for before, found in pools[3].run(load_rates, tmp_path, is_kept):
        assert before != saved and found == (saved if is_kept else before)
