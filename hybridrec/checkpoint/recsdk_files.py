"""`read_recsdk`: what tables the savers of Ascend RecSDK have written, without reading a row of them.

Three layouts are known, all raw little-endian arrays: float32 rows, and int64 ids, counts, times and scores::

    ranks    PATH/TABLE/rank{r}/{key,embedding,momentum1,momentum2}/{slice.attribute,slice.data}
             hybrid_torchrec, and early torchrec_embcache; id i is of rank i % W
    merged   PATH/TABLE/{key,embedding,momentum1,momentum2,admit_count,evict_timestamp}/..., PATH/meta.ini
             torchrec_embcache; a save with ``incremental=True`` has only the ids used since the one before
    dynamic  PATH/.../TABLE_emb_{keys,values,scores,opt_values}.rank_{r}.world_size_{W}
             torch_rec_v2

A ``slice.attribute`` is int64: bytes of an element, rows, and columns unless it is of one value a row.
``evict_timestamp`` has ids of its own, in any order, also some that have no row: ``slice_evict_key.data``,
``slice_evict_ts.data``.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hybridrec.errors import ConfigError, StateError

RANKS, MERGED, DYNAMIC = "ranks", "merged", "dynamic"
_ATTRIBUTE, _DATA, _META = "slice.attribute", "slice.data", "meta.ini"
_KEY, _EMBEDDING, _MOMENTA = "key", "embedding", ("momentum1", "momentum2")
_COUNTS, _TIMES = "admit_count", "evict_timestamp"
_ARRAYS = {_KEY, _EMBEDDING, *_MOMENTA, _COUNTS, _TIMES}
_RANK = re.compile(r"rank(\d+)")
_TIME = re.compile(r"\d{14}")
_DYNAMIC = re.compile(
    r"(?P<table>.+)_emb_(?P<what>keys|values|scores|opt_values)\.rank_(?P<r>\d+)\.world_size_(?P<w>\d+)"
)
_META_LINE = re.compile(r"incremental\s*=\s*(true|false)", re.IGNORECASE)
_MOST_META = 1000
"""Characters of a line, with what is blank around it."""
_MOST_RANKS = 8
"""W of RecSDK is never more."""


@dataclass(frozen=True, kw_only=True)
class SavedArray:
    """One array of a save."""

    path: Path
    shape: tuple[int, ...]
    """[n] of int64, [n, D] of float32."""
    tail_bytes: int = 0
    """Bytes behind it that its attribute does not count: of an older save."""

    def map(self) -> NDArray[Any]:
        """The array, read when it is looked at."""
        dtype = "<i8" if len(self.shape) == 1 else "<f4"
        if not self.shape[0]:
            return np.empty(self.shape, dtype)
        return np.memmap(self.path, dtype, "r", shape=self.shape)


@dataclass(frozen=True, kw_only=True)
class SavedRows:
    """Rows of a table that one folder, or one rank's files, have."""

    keys: SavedArray
    """[n]"""
    weights: SavedArray
    """[n, D]"""
    moments: tuple[SavedArray, ...] = ()
    """[n, D] each."""
    times: tuple[SavedArray, SavedArray] | None = None
    """Ids [m], and when each was used last, or its score: [m]."""
    num_counts: int = 0
    """Admission counts."""
    lost_times: int = 0
    """Times that the saver counted and did not write: it never writes a single one."""
    has_state_file: bool = False
    """Whether optimizer state lies beside the rows whose order nothing here knows."""

    @property
    def arrays(self) -> tuple[SavedArray, ...]:
        """All of them."""
        return (self.keys, self.weights, *self.moments, *(self.times or ()))


@dataclass(frozen=True, kw_only=True)
class SavedTable:
    """One table of a save."""

    name: str
    dim: int
    """D; 0 if a table without rows does not tell it."""
    num_moments: int
    parts: tuple[SavedRows, ...]
    """Of ranks 0, 1, .., or one of all of them."""

    @property
    def rows(self) -> int:
        """Over all ranks."""
        return sum(part.keys.shape[0] for part in self.parts)

    def __str__(self) -> str:
        """One line."""
        things = [f"table {self.name!r}: {self.rows:,} rows x {self.dim}, moments: {self.num_moments}"]
        counts = {
            "admission counts": sum(p.num_counts for p in self.parts),
            "times of last use": sum(p.times[0].shape[0] for p in self.parts if p.times is not None),
            "bytes of an older save": sum(a.tail_bytes for p in self.parts for a in p.arrays),
        }
        things += [f"{what}: {n:,}" for what, n in counts.items() if n]
        things += ["optimizer values"] if any(p.has_state_file for p in self.parts) else []
        return ", ".join(things)


@dataclass(frozen=True, kw_only=True)
class RecsdkSave:
    """What RecSDK saved; `str` of it is for people."""

    path: Path
    layout: str
    """``"ranks"``, ``"merged"`` or ``"dynamic"``."""
    world_size: int | None
    """Ranks whose files are there; None: they were merged."""
    is_incremental: bool | None
    """Whether only ids used since the save before are there; None: the save does not say."""
    tables: tuple[SavedTable, ...]

    def __str__(self) -> str:
        """A line for the save, and one for each table."""
        ranks = "merged" if self.world_size is None else f"{self.world_size} ranks"
        kind = " incremental" if self.is_incremental else ""
        return "\n  ".join(
            [f"{self.path}:{kind} save of RecSDK, layout {self.layout!r}, {ranks}", *map(str, self.tables)]
        )


def read_recsdk(path: str | Path) -> RecsdkSave:
    """Describe a save of RecSDK. Sizes of all files are compared with what they should be; no row is read.

    Args:
        path: What was given to their ``Saver.save`` or ``DynamicEmbDump``; or a folder of saves that are named by
            their time, as early versions did: the newest.

    Raises:
        ConfigError: The folder is no such save, or something in it is of a kind that is not known; names the file.
        StateError: A file or a rank is missing, a file is shorter than it should be, or the save was not finished;
            names the file.
    """
    root = Path(path)
    if not root.is_dir():
        raise StateError(f"{root} is no folder. Pass the one that was given to RecSDK's Saver.")
    tables = [folder for folder in _folders(root) if _has_arrays(folder)]
    if tables:
        return _read_slices(root, tables)
    files = sorted(file for file in root.rglob("*_emb_*") if _DYNAMIC.fullmatch(file.name))
    if files:
        return _read_dynamic(root, files)
    saves = [folder for folder in _folders(root) if _TIME.fullmatch(folder.name)]
    if saves:
        return read_recsdk(saves[-1])
    raise ConfigError(
        f"{root} has no tables of RecSDK: neither TABLE/key, TABLE/rank0/key nor TABLE_emb_keys.rank_0.world_size_W. "
        "Pass the folder that was given to its Saver; snapshots of hybridrec are read by load()."
    )


def _folders(root: Path) -> list[Path]:
    return sorted(entry for entry in root.iterdir() if entry.is_dir())


def _ranks_of(table: Path) -> dict[int, Path]:
    return {int(m[1]): entry for entry in _folders(table) if (m := _RANK.fullmatch(entry.name))}


def _has_arrays(table: Path) -> bool:
    return bool(_ranks_of(table)) or any(entry.name in _ARRAYS for entry in _folders(table))


# ---- folders of slices ----------------------------------------------------------------------------------------------


def _read_slices(root: Path, folders: list[Path]) -> RecsdkSave:
    for entry in (root / _META, *(e for folder in folders for e in (folder, *folder.rglob("*")))):
        if entry.is_symlink():
            raise ConfigError(f"{entry} is a symbolic link. Copy what it leads to into the folder.")
    ranks = {folder: sorted(_ranks_of(folder)) for folder in folders}
    first, meta = folders[0], root / _META
    for folder, found in ranks.items():
        is_merged = any(entry.name in _ARRAYS for entry in _folders(folder))
        if found and (is_merged or meta.exists()):
            raise StateError(
                f"{folder / f'rank{found[0]}'} is left of a save that did not finish: ranks are not merged. Use an "
                "older save, or save again."
            )
        if found != ranks[first]:
            raise StateError(
                f"{folder} has the ranks {found}, {first} has {ranks[first]}. Bring all files of the save."
            )
        if found and found != list(range(len(found))):
            missing = min(set(range(len(found))) - set(found))
            raise StateError(f"{folder / f'rank{missing}'} is missing; there are the ranks {found}. Bring all files.")
    return RecsdkSave(
        path=root,
        layout=RANKS if ranks[first] else MERGED,
        world_size=len(ranks[first]) or None,
        is_incremental=_is_incremental(meta) if meta.exists() else False if ranks[first] else None,
        tables=tuple(
            _table(folder, [folder / f"rank{r}" for r in found] or [folder]) for folder, found in ranks.items()
        ),
    )


def _is_incremental(meta: Path) -> bool:
    with open(meta, errors="replace") as file:
        text = file.read(_MOST_META + 1)
    match = _META_LINE.fullmatch(text.strip())
    if match is None or len(text) > _MOST_META:
        raise ConfigError(f"{meta} says {text[:80]!r}. Known: incremental=True or incremental=False.")
    return match[1].lower() == "true"


def _table(folder: Path, where: list[Path]) -> SavedTable:
    parts = [_rows(one) for one in where]
    return SavedTable(
        name=folder.name,
        dim=_the_same("columns", [(p.weights.path, p.weights.shape[1]) for p in parts]),
        num_moments=_the_same("momenta", [(w, len(p.moments)) for w, p in zip(where, parts, strict=True)]),
        parts=tuple(parts),
    )


def _the_same(what: str, found: Iterable[tuple[Path, int]]) -> int:
    (first, value), *others = found
    for path, other in others:
        if other != value:
            raise StateError(f"{path} has {other} {what}, {first} has {value}. They are not of one save; save again.")
    return value


def _rows(folder: Path) -> SavedRows:
    keys, weights = _slice(folder / _KEY), _slice(folder / _EMBEDDING, num_axes=2)
    moments = [_slice(folder / name, num_axes=2) for name in _MOMENTA if (folder / name).exists()]
    if not (folder / _MOMENTA[0]).exists() and moments:
        raise StateError(f"{folder / _MOMENTA[0]} is missing beside {_MOMENTA[1]}. Bring all files of the save.")
    for array, shape in ((weights, keys.shape), *((moment, weights.shape) for moment in moments)):
        if array.shape[: len(shape)] != shape:
            raise StateError(
                f"{array.path} has the shape {list(array.shape)}, which does not fit {list(shape)} of what lies beside "
                f"it in {folder}. They are not of one save; save again."
            )
    counts = _attribute(folder / _COUNTS, 1)[0] if (folder / _COUNTS).exists() else 0
    times, lost = _times(folder) if (folder / _TIMES).exists() else (None, 0)
    return SavedRows(
        keys=keys, weights=weights, moments=tuple(moments), times=times, num_counts=counts, lost_times=lost
    )


def _attribute(folder: Path, num_axes: int) -> tuple[int, ...]:
    """The shape that a ``slice.attribute`` tells."""
    path = folder / _ATTRIBUTE
    size, wanted_size = _size(path), 8 * (num_axes + 1)
    if size != wanted_size:
        raise StateError(f"{path} is damaged: it has {size} bytes, not {wanted_size}. Use an older save.")
    item_bytes, *shape = np.fromfile(path, "<i8", num_axes + 1).tolist()
    wanted, kind = (8, "int64") if num_axes == 1 else (4, "float32")
    if item_bytes != wanted:
        raise ConfigError(f"{path} tells elements of {item_bytes} bytes. Known: {kind}, {wanted} bytes.")
    if shape[0] < 0 or (num_axes == 2 and shape[1] < 1):
        raise StateError(f"{path} is damaged: it tells the shape {shape}. Use an older save.")
    return tuple(shape)


def _size(path: Path) -> int:
    if not path.is_file():
        raise StateError(f"{path} is missing. Bring all files of the save.")
    return path.stat().st_size


def _slice(folder: Path, *, num_axes: int = 1) -> SavedArray:
    shape, path = _attribute(folder, num_axes), folder / _DATA
    if not shape[0] and not path.exists():  # savers leave an empty array out
        return SavedArray(path=path, shape=shape)
    wanted, size = int(np.prod(shape, dtype=object)) * (8 if num_axes == 1 else 4), _size(path)
    if size < wanted:
        raise StateError(
            f"{path} is cut: it has {size:,} bytes, the {wanted:,} of shape {list(shape)} should be there. Use an "
            "older save."
        )
    return SavedArray(path=path, shape=shape, tail_bytes=size - wanted)


def _times(folder: Path) -> tuple[tuple[SavedArray, SavedArray], int]:
    """Ids and times, and how many are missing."""
    (told,) = _attribute(folder / _TIMES, 1)
    paths = folder / _TIMES / "slice_evict_key.data", folder / _TIMES / "slice_evict_ts.data"
    sizes = [_size(path) if path.exists() or told > _MOST_RANKS else 0 for path in paths]
    n, rest = divmod(sizes[0], 8)
    # A rank that has a single time does not write it, so that one a rank may be missing where they were merged.
    may_lack = int(told == 1) if _RANK.fullmatch(folder.name) else min(told, _MOST_RANKS)
    if sizes[0] != sizes[1] or rest or not told - may_lack <= n <= told:
        raise StateError(
            f"{paths[0]} and {paths[1].name} have {sizes[0]:,} and {sizes[1]:,} bytes, {_ATTRIBUTE} beside them tells "
            f"{told:,} int64 each. They are damaged, or behind those of an older save; save again into an empty folder."
        )
    return (SavedArray(path=paths[0], shape=(n,)), SavedArray(path=paths[1], shape=(n,))), told - n


# ---- files of torch_rec_v2 ------------------------------------------------------------------------------------------


def _read_dynamic(root: Path, files: list[Path]) -> RecsdkSave:
    found: dict[str, dict[tuple[str, int], Path]] = {}
    sizes: set[int] = set()
    for file in files:
        match = _DYNAMIC.fullmatch(file.name)
        if file.is_symlink() or match is None:
            raise ConfigError(f"{file} is a symbolic link. Copy what it leads to into the folder.")
        table, key = found.setdefault(match["table"], {}), (match["what"], int(match["r"]))
        sizes.add(int(match["w"]))
        if key in table or len(sizes) > 1 or key[1] >= int(match["w"]):
            raise ConfigError(
                f"{file} is of another save or module than {table.get(key, files[0])}. Pass one at a time."
            )
        table[key] = file
    (world_size,) = sizes
    return RecsdkSave(
        path=root,
        layout=DYNAMIC,
        world_size=world_size,
        is_incremental=False,
        tables=tuple(_dynamic_table(name, found[name], world_size) for name in sorted(found)),
    )


def _dynamic_table(name: str, files: dict[tuple[str, int], Path], world_size: int) -> SavedTable:
    parts, some = [], next(iter(files.values()))
    for rank in range(world_size):
        for what in ("keys", "values"):
            if (what, rank) not in files:
                absent = some.with_name(f"{name}_emb_{what}.rank_{rank}.world_size_{world_size}")
                raise StateError(f"{absent} is missing. Bring the files of all ranks.")
        keys, values = files["keys", rank], files["values", rank]
        n = _whole(keys, 8)
        scores = files.get(("scores", rank))
        if scores is not None and _whole(scores, 8) != n:
            raise StateError(f"{scores} has {_size(scores):,} bytes, {keys.name} has {n:,} ids. It is damaged.")
        array = SavedArray(path=keys, shape=(n,))
        parts.append(
            SavedRows(
                keys=array,
                weights=SavedArray(path=values, shape=(n, _whole(values, 4 * n) if n else 0)),
                times=None if scores is None else (array, SavedArray(path=scores, shape=(n,))),
                has_state_file=("opt_values", rank) in files,
            )
        )
    dims = [(part.weights.path, part.weights.shape[1]) for part in parts if part.keys.shape[0]]
    return SavedTable(name=name, dim=_the_same("columns", dims) if dims else 0, num_moments=0, parts=tuple(parts))


def _whole(path: Path, unit: int) -> int:
    """How many units of so many bytes a file has."""
    size = _size(path)
    if size % unit:
        raise StateError(f"{path} is cut: {size:,} bytes are not a whole number of {unit:,}. Use an older save.")
    return size // unit
