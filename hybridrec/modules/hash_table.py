"""One unsharded hashed table: a dict from ids to rows of a growing tensor. The readable reference of a table shard."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from hybridrec.backend import HOST
from hybridrec.config import TableConfig
from hybridrec.errors import CapacityError, ConfigError, StateError
from hybridrec.kernels.optimizer import OptimizerSpec, refuse_stochastic_rounding
from hybridrec.kernels.optimizer_rules import updated_rows
from hybridrec.modules.nominal_parameter import conversion_probe, nominal_parameter
from hybridrec.native import initial_rows, mix64
from hybridrec.store.initializer import initial_spec
from hybridrec.store.row_export import RowChunk, RowExport
from hybridrec.types import FullPolicy

PROTECTED_BATCHES = 12
"""A row used by one of that many last batches is never evicted (docs/design/transaction.md, "Order")."""


class HashEmbeddingBag(nn.Module):
    """The rows of one table, by id.

    Reading changes nothing: an id without a row reads its initial row, a pure function of (seed, table name, id).
    Rows come to life in `update`, when the backward of a training batch gives them a gradient, so a forward whose
    graph is dropped leaves no trace.

    Attributes:
        weight: Nominal parameter [num_embeddings, D] on the meta device; holds no values. Optimizers are attached to
            it, planners look at it.
    """

    def __init__(self, config: TableConfig, device: torch.device) -> None:
        """
        Args:
            config: The table.
            device: Where rows live.
        """
        super().__init__()
        self.config = config
        self.weight = nominal_parameter(config.num_embeddings, config.embedding_dim, dtype=config.row_type.dtype)
        self._row_of_id: dict[int, int] = {}
        self._score_of_id: dict[int, int] = {}  # ordinal of the last batch that used the id
        self._free_rows: list[int] = []
        self._version = 0  # rises whenever rows change
        self._rows = torch.empty((0, config.embedding_dim), dtype=config.row_type.dtype, device=device)
        self._states: tuple[Tensor, ...] = ()
        self._spec = initial_spec(config.name, config.embedding_dim, config.seed, config.initializer, config.row_type)

    @property
    def num_rows(self) -> int:
        """R: rows that are alive."""
        return len(self._row_of_id)

    @property
    def rows_device(self) -> torch.device:
        """Where rows live and are looked up."""
        return self._rows.device

    # ---- reading -------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def read(self, ids_N: Tensor) -> Tensor:
        """The rows of ids, initial rows for ids that have none. Changes nothing.

        Args:
            ids_N: int64 [N], host memory, repetitions allowed.

        Returns:
            float32 [N, D] on `rows_device`, a copy, whatever the rows' own type.
        """
        row_numbers = [self._row_of_id.get(i, -1) for i in ids_N.tolist()]
        numbers_N = torch.tensor(row_numbers, dtype=torch.int64, device=HOST)
        known = numbers_N >= 0
        shape = (len(row_numbers), self.config.embedding_dim)
        rows_ND = self._rows.new_empty(shape, dtype=torch.float32)
        rows_ND[known.to(self.rows_device)] = self._rows[numbers_N[known].to(self.rows_device)].float()
        if not bool(known.all()):
            initial = initial_rows(self._spec, mix64(ids_N[~known].contiguous()))
            rows_ND[(~known).to(self.rows_device)] = initial.float().to(self.rows_device)
        return rows_ND

    def check_room(self, ids_N: Tensor, *, ordinal: int) -> None:
        """Refuse a training batch whose new ids do not fit. Changes nothing.

        Args:
            ids_N: int64 [N], host memory: of the batch.
            ordinal: The number that the batch would get.

        Raises:
            CapacityError: More rows than ``max_rows``, and none that may be evicted.
        """
        if self.config.max_rows is not None:  # else there is always room: do not even make the set
            self._victims(set(ids_N.tolist()), ordinal=ordinal)

    def export_rows(self, chunk_rows: int = 65536) -> RowExport:
        """All rows, ascending by id, in chunks of host memory; see `RowExport`.

        Args:
            chunk_rows: Most rows of a chunk.

        Raises:
            StateError: When a chunk is read, if rows were trained or loaded since.
        """
        ids = sorted(self._row_of_id)
        numbers = torch.tensor([self._row_of_id[i] for i in ids], dtype=torch.int64, device=self.rows_device)
        scores = torch.tensor([self._score_of_id[i] for i in ids], dtype=torch.int64, device=HOST)
        is_attached = len(getattr(self.weight, "_optimizer_classes", [])) == 1
        states = self.optimizer()[0].row_states() if self._states and is_attached else ()
        names = [s.name for s in states] or [f"state_{i}" for i in range(len(self._states))]
        version, position = self._version, 0

        def read(n: int) -> RowChunk:
            nonlocal position
            if self._version != version:
                raise StateError(
                    f"table {self.config.name!r}: its rows changed while they were exported. Begin the export again."
                )
            part = slice(position, position + n)
            weights_ND, *states = (t[numbers[part]].to(HOST) for t in (self._rows, *self._states))
            chunk_ids = torch.tensor(ids[part], dtype=torch.int64, device=HOST)
            position += n
            return RowChunk(
                ids_N=chunk_ids,
                scores_N=scores[part],
                weights_ND=weights_ND,
                states=dict(zip(names, states, strict=True)),
            )

        return RowExport(len(ids), chunk_rows, read, lambda: None)

    # ---- training ------------------------------------------------------------------------------------------------

    def optimizer(self) -> tuple[OptimizerSpec, float]:
        """What `apply_optimizer_in_backward` attached, and the learning rate in force now.

        Raises:
            ConfigError: None or several are attached, or an argument is not honoured.
        """
        name = self.config.name
        classes = getattr(self.weight, "_optimizer_classes", [])
        if len(classes) != 1:
            names = ", ".join(c.__name__ for c in classes)
            problem = (
                f"has {len(classes)} optimizers ({names})" if classes else "has no optimizer: it would never learn"
            )
            raise ConfigError(
                f"table {name!r} {problem}. Call apply_optimizer_in_backward(torch.optim.Adagrad, "
                "collection.parameters(), {'lr': ...}) once before training."
            )
        refuse_stochastic_rounding(self.weight._optimizer_kwargs[0], self.config.row_type, table=name)
        spec = OptimizerSpec.from_class(classes[0], self.weight._optimizer_kwargs[0], table=name)
        dims = [1 if s.is_row_wise else 2 for s in spec.row_states()]
        if self._states and [s.dim() for s in self._states] != dims:
            raise ConfigError(
                f"table {name!r}: its rows were trained with another optimizer than {classes[0].__name__}, which needs "
                f"{len(dims)} states a row; they have {len(self._states)}. Attach the optimizer they were trained with."
            )
        # Schedulers write into the parameter groups of the attached optimizer, as for any parameter.
        return spec, float(self.weight._in_backward_optimizers[0].param_groups[0]["lr"])

    def clipped(self, grad: Tensor) -> Tensor:
        """A pool's gradient within the optimizer's ``max_gradient``."""
        try:
            limit = self.optimizer()[0].max_gradient
        except ConfigError:
            return grad  # the step, which comes after all pools, raises it for the first such table
        return grad if limit is None else grad.clamp(-limit, limit)

    @torch.no_grad()
    def update(self, ids_N: Tensor, grads_ND: Tensor, *, ordinal: int) -> None:
        """One optimizer step for every row of a batch, with the sum of the gradients of its occurrences.

        Args:
            ids_N: int64 [N], host memory.
            grads_ND: float32 [N, D], of every occurrence, summed in order of position.
            ordinal: Number of the batch: 1, 2, 3 ..

        Raises:
            ConfigError: See `optimizer`. CapacityError: See `check_room`. Nothing changed.
        """
        spec, learning_rate = self.optimizer()
        self._version += 1
        unique_ids_U, inverse_N = torch.unique(ids_N, return_inverse=True)
        grads_UD = grads_ND.new_zeros((len(unique_ids_U), self.config.embedding_dim))
        grads_UD.index_add_(0, inverse_N.to(grads_ND.device), grads_ND)
        numbers_U = self._rows_for(unique_ids_U, spec, ordinal=ordinal)
        rows_UD, states = updated_rows(
            spec,
            self._rows[numbers_U].float(),
            [state[numbers_U] for state in self._states],
            grads_UD,
            step=ordinal,
            learning_rate=learning_rate,
        )
        self._rows[numbers_U] = rows_UD.to(self._rows.dtype)  # to the nearest, ties to even
        for state, new in zip(self._states, states, strict=True):
            state[numbers_U] = new

    def _rows_for(self, unique_ids_U: Tensor, spec: OptimizerSpec, *, ordinal: int) -> Tensor:
        """Row numbers int64 [U] on `rows_device`; new ids get rows that hold initial values."""
        ids = unique_ids_U.tolist()
        for victim in self._victims(set(ids), ordinal=ordinal):
            self._free_rows.append(self._row_of_id.pop(victim))
            del self._score_of_id[victim]
        is_new = [i not in self._row_of_id for i in ids]
        new_ids = unique_ids_U[torch.tensor(is_new, dtype=torch.bool, device=HOST)]
        new_rows_UD = self.read(new_ids)
        new_numbers = self._take_rows(len(new_ids), spec)
        self._row_of_id.update(zip(new_ids.tolist(), new_numbers, strict=True))
        self._score_of_id.update(dict.fromkeys(ids, ordinal))
        numbers = torch.tensor(new_numbers, dtype=torch.int64, device=self.rows_device)
        self._rows[numbers] = new_rows_UD.to(self._rows.dtype)
        for state, row_state in zip(self._states, spec.row_states(), strict=True):
            state[numbers] = row_state.initial_value
        return torch.tensor([self._row_of_id[i] for i in ids], dtype=torch.int64, device=self.rows_device)

    def _victims(self, ids: set[int], *, ordinal: int) -> list[int]:
        """Ids whose rows must go so that a batch fits: lowest (score, key) first."""
        config = self.config
        if config.max_rows is None:
            return []
        needed = self.num_rows + sum(i not in self._row_of_id for i in ids)
        missing = needed - config.max_rows
        if missing <= 0:
            return []
        is_evicting = config.full_policy is FullPolicy.EVICT
        last = ordinal - PROTECTED_BATCHES
        candidates = [i for i, score in self._score_of_id.items() if is_evicting and score < last and i not in ids]
        if missing > len(candidates):
            evictable = f" and only {len(candidates):,} may be evicted" if is_evicting else ""
            raise CapacityError(
                f"table {config.name!r}: the batch needs {needed:,} rows but max_rows={config.max_rows:,}{evictable}. "
                "Raise max_rows, or set full_policy='grow' (no limit) or 'evict' (drops rows unused for "
                f"{PROTECTED_BATCHES} batches). The batch was not trained."
            )
        keys = mix64(torch.tensor(candidates, dtype=torch.int64, device=HOST)).tolist()
        order = sorted((self._score_of_id[i], key % 2**64, i) for i, key in zip(candidates, keys, strict=True))
        return [i for _, _, i in order[:missing]]

    def _take_rows(self, count: int, spec: OptimizerSpec) -> list[int]:
        """Numbers of ``count`` free rows; the tensors grow to twice what is needed."""
        if not self._states:  # rows that came without states, from a state_dict of SGD, start like new ones
            self._states = tuple(
                torch.full(
                    (len(self._rows),) if s.is_row_wise else self._rows.shape,
                    s.initial_value,
                    dtype=torch.float32,
                    device=self.rows_device,
                )
                for s in spec.row_states()
            )
        missing = count - len(self._free_rows)
        if missing > 0:
            old = len(self._rows)
            self._free_rows[:0] = range(old + missing + old - 1, old - 1, -1)
            self._rows, *states = (_grown(t, old + missing + old) for t in (self._rows, *self._states))
            self._states = tuple(states)
        return [self._free_rows.pop() for _ in range(count)]

    # ---- what torch.nn.Module asks ---------------------------------------------------------------------------------

    def get_extra_state(self) -> dict[str, Any]:
        """Rows for ``state_dict()``: ids int64 [R], rows [R, D], states, scores int64 [R]."""
        ids = list(self._row_of_id)
        numbers = torch.tensor([self._row_of_id[i] for i in ids], dtype=torch.int64, device=self.rows_device)
        return {
            "ids": torch.tensor(ids, dtype=torch.int64, device=HOST),
            "scores": torch.tensor([self._score_of_id[i] for i in ids], dtype=torch.int64, device=HOST),
            "rows": self._rows[numbers],
            "states": [state[numbers] for state in self._states],
        }

    def set_extra_state(self, state: dict[str, Any]) -> None:
        """Replace all rows by those of a ``state_dict()``.

        Raises:
            ConfigError: The rows have another dim or type.
        """
        ids, rows = state["ids"].tolist(), state["rows"]
        if tuple(rows.shape) != (len(ids), self.config.embedding_dim):
            raise ConfigError(
                f"table {self.config.name!r}: rows in the state_dict have shape {list(rows.shape)} for {len(ids):,} "
                f"ids, the table has embedding_dim={self.config.embedding_dim}. Load it under the config of the save."
            )
        if rows.dtype != self._rows.dtype:
            raise ConfigError(
                f"table {self.config.name!r}: rows in the state_dict are {rows.dtype}, those of the table "
                f"{self._rows.dtype} (data_type). Load it under the config of the save."
            )
        self._version += 1
        self._row_of_id = {i: row for row, i in enumerate(ids)}
        self._score_of_id = dict(zip(ids, state["scores"].tolist(), strict=True))
        self._free_rows = []
        self._rows = rows.detach().to(self.rows_device, copy=True)
        self._states = tuple(s.detach().to(self.rows_device, copy=True) for s in state["states"])

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> HashEmbeddingBag:
        """``model.to(device)`` moves the rows; the nominal parameter stays on the meta device."""
        moved = fn(conversion_probe(self.config.embedding_dim, self._rows))
        if moved.dtype != self._rows.dtype:
            raise ConfigError(
                f"table {self.config.name!r}: its rows are {self._rows.dtype}, they cannot become {moved.dtype}. "
                "Convert the dense part of the model alone, or use autocast; data_type of the table's config decides "
                "what its rows are."
            )
        if moved.device.type != "meta":
            self._rows, self._states = (fn(self._rows), tuple(fn(state) for state in self._states))
        return self

    def extra_repr(self) -> str:
        """As `torch.nn.EmbeddingBag` prints it."""
        config = self.config
        return f"{config.num_embeddings}, {config.embedding_dim}, mode={config.pooling.value.lower()!r}"


class HashEmbedding(HashEmbeddingBag):
    """The rows of one table of sequences."""

    def extra_repr(self) -> str:
        """As `torch.nn.Embedding` prints it."""
        return f"{self.config.num_embeddings}, {self.config.embedding_dim}"


def _grown(tensor: Tensor, num_rows: int) -> Tensor:
    grown = tensor.new_empty((num_rows, *tensor.shape[1:]))
    grown[: len(tensor)] = tensor
    return grown
