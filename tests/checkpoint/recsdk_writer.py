"""Writes folders as the savers of RecSDK do, from what is known of them: numpy alone, nothing of the package."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from tests.distributed.oracle import Table
from tests.distributed.scenario import Scenario

USER = (Table(name="user", dim=8, features=("user",)),)


@dataclass(kw_only=True)
class Content:
    """One table: rows by id, and what lies beside them."""

    dim: int
    rows: Mapping[int, list[np.ndarray]]
    """id -> float32 [D]: weights, then moments."""
    num_moments: int
    counts: Mapping[int, int] | None = None
    """Admission counts."""
    times: list[tuple[int, int]] | None = None
    """(id, time), an id maybe several times, or without a row."""
    order: list[int] = field(default_factory=list)
    """Ids in the order of the files; none: as they come."""


def write_slice(folder: Path, data: np.ndarray, item_bytes: int, *, tail: bytes = b"") -> None:
    folder.mkdir(parents=True, exist_ok=True)
    np.array([item_bytes, *data.shape], "<i8").tofile(folder / "slice.attribute")
    (folder / "slice.data").write_bytes(data.tobytes() + tail)


def write_rows(folder: Path, content: Content, ids: list[int]) -> None:
    write_slice(folder / "key", np.array(ids, "<i8"), 8)
    names = ["embedding", "momentum1", "momentum2"][: 1 + content.num_moments]
    for i, name in enumerate(names):
        data = np.array([content.rows[id_][i] for id_ in ids], "<f4").reshape(len(ids), content.dim)
        write_slice(folder / name, data, 4)
    if content.counts is not None:
        write_slice(folder / "admit_count", np.array([content.counts.get(id_, -1) for id_ in ids], "<i8"), 8)
    if content.times is not None:
        (folder / "evict_timestamp").mkdir()
        np.array([8, len(content.times)], "<i8").tofile(folder / "evict_timestamp/slice.attribute")
        np.array([id_ for id_, _ in content.times], "<i8").tofile(folder / "evict_timestamp/slice_evict_key.data")
        np.array([time for _, time in content.times], "<i8").tofile(folder / "evict_timestamp/slice_evict_ts.data")


def write_ranks(path: Path, tables: Mapping[str, Content], world_size: int) -> None:
    """hybrid_torchrec: a folder for every rank."""
    for name, content in tables.items():
        ids = content.order or list(content.rows)
        for rank in range(world_size):
            write_rows(path / name / f"rank{rank}", content, [i for i in ids if i % world_size == rank])


def write_merged(path: Path, tables: Mapping[str, Content], *, incremental: bool | None = False) -> None:
    """torchrec_embcache: one folder a table."""
    for name, content in tables.items():
        write_rows(path / name, content, content.order or list(content.rows))
    if incremental is not None:
        (path / "meta.ini").write_text(f"incremental={incremental}\n")


def write_dynamic(path: Path, tables: Mapping[str, Content], world_size: int) -> None:
    """torch_rec_v2."""
    folder = path / "collection"
    folder.mkdir(parents=True)
    for name, content in tables.items():
        scores = dict(content.times or [])
        for rank in range(world_size):
            ids = [i for i in content.rows if i % world_size == rank]
            end = f"rank_{rank}.world_size_{world_size}"
            np.array(ids, "<i8").tofile(folder / f"{name}_emb_keys.{end}")
            np.array([content.rows[i][0] for i in ids], "<f4").tofile(folder / f"{name}_emb_values.{end}")
            if scores:
                np.array([scores[i] for i in ids], "<i8").tofile(folder / f"{name}_emb_scores.{end}")
            if content.num_moments:
                moments = [np.concatenate(content.rows[i][1:]) for i in ids]
                np.array(moments, "<f4").tofile(folder / f"{name}_emb_opt_values.{end}")
        (folder / f"{name}_opt_args.json").write_text(json.dumps({"opt_type": "adam"}))


def float_contents(scenario: Scenario, num_ids: int = 30, num_moments: int = 1) -> dict[str, Content]:
    """Rows that differ in every value."""
    found = {}
    for t, table in enumerate(scenario.tables):
        rng = np.random.default_rng(t)
        rows = {1000 + 7 * i: list(rng.random((1 + num_moments, table.dim), np.float32)) for i in range(num_ids)}
        found[table.name] = Content(dim=table.dim, rows=rows, num_moments=num_moments)
    return found
