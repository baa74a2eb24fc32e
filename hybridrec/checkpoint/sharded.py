"""Tensors that torch itself shards, in a snapshot: written and read by `torch.distributed.checkpoint`.

Its steps are called one by one, so that only the plan is collective: writing may happen on a thread, and whatever goes
wrong is told as of any other file. See docs/design/checkpoint.md.
"""

from __future__ import annotations

import math
import pickle
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, StorageMeta, TensorStorageMetadata
from torch.distributed.checkpoint.planner import ReadItem, SavePlan, WriteItem
from torch.distributed.checkpoint.storage import WriteResult

from hybridrec.backend import HOST
from hybridrec.checkpoint.exchange import Ranks
from hybridrec.checkpoint.files import entry_of, sync_folder
from hybridrec.checkpoint.manifest import FileEntry
from hybridrec.errors import ConfigError, StateError

SHARDED = "sharded"
"""Folder in a snapshot."""
MODEL, OPTIMIZER = "model.", "optimizer."
"""What names of tensors begin with."""
_METADATA = ".metadata"


# ---- writing -------------------------------------------------------------------------------------------------------


class _Writer(FileSystemWriter):
    """Leaves out of the metadata where the snapshot was written: it is renamed."""

    def storage_meta(self) -> StorageMeta:
        return StorageMeta()


class _SavePlanner(DefaultSavePlanner):
    """Gives the writer copies where there are some."""

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._copies: dict[MetadataIndex, Tensor] = {}

    def copy_aside(self, plan: SavePlan) -> None:
        """From now on the tensors may change."""
        for item in plan.items:
            data = super().resolve_data(item)
            if isinstance(data, Tensor):
                self._copies[item.index] = data.detach().to(HOST, copy=True)

    def resolve_data(self, write_item: WriteItem) -> Any:
        copy = self._copies.get(write_item.index)
        return super().resolve_data(write_item) if copy is None else copy


class ShardedWriter:
    """Sharded tensors on their way into a folder: planned by all ranks, written by each, finished by one."""

    def __init__(self, folder: Path, tensors: Mapping[str, Any], ranks: Ranks, *, is_staged: bool) -> None:
        """Plan who writes what. Collective.

        Args:
            folder: Of the snapshot or delta; what is written is in a folder in it.
            tensors: By name, `ShardedTensor`, `DTensor`, or what every rank has. Of none that a rank has no part of.
            ranks: All of the model.
            is_staged: Whether tensors may change before `write`: they are copied to the host then.
        """
        self._folder, self._rank = folder, ranks.rank
        with ranks.together():
            self._storage = _Writer(folder / SHARDED)
            self._planner = _SavePlanner()
            self._planner.set_up_planner(dict(tensors), None, ranks.rank == 0)
            self._storage.set_up_storage_writer(ranks.rank == 0)
            mine = self._storage.prepare_local_plan(self._planner.create_local_plan())
        everyone = ranks.gather(mine)
        planned: Any = None
        with ranks.together():
            if ranks.rank == 0:
                plans, metadata = self._planner.create_global_plan(everyone)
                planned = self._storage.prepare_global_plan(plans), metadata
        plans, self._metadata = ranks.from_first(planned)
        with ranks.together():
            self._plan = self._planner.finish_plan(plans[ranks.rank])
            if is_staged:
                self._planner.copy_aside(self._plan)

    def write(self) -> tuple[list[FileEntry], list[WriteResult]]:
        """Write this rank's part, and force it to disk. Not collective."""
        results = self._storage.write_data(self._plan, self._planner).wait()
        names = sorted(path.name for path in (self._folder / SHARDED).glob(f"__{self._rank}_*"))
        return [entry_of(self._folder, f"{SHARDED}/{name}", self._rank) for name in names], results

    def finish(self, results: list[list[WriteResult]]) -> FileEntry:
        """Write what says where everything is. On one rank, when all have written.

        Args:
            results: What `write` gave, of every rank.
        """
        self._storage.finish(self._metadata, results)
        sync_folder(self._folder / SHARDED)
        return entry_of(self._folder, f"{SHARDED}/{_METADATA}", self._rank)


# ---- reading -------------------------------------------------------------------------------------------------------

_CLASSES = {
    ("torch", "Size"),
    ("torch.serialization", "_get_layout"),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    *(
        ("torch.distributed.checkpoint.metadata", name)
        for name in (
            "_MEM_FORMAT_ENCODING",
            "BytesStorageMetadata",
            "ChunkStorageMetadata",
            "Metadata",
            "MetadataIndex",
            "StorageMeta",
            "TensorProperties",
            "TensorStorageMetadata",
        )
    ),
    *(("torch", name) for name, value in vars(torch).items() if isinstance(value, torch.dtype)),
}
"""All that the metadata of sharded tensors is made of: none of them runs code that a file brings along."""


class _MetadataUnpickler(pickle.Unpickler):
    """The metadata is a pickle: nothing but its own classes is looked up, and so nothing else can be called."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in _CLASSES:
            raise pickle.UnpicklingError(f"it asks for {module}.{name}, which is no part of such a file")
        return super().find_class(module, name)


class _Rehearsal(DefaultLoadPlanner):
    """Gives the reader tensors without memory to fill."""

    def resolve_tensor(self, read_item: ReadItem) -> Tensor:
        found: Tensor = super().resolve_tensor(read_item)
        return torch.empty_like(found, device="meta")


class ShardedReader(FileSystemReader):
    """Sharded tensors of a snapshot or delta whose files were verified."""

    def __init__(self, folder: Path, files: Iterable[FileEntry]) -> None:
        """
        Args:
            folder: Of the snapshot or delta.
            files: Those of `ShardedWriter`; with none of them there are no tensors.

        Raises:
            StateError: The metadata is not what a writer makes; names its file. Nothing of it was run.
        """
        super().__init__(folder / SHARDED)
        self._file = folder / SHARDED / _METADATA
        self._names = {file.name.removeprefix(f"{SHARDED}/") for file in files}
        self._metadata = self.read_metadata() if self._names else Metadata(state_dict_metadata={}, storage_data={})
        self.set_up_storage_reader(self._metadata, True)

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """What the writer wrote of the tensors; without running anything."""
        try:
            with open(self._file, "rb") as stream:
                metadata = _MetadataUnpickler(stream).load()
            return self._checked(metadata)
        except OSError as e:
            raise StateError(f"{self._file} cannot be read: {e}.") from e
        except Exception as e:  # a damaged pickle raises about anything
            raise StateError(f"{self._file} is damaged or forged: {e}. Load an older snapshot.") from e

    def _checked(self, metadata: Any) -> Metadata:
        if not isinstance(metadata, Metadata):
            raise ValueError("it holds no metadata")
        num_bytes = 0
        for name, tensor in metadata.state_dict_metadata.items():
            if not isinstance(tensor, TensorStorageMetadata):
                raise ValueError(f"{name!r} is no tensor")
            if min(tensor.size, default=0) < 0:
                raise ValueError(f"{name!r} has the shape {list(tensor.size)}")
            # Not numel(), which is modulo 2**64.
            if sum(math.prod(chunk.sizes) for chunk in tensor.chunks) != math.prod(tensor.size):
                raise ValueError(f"the parts of {name!r} are not the whole tensor")
            num_bytes += math.prod(tensor.size) * tensor.properties.dtype.itemsize
        room = sum((self._file.parent / name).stat().st_size for name in self._names)
        if num_bytes > room:  # memory is taken for so many
            raise ValueError(f"its tensors have {num_bytes:,} bytes, the files {room:,}")
        for info in metadata.storage_data.values():
            if info.relative_path not in self._names:
                raise ValueError(f"it points to {info.relative_path!r}, which is no file of the snapshot")
        return metadata

    @property
    def shapes(self) -> dict[str, tuple[torch.dtype, list[int]]]:
        """Name -> (dtype, shape) of every tensor, whole."""
        entries = self._metadata.state_dict_metadata.items()
        return {name: (t.properties.dtype, list(t.size)) for name, t in entries if isinstance(t, TensorStorageMetadata)}

    def read_into(self, tensors: Mapping[str, Any]) -> None:
        """Fill tensors in place, however they are sharded now; `shapes` is theirs. Not collective.

        Raises:
            StateError: A part is not what the metadata says; names it. Others may have been filled.
        """
        self._read(tensors, DefaultLoadPlanner)

    def check_into(self, tensors: Mapping[str, Any]) -> None:
        """Read what `read_into` would, and fill nothing: raises what it would raise."""
        self._read(tensors, _Rehearsal)

    def _read(self, tensors: Mapping[str, Any], kind: type[DefaultLoadPlanner]) -> None:
        planner = kind(flatten_state_dict=False, flatten_sharded_tensors=False)
        try:
            planner.set_up_planner(dict(tensors), self._metadata, True)
            self.read_data(planner.finish_plan(planner.create_local_plan()), planner).wait()
        except Exception as e:  # a forged part raises about anything
            raise StateError(
                f"{self._file.parent} is damaged or forged: its parts are not what {_METADATA} says "
                f"({type(e).__name__}: {e}). Load an older snapshot."
            ) from e

    def read_whole(self, prefix: str = "") -> dict[str, Tensor]:
        """Those whose name begins so, without it: whole, in host memory."""
        tensors = {n: torch.empty(s, dtype=t) for n, (t, s) in self.shapes.items() if n.startswith(prefix)}
        self.read_into(tensors)
        return {name.removeprefix(prefix): tensor for name, tensor in tensors.items()}


def check_sharded(saved: Mapping[str, tuple[torch.dtype, list[int]]], now: Mapping[str, Any]) -> None:
    """Refuse tensors that are not those of a snapshot.

    Args:
        saved: `ShardedReader.shapes`.
        now: By name; this rank's.

    Raises:
        ConfigError: Names the tensor, and both values.
    """
    for name, tensor in now.items():
        here = tensor.dtype, list(tensor.size())
        if saved[name] != here:
            (dtype, shape), what = saved[name], name.partition(".")[2]
            raise ConfigError(
                f"{what!r} is {dtype} {shape} in the snapshot and {here[0]} {here[1]} in the model. Load it into the "
                "model that it was saved from."
            )
