"""`HashCollection`: what the unsharded hashed collections share, whatever they make of the rows.

Letters of shapes: `hybridrec.types`.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torchrec.modules.embedding_configs import BaseEmbeddingConfig

from hybridrec._compat.grad_scaler import refuse_scaled_losses
from hybridrec._compat.unplanned import refuse_unplanned_collections
from hybridrec.backend import HOST, parse_device
from hybridrec.config import TableConfig, resolve_tables
from hybridrec.errors import ConfigError, StateError
from hybridrec.modules.hash_table import HashEmbeddingBag
from hybridrec.store.row_export import RowExport

_META = torch.device("meta")


class HashCollection(nn.Module):
    """Tables, and a lookup of their rows whose backward is one step of all tables."""

    is_hashed_collection = True  # read by _compat.unplanned

    _tables: tuple[TableConfig, ...]
    _target_device: torch.device

    def _init_tables(
        self,
        tables: Sequence[BaseEmbeddingConfig],
        kind: type[BaseEmbeddingConfig],
        device: str | torch.device | None,
    ) -> None:
        """Check and copy what a user gave; to be called by the constructor, after torch's.

        Raises:
            ConfigError: A table or the device is not accepted.
        """
        refuse_scaled_losses()
        refuse_unplanned_collections()
        self._tables = resolve_tables(tables, kind)
        self._configs = [copy.copy(config) for config in tables]
        for config, table in zip(self._configs, self._tables, strict=True):
            config.feature_names = list(table.feature_names)
        target = parse_device(device)
        self._target_device = HOST if target is None or target == _META else target
        self._num_batches = 0

    def _tables_by_name(self) -> nn.ModuleDict:
        """Table name -> `HashEmbeddingBag`, under the name that TorchRec gives it."""
        raise NotImplementedError

    @property
    def device(self) -> torch.device:
        """The meta device: where the parameters are, which is what TorchRec's planner and sharders ask for."""
        return _META

    @property
    def target_device(self) -> torch.device:
        """Where the unsharded collection keeps rows and computes."""
        return self._bags()[0].rows_device

    @property
    def table_configs(self) -> tuple[TableConfig, ...]:
        """The tables, resolved."""
        return self._tables

    def is_weighted(self) -> bool:
        """Whether batches must carry a weight for each id."""
        return False

    def num_rows(self) -> dict[str, int]:
        """Table name -> rows that are alive."""
        return {bag.config.name: bag.num_rows for bag in self._bags()}

    def export_rows(self, table: str, *, chunk_rows: int = 65536) -> RowExport:
        """All rows of a table as they are now, ascending by id, in chunks of host memory.

        Args:
            table: Its name.
            chunk_rows: Most rows of a chunk.

        Raises:
            ConfigError: There is no such table.
        """
        if table not in self._tables_by_name():
            raise ConfigError(f"export_rows: there is no table {table!r}. Tables: {sorted(self.num_rows())}.")
        return self.bag_of(table).export_rows(chunk_rows)

    def bag_of(self, table: str) -> HashEmbeddingBag:
        """The rows and the nominal parameter of a table, by its name."""
        return cast(HashEmbeddingBag, self._tables_by_name()[table])

    def get_extra_state(self) -> dict[str, Any]:
        """How many batches were trained (Adam's step)."""
        return {"num_batches": self._num_batches}

    def set_extra_state(self, state: dict[str, Any]) -> None:
        """From a ``state_dict()``."""
        self._num_batches = int(state["num_batches"])

    def _bags(self) -> list[HashEmbeddingBag]:
        return [cast(HashEmbeddingBag, bag) for bag in self._tables_by_name().values()]

    def _look_up(self, ids: Sequence[Tensor]) -> list[Tensor]:
        """For each table the rows float32 [N, D] of its ids, with a graph for those that train."""
        is_training = self.training and torch.is_grad_enabled()
        bags = self._bags()
        trained = [t for t, bag in enumerate(bags) if is_training and bag.weight.requires_grad]
        for t in trained:
            bags[t].check_room(ids[t], ordinal=self._num_batches + 1)
        rows = [None if t in trained else bag.read(ids[t]) for t, bag in enumerate(bags)]
        if trained:
            anchor = torch.zeros((), device=self.target_device, dtype=torch.float32, requires_grad=True)
            looked_up = _TrainedRows.apply(anchor, self, [bags[t] for t in trained], [ids[t] for t in trained])
            for t, table_rows in zip(trained, looked_up, strict=True):
                rows[t] = table_rows
        return cast(list[Tensor], rows)

    def _train(self, bags: Sequence[HashEmbeddingBag], ids: Sequence[Tensor], grads: Sequence[Tensor]) -> None:
        """The step of one batch: all tables or none."""
        ordinal = self._num_batches + 1
        for bag, ids_N in zip(bags, ids, strict=True):
            bag.optimizer()
            bag.check_room(ids_N, ordinal=ordinal)
        self._num_batches = ordinal
        for bag, ids_N, grads_ND in zip(bags, ids, grads, strict=True):
            bag.update(ids_N, grads_ND, ordinal=ordinal)


class _TrainedRows(torch.autograd.Function):
    """Rows of all tables of a batch as one node, so that one backward is one step of all tables."""

    steps_rows_in_backward = True  # read by _compat.grad_scaler

    @staticmethod
    def forward(
        ctx: Any,
        anchor: Tensor,
        collection: HashCollection,
        bags: list[HashEmbeddingBag],
        ids: list[Tensor],
    ) -> tuple[Tensor, ...]:
        """``anchor`` requires grad, so that autograd calls `backward` though no row is a tensor that it knows."""
        ctx.collection, ctx.bags, ctx.ids = collection, bags, ids
        return tuple(bag.read(ids_N) for bag, ids_N in zip(bags, ids, strict=True))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, None, None, None]:
        """Step. Tables that the loss does not use get zeros, not None."""
        if ctx.ids is None:
            raise StateError(
                f"{type(ctx.collection).__name__}: second backward through one forward, whose rows were already "
                "updated. Add the losses and call backward once, or run the forward again."
            )
        collection, bags, ids = ctx.collection, ctx.bags, ctx.ids
        collection._train(bags, ids, grads)
        ctx.ids = None
        return None, None, None, None
