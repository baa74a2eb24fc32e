"""What verifying a saved table of RecSDK means: every id is looked at, in chunks, before a row is taken."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from hybridrec.checkpoint.pretrained import check_range
from hybridrec.checkpoint.recsdk_files import SavedRows, SavedTable
from hybridrec.errors import StateError
from hybridrec.row_type import RowType

CHUNK_BYTES = 8 * 2**20
"""Of rows and moments that are read at once."""


class Ages:
    """Saved times of one table, as numbers of their order: the oldest time is 0."""

    def __init__(self, parts: Sequence[SavedRows]) -> None:
        times = [part.times for part in parts if part.times is not None]
        ids = np.concatenate([np.empty(0, np.int64), *(ids.map() for ids, _ in times)])
        when = np.concatenate([np.empty(0, np.int64), *(when.map() for _, when in times)])
        order = np.lexsort((when, ids))
        ids, when = ids[order], when[order]
        is_newest = np.ones(len(ids), np.bool_)  # several ranks may have seen an id
        is_newest[:-1] = ids[1:] != ids[:-1]
        self.ids = ids[is_newest]
        """int64 [K], ascending."""
        distinct, self._order = np.unique(when[is_newest], return_inverse=True)
        self.levels = len(distinct)
        """Different times."""

    def find(self, ids: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
        """Places in `ids` [N], and whether they are those ids."""
        if not len(self.ids):
            return np.zeros(len(ids), np.int64), np.zeros(len(ids), np.bool_)
        places = np.minimum(np.searchsorted(self.ids, ids), len(self.ids) - 1)
        return places, self.ids[places] == ids

    def of(self, ids: NDArray[np.int64]) -> NDArray[np.int64]:
        """int64 [N]: the order of their times; an id without a time counts as used last."""
        places, is_known = self.find(ids)
        return np.where(is_known, self._order[places] if self.levels else 0, self.levels).astype(np.int64)


@dataclass(frozen=True, kw_only=True)
class Scan:
    """What verifying a table told on one rank that has rows of it."""

    divisor: int
    """Greatest common divisor of ``id // W``, W of the run that saved; of saves with a folder for every rank."""
    levels: int
    """Different times of last use."""
    times: int
    """Ids that have one."""
    num_without_row: int
    """Of those, ids that have no row."""


def scan(
    name: str,
    tables: Sequence[SavedTable],
    row_type: RowType,
    mine: Callable[[NDArray[np.int64]], NDArray[np.bool_]],
    *,
    of_ranks: bool,
) -> Scan:
    """Verify a table.

    Args:
        name: Of the table.
        tables: As the saves have it, one after the other.
        row_type: Of its weights here.
        mine: Which of ids [N] belong to this rank.
        of_ranks: Whether the parts are those of ranks 0, 1, .., to which id i belongs by i % W.

    Raises:
        StateError: An id is in another rank's folder, or comes twice in a save; names the file.
        ConfigError: Weights would become infinite in the table's type; names the file.
    """
    ages = Ages([part for table in tables for part in table.parts])
    has_row = np.zeros(len(ages.ids), np.bool_)
    divisor = 0
    for table in tables:
        own: list[NDArray[np.int64]] = []
        for rank, part in enumerate(table.parts):
            for rows, ids in chunks(part):
                if of_ranks:
                    _check_rank(part, ids, rank, len(table.parts))
                    if divisor != 1:
                        divisor = math.gcd(divisor, int(np.gcd.reduce(ids // len(table.parts))))
                own.append(ids[mine(ids)])
                places, is_known = ages.find(ids)
                has_row[places[is_known]] = True
                if row_type is not RowType.FLOAT32:
                    check_range(tensor_of(part.weights.map()[rows]), row_type, name, str(part.weights.path))
        _check_once(own, table)
    num_without_row = len(ages.ids) - int(has_row.sum())
    return Scan(divisor=divisor, levels=ages.levels, times=len(ages.ids), num_without_row=num_without_row)


def chunks(part: SavedRows) -> Iterator[tuple[slice, NDArray[np.int64]]]:
    """Which rows, and their ids; a copy."""
    n, dim = part.weights.shape
    step = max(1, CHUNK_BYTES // (4 * max(1, dim) * (1 + len(part.moments))))
    keys = part.keys.map()
    for first in range(0, n, step):
        rows = slice(first, min(first + step, n))
        yield rows, np.array(keys[rows], np.int64)


def tensor_of(array: NDArray[Any]) -> torch.Tensor:
    """A copy in this machine's byte order, which tensors may own."""
    return torch.from_numpy(np.array(array, array.dtype.newbyteorder("=")))


def _check_rank(part: SavedRows, ids: NDArray[np.int64], rank: int, world_size: int) -> None:
    wrong = ids[ids % world_size != rank]
    if len(wrong):
        raise StateError(
            f"{part.keys.path} has the id {wrong[0]}, which of {world_size} ranks belongs to rank "
            f"{wrong[0] % world_size}. The folders of ranks are not of one save, or some are missing. Bring all "
            "those of one save."
        )


def _check_once(own: list[NDArray[np.int64]], table: SavedTable) -> None:
    ids = np.concatenate([np.empty(0, np.int64), *own])
    own.clear()
    ids.sort()
    twice = ids[1:][ids[1:] == ids[:-1]]
    if len(twice):
        files = [str(part.keys.path) for part in table.parts if (part.keys.map() == twice[0]).any()]
        raise StateError(f"{' and '.join(files)}: the id {twice[0]} comes twice. The save is damaged; use another one.")
