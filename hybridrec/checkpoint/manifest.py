"""What a snapshot holds, as the JSON beside its files says it. See docs/design/checkpoint.md."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any, TypeVar

from hybridrec.errors import ConfigError, StateError
from hybridrec.row_type import RowType

FORMAT = 1
MANIFEST = "manifest.json"
LAST_ORDINAL = 2**32 - 3
"""Scores are uint32, and two of them are not those of a batch."""
T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class FileEntry:
    """One file of a snapshot."""

    name: str
    """Relative to the snapshot, with ``/``."""
    rank: int
    """Who wrote it."""
    bytes: int
    sha256: str
    rows: int = 0
    """Of a table's shard."""

    def __post_init__(self) -> None:
        """`ValueError` for a name that leads out of the folder, or a number that is none: of a forged manifest."""
        check_counts(f"of {self.name!r}", rank=self.rank, bytes=self.bytes, rows=self.rows)
        path = PurePosixPath(self.name)
        if not path.parts or path.is_absolute() or ".." in path.parts:
            raise ValueError(f"it has the file {self.name!r}, which is not inside of its folder")


@dataclass(frozen=True, kw_only=True)
class TableEntry:
    """One table of a collection, over all ranks."""

    name: str
    """Of a table, or of columns of one: ``"t"``, ``"t[0:8]"``."""
    is_row_wise: bool
    """Whether each rank had the rows of the ids that hash to it; else one rank had all."""
    dim: int
    """D."""
    states: tuple[tuple[str, bool], ...]
    """(name, is row-wise) of every optimizer state, in the order of a record: row-sized ones first."""
    optimizer: Mapping[str, Any]
    """Fields of `OptimizerSpec`."""
    seed: int
    initializer: str
    max_rows: int | None
    chunk_rows: int
    """Rows of a chunk of its files; the last one of a file may have fewer."""
    files: tuple[FileEntry, ...] = ()
    row_type: str = RowType.FLOAT32.name
    """Of the weights, the name of a `RowType`."""

    def __post_init__(self) -> None:
        """`ValueError` for rows that the files do not have room for: memory is taken for so many."""
        check_counts(f"of table {self.name!r}", dim=self.dim, chunk_rows=self.chunk_rows)
        row_bytes = 12 + 4 * self.record_floats  # id, score, record
        for file in self.files:
            if self.chunk_rows < 1 or file.bytes != file.rows * row_bytes:
                raise ValueError(
                    f"{file.name!r} has {file.rows:,} rows of {row_bytes:,} bytes in {file.bytes:,} bytes, by chunks "
                    f"of {self.chunk_rows:,}"
                )

    @property
    def rows(self) -> int:
        """R, over all ranks."""
        return sum(file.rows for file in self.files)

    @property
    def record_floats(self) -> int:
        """Floats of a record: words of the weights, D * M, and A."""
        return RowType[self.row_type].num_words(self.dim) + sum(
            1 if is_row_wise else self.dim for _, is_row_wise in self.states
        )


@dataclass(frozen=True, kw_only=True)
class CollectionEntry:
    """One hashed collection."""

    name: str
    """Path in the model, without the wrappers of data parallelism."""
    ordinal: int
    """The newest that a committed batch had: what scores are compared with."""
    batches_committed: int
    """Steps of its optimizer."""
    tables: tuple[TableEntry, ...]

    def __post_init__(self) -> None:
        """`ValueError` for what no batch can have had."""
        check_counts(
            f"of collection {self.name!r}", most=LAST_ORDINAL, ordinal=self.ordinal, committed=self.batches_committed
        )


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """One snapshot."""

    step: int
    """Training batches that were committed: where a loader resumes."""
    world_size: int
    """W."""
    collections: tuple[CollectionEntry, ...]
    dense: FileEntry
    """Parameters that are not hashed tables, and the optimizer."""
    ranks: tuple[FileEntry, ...]
    """What each rank has for itself: random numbers, the user's ``extra``."""
    versions: Mapping[str, str] = field(default_factory=dict)
    """Package -> version, for reading."""
    sharded: tuple[FileEntry, ...] = ()
    """Tensors that torch itself shards, in the format of `torch.distributed.checkpoint`."""

    def __post_init__(self) -> None:
        """`ValueError` for a file of a rank that there was not."""
        check_writers(self.files(), self.step, self.world_size)

    def files(self) -> tuple[FileEntry, ...]:
        """All but the manifest itself."""
        shards = [file for c in self.collections for table in c.tables for file in table.files]
        return (self.dense, *self.ranks, *self.sharded, *shards)

    def encode(self) -> bytes:
        """What its file holds."""
        content = {"format": FORMAT, **dataclasses.asdict(self)}
        content["sha256"] = digest_of(content)
        return json.dumps(content, indent=1, sort_keys=True).encode()

    @property
    def digest(self) -> str:
        """SHA-256 of what the manifest says, and so of the snapshot."""
        return digest_of({"format": FORMAT, **dataclasses.asdict(self)})


def check_counts(where: str, *, most: int = 2**63 - 1, **counts: Any) -> None:
    """`ValueError` for numbers, by name, that are no count of anything.

    Args:
        where: They are, for the message.
        most: What they can be.
        counts: By name.
    """
    for name, value in counts.items():
        if type(value) is not int or not 0 <= value <= most:
            raise ValueError(f"{name} {where} is {value!r}")


def check_writers(files: Iterable[FileEntry], step: int, world_size: int) -> None:
    """`ValueError` for a file of a rank that there was not: ranks share by it which files they verify."""
    check_counts("of the manifest", step=step, world_size=world_size)
    for file in files:
        if file.rank not in range(world_size):
            raise ValueError(f"{file.name!r} is of rank {file.rank!r} of {world_size}")


def read_manifest(folder: Path) -> Manifest:
    """The manifest of a snapshot.

    Raises:
        StateError: It is missing, cut, altered or of another format; names the file.
    """
    return decoded(folder / MANIFEST, read_json(folder / MANIFEST, FORMAT), _manifest)


def _manifest(content: dict[str, Any]) -> Manifest:
    collections = tuple(collection_of(c) for c in content.pop("collections"))
    dense, ranks = FileEntry(**content.pop("dense")), tuple(FileEntry(**f) for f in content.pop("ranks"))
    sharded = tuple(FileEntry(**f) for f in content.pop("sharded", ()))
    return Manifest(collections=collections, dense=dense, ranks=ranks, sharded=sharded, **content)


def read_json(path: Path, known_format: int) -> dict[str, Any]:
    """What a manifest says, without its format and hash.

    Raises:
        StateError: It is missing, cut or altered; names the file.
        ConfigError: It has another format.
    """
    try:
        content: dict[str, Any] = json.loads(path.read_bytes())
        digest = content.pop("sha256")
        found_format, found_digest = content["format"], digest_of(content)
    except FileNotFoundError as e:
        raise StateError(f"{path.parent} is no complete snapshot: it has no {path.name}.") from e
    except OSError as e:
        raise StateError(f"{path} cannot be read: {e}.") from e
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as e:
        raise StateError(f"{path} is damaged: it is no manifest. Load an older snapshot.") from e
    if found_format != known_format:
        raise ConfigError(
            f"{path} has format {found_format}, this version of hybridrec reads format {known_format}. Load it with "
            f"the version that wrote it: {content.get('versions', {}).get('hybridrec', 'unknown')}."
        )
    if digest != found_digest:
        raise StateError(f"{path} is damaged: its contents are not what was written. Load an older snapshot.")
    del content["format"]
    return content


def decoded(path: Path, content: dict[str, Any], make: Callable[[dict[str, Any]], T]) -> T:
    """What a manifest stands for.

    Args:
        path: Of its file.
        content: What `read_json` gave; taken apart.
        make: What makes of it what it stands for.

    Raises:
        StateError: It says what no writer says, although its hash is right; names the file.
    """
    try:
        return make(content)
    except (ValueError, KeyError, TypeError, AttributeError) as e:
        raise StateError(f"{path} is damaged or forged: {e}. Load an older snapshot.") from e


def collection_of(content: dict[str, Any]) -> CollectionEntry:
    """A collection's entry out of what JSON made of it."""
    return CollectionEntry(tables=tuple(table_of(t) for t in content.pop("tables")), **content)


def table_of(content: Mapping[str, Any]) -> TableEntry:
    """A table's entry out of what JSON made of it."""
    content = dict(content)
    files = tuple(FileEntry(**f) for f in content.pop("files"))
    states = tuple((str(name), bool(is_row_wise)) for name, is_row_wise in content.pop("states"))
    return TableEntry(files=files, states=states, **content)


def digest_of(content: Mapping[str, Any]) -> str:
    """SHA-256 of what a manifest says, its format included."""
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
