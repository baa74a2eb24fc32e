from __future__ import annotations

import pytest
import torch

from hybridrec.errors import ConfigError, StateError
from hybridrec.native import ShardGroup
from hybridrec.native.protocol import ShardSpec
from hybridrec.store.row_export import RowChunk, ShardRows, export_shard
from hybridrec.store.row_state_layout import RowStateLayout
from hybridrec.types import RowState

LAYOUT = RowStateLayout(dim=2, states=(RowState(name="sum", is_row_wise=True), RowState(name="m", is_row_wise=False)))


def group_of(ids: list[int]) -> ShardGroup:
    spec = ShardSpec(
        name="t",
        dim=2,
        num_row_states=1,
        num_row_wise_states=1,
        state_initial_values=(0.0, 0.0),
        num_slots=1,
        planned_rows=1,
        table_seed=1,
    )
    group = ShardGroup([spec])
    group.set_ordinal(9)
    records = torch.arange(len(ids) * 5, dtype=torch.float32).view(len(ids), 5)
    group.import_rows(0, torch.tensor(ids), torch.arange(1, len(ids) + 1), records)
    return group


def test_chunks_are_ascending_by_id_and_name_what_a_row_holds() -> None:
    export = export_shard(ShardRows(group_of([7, -3, 2**63 - 1]), 0, LAYOUT), chunk_rows=2)
    first, last = export
    assert export.num_rows == 3
    assert first.ids_N.tolist() == [-3, 7] and last.ids_N.tolist() == [2**63 - 1]
    assert first.scores_N.tolist() == [2, 1]
    assert first.weights_ND.tolist() == [[5, 6], [0, 1]]
    assert first.states["m"].tolist() == [[7, 8], [2, 3]]
    assert first.states["sum"].tolist() == [9, 4]


def test_records_are_joined_as_they_were_split() -> None:
    records = torch.arange(15.0).view(3, 5).clone()  # no view of something else
    ids = torch.arange(3)
    chunk = RowChunk.of_records(ids, ids, records, LAYOUT)
    assert chunk.records(LAYOUT).data_ptr() == records.data_ptr()  # no copy
    apart = RowChunk(
        ids_N=ids,
        scores_N=ids,
        weights_ND=chunk.weights_ND.clone(),
        states={name: state.clone() for name, state in chunk.states.items()},
    )
    assert torch.equal(apart.records(LAYOUT), records)


def test_only_rows_above_a_score() -> None:
    export = export_shard(ShardRows(group_of([7, -3, 5]), 0, LAYOUT, above_score=1))
    assert torch.cat([chunk.ids_N for chunk in export]).tolist() == [-3, 5]


def test_an_export_that_is_closed_or_dropped_lets_go() -> None:
    group = group_of([1, 2])
    export = export_shard(ShardRows(group, 0, LAYOUT), chunk_rows=1)
    with pytest.raises(StateError, match="is being exported"):
        group.clear_rows(0)
    next(export)
    export.close()
    assert list(export) == []
    export_shard(ShardRows(group, 0, LAYOUT))  # dropped at once
    with pytest.raises(ConfigError, match="chunk_rows=0"):
        export_shard(ShardRows(group, 0, LAYOUT), chunk_rows=0)
    group.clear_rows(0)
