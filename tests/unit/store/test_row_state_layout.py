from __future__ import annotations

import pytest

from hybridrec.errors import ConfigError
from hybridrec.row_type import RowType
from hybridrec.store.row_state_layout import RowStateLayout
from hybridrec.types import RowState

ADAM = (RowState(name="exp_avg", is_row_wise=False), RowState(name="exp_avg_sq", is_row_wise=False))
ROW_WISE = RowState(name="sum", is_row_wise=True, initial_value=0.5)
WIDE = RowState(name="momentum", is_row_wise=False, initial_value=0.25)


@pytest.mark.parametrize(
    ("dim", "states", "record_floats", "stride", "store"),
    [
        (1, (), 1, 64, 64),
        (16, (), 16, 64, 64),
        (17, (), 17, 128, 128),
        (64, ADAM, 192, 768, 768),
        (64, (ROW_WISE,), 65, 256, 260),  # a row-wise state costs 4 bytes, not a cache line
        (5, (ROW_WISE, WIDE), 11, 64, 68),
    ],
)
def test_sizes(dim: int, states: tuple[RowState, ...], record_floats: int, stride: int, store: int) -> None:
    layout = RowStateLayout(dim, states)
    assert layout.record_floats == record_floats
    assert layout.slot_bytes == 4 * record_floats
    assert (layout.stride_bytes, layout.store_bytes, layout.index_bytes) == (stride, store, 24)


@pytest.mark.parametrize("row_type", [RowType.BFLOAT16, RowType.FLOAT16])
def test_weights_of_16_bits_take_half(row_type: RowType) -> None:
    adam, odd = RowStateLayout(64, ADAM, row_type), RowStateLayout(5, (ROW_WISE, WIDE), row_type)
    assert (adam.record_floats, adam.slot_bytes, adam.store_bytes) == (160, 640, 640)
    assert RowStateLayout(64, (), row_type).store_bytes == 128
    assert odd.record_slices == {"weights": slice(0, 3), "momentum": slice(3, 8), "sum": slice(8, 9)}
    assert odd.record_floats == 9


def test_row_sized_states_come_first_in_a_record() -> None:
    layout = RowStateLayout(5, (ROW_WISE, WIDE))
    assert layout.row_states == (WIDE,)
    assert layout.row_wise_states == (ROW_WISE,)
    assert layout.initial_values == (0.25, 0.5)
    assert layout.record_slices == {"weights": slice(0, 5), "momentum": slice(5, 10), "sum": slice(10, 11)}
    assert list(layout.record_slices) == ["weights", "momentum", "sum"]


def test_slices_cover_a_record_once() -> None:
    layout = RowStateLayout(7, (*ADAM, ROW_WISE))
    columns = [c for part in layout.record_slices.values() for c in range(part.start, part.stop)]
    assert columns == list(range(layout.record_floats))


def test_a_layout_is_a_value() -> None:
    assert RowStateLayout(4, ADAM) == RowStateLayout(4, ADAM)
    assert hash(RowStateLayout(4, ADAM)) == hash(RowStateLayout(4, ADAM))
    assert RowStateLayout(4, ADAM) != RowStateLayout(4)


def test_refusals() -> None:
    with pytest.raises(ConfigError, match=r"dim=0 is not positive"):
        RowStateLayout(0)
    with pytest.raises(ConfigError, match=r"\['sum', 'sum'\] do not have different names"):
        RowStateLayout(4, (ROW_WISE, ROW_WISE))
