"""`RowStateLayout`: what one row holds, and how many bytes that is where."""

from __future__ import annotations

from dataclasses import dataclass

from hybridrec.errors import ConfigError
from hybridrec.row_type import RowType
from hybridrec.types import RowState

FLOAT_BYTES = 4
LINE_BYTES = 64
"""Records in the store start on a cache line."""
INDEX_BYTES = 24
"""Of one row in the id map at its usual load, 0.70 of four 16-byte entries a line, rounded up."""


@dataclass(frozen=True)
class RowStateLayout:
    """The parts of a row: weights [D], M row-sized states [D], A row-wise states (one float each), in this order.

    Weights take `RowType.num_words` floats: D, or half of that if they have 16 bits. States are float32.

    A staging record is all of them, one after the other. The store keeps row-wise states apart, so that one more
    float does not cost a row a cache line.

    Raises:
        ConfigError: dim is not positive, or two states have one name.
    """

    dim: int
    """D."""
    states: tuple[RowState, ...] = ()
    """In any order; ``row_states`` and ``row_wise_states`` keep it within their kind."""
    row_type: RowType = RowType.FLOAT32
    """Of the weights."""

    def __post_init__(self) -> None:
        if self.dim < 1:
            raise ConfigError(f"RowStateLayout: dim={self.dim} is not positive. Pass the number of columns of a row.")
        names = [state.name for state in self.states]
        if len(set(names)) != len(names):
            raise ConfigError(f"RowStateLayout: the states {names} do not have different names. Rename one.")

    @property
    def row_states(self) -> tuple[RowState, ...]:
        """The M states that have a float for every column."""
        return tuple(state for state in self.states if not state.is_row_wise)

    @property
    def row_wise_states(self) -> tuple[RowState, ...]:
        """The A states that have one float."""
        return tuple(state for state in self.states if state.is_row_wise)

    @property
    def initial_values(self) -> tuple[float, ...]:
        """M + A floats, row-sized states first: `ShardSpec.state_initial_values`."""
        return tuple(state.initial_value for state in (*self.row_states, *self.row_wise_states))

    @property
    def weight_words(self) -> int:
        """Floats that the weights take."""
        return self.row_type.num_words(self.dim)

    @property
    def record_floats(self) -> int:
        """Floats of a staging record: those of the weights, D * M, and A."""
        return self.weight_words + self.dim * len(self.row_states) + len(self.row_wise_states)

    @property
    def slot_bytes(self) -> int:
        """Of one row in the device tier."""
        return self.record_floats * FLOAT_BYTES

    @property
    def stride_bytes(self) -> int:
        """From one row's weights and row-sized states in the store to the next row's."""
        used = (self.record_floats - len(self.row_wise_states)) * FLOAT_BYTES
        return -(-used // LINE_BYTES) * LINE_BYTES

    @property
    def store_bytes(self) -> int:
        """Of one row in the store, row-wise states included."""
        return self.stride_bytes + len(self.row_wise_states) * FLOAT_BYTES

    @property
    def index_bytes(self) -> int:
        """Of one row in the id map, wherever its value is; an estimate."""
        return INDEX_BYTES

    @property
    def record_slices(self) -> dict[str, slice]:
        """Floats of a staging record: ``"weights"`` (their words) and the name of every state."""
        slices = {"weights": slice(0, self.weight_words)}
        start = self.weight_words
        for state in (*self.row_states, *self.row_wise_states):
            stop = start + (1 if state.is_row_wise else self.dim)
            slices[state.name] = slice(start, stop)
            start = stop
        return slices
