"""`HashedLoadPlanner`: scripts that use `torch.distributed.checkpoint` themselves get hashed tables back with it."""

from __future__ import annotations

from collections.abc import Iterator, MutableMapping
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from hybridrec.distributed.rows_state_dict import collections_in, is_of_rows
from hybridrec.errors import ConfigError


class HashedLoadPlanner(DefaultLoadPlanner):
    """For `torch.distributed.checkpoint.load`: rows of hashed tables have the number that was saved, on any ranks.

    `dcp.save` needs no counterpart. A state_dict names the rows that a rank has now; what was saved has others. This
    takes the places of rows out of the state_dict and puts those in that were saved: of this rank alone where ranks and
    sharding are the same, else of all ranks, of which the model then takes what is its own. Memory: those rows, twice
    while the model takes them; a snapshot of `save` is read by chunks.

    Example:
        dcp.save({"model": model, "optimizer": optimizer}, checkpoint_id=path)
        dcp.load({"model": model, "optimizer": optimizer}, checkpoint_id=path, planner=HashedLoadPlanner())

    The model's state_dict must be in a dict of its own, as above, or as ``{"model": model.state_dict()}`` for a
    `load_state_dict` afterwards: `dcp.load` takes no new names into the outermost dict.
    """

    def __init__(self, *, allow_partial_load: bool = False) -> None:
        """
        Args:
            allow_partial_load: Whether names that were not saved are passed over; of rows there must be some.
        """
        # Flattening sharded tensors drops those that this rank has no part of: torch then takes the checkpoint for one
        # of an old version, and misses the (empty) state of every table whose optimizer keeps none in its state_dict.
        super().__init__(flatten_sharded_tensors=False, allow_partial_load=allow_partial_load)

    def set_up_planner(
        self, state_dict: dict[str, Any], metadata: Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        """Called by `dcp.load`.

        Raises:
            ConfigError: What was saved has no rows of a collection; or the state_dict is not in a dict of its own.
        """
        if metadata is not None:
            for path, part in _mappings(state_dict):
                _swap_rows(path, part, metadata, is_outermost=part is state_dict)
        super().set_up_planner(state_dict, metadata, is_coordinator)


def _mappings(state: MutableMapping[str, Any], path: str = "") -> Iterator[tuple[str, MutableMapping[str, Any]]]:
    """(what names of its entries begin with in a checkpoint, dict), however deep."""
    yield path, state
    for key, value in state.items():
        if isinstance(value, MutableMapping):
            yield from _mappings(value, f"{path}{key}.")


def _swap_rows(path: str, part: MutableMapping[str, Any], metadata: Metadata, *, is_outermost: bool) -> None:
    """Replace the rows in one dict by room for those that were saved."""
    now = collections_in(part)
    if now and is_outermost:
        raise ConfigError(
            "HashedLoadPlanner: the rows of hashed tables are in the outermost dict, into which dcp.load takes no new "
            "names. Pass {'model': model} or {'model': model.state_dict()}."
        )
    saved = {
        key.removeprefix(path): tensor
        for key, tensor in metadata.state_dict_metadata.items()
        if key.startswith(path) and isinstance(tensor, TensorStorageMetadata)
    }
    for collection in now:
        mine = [key for key in part if is_of_rows(str(key), collection)]
        known = [key for key in saved if is_of_rows(key, collection)]
        if not known:
            raise ConfigError(
                f"HashedLoadPlanner: the checkpoint has no rows of the collection {f'{path}{collection}'!r}. Load it "
                "into the model that it was saved from."
            )
        if all(key in saved for key in mine):  # the same ranks, and the same sharding
            known = mine
        for key in mine:
            del part[key]
        for key in known:
            part[key] = torch.empty(saved[key].size, dtype=saved[key].properties.dtype)
