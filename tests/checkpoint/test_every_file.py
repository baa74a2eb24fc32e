"""Every file of a snapshot and of its deltas, damaged in every way: refused by its name, or what is read is right."""

from __future__ import annotations

import contextlib
import importlib.util
import io
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from hybridrec import HybridRecError, checkpoint
from hybridrec.checkpoint.__main__ import main
from tests.checkpoint import mixed
from tests.checkpoint.forging import bits, bits_of, files_in
from tests.checkpoint.runs import build
from tests.checkpoint.test_deltas import EVICTING, followed, write_chain
from tests.distributed.pipelines import all_batches, mine
from tests.ranks import RankPools

Damage = Callable[[bytes, bytes], bytes | None]
"""What a file has then, of what it has and of what another run's has; None: it is gone."""


def _flipped(data: bytes, at: int) -> bytes:
    changed = bytearray(data)
    changed[at] ^= 1
    return bytes(changed)


DAMAGES: dict[str, Damage] = {
    "first bit": lambda data, other: _flipped(data, 0) if data else None,
    "middle bit": lambda data, other: _flipped(data, len(data) // 2) if data else None,
    "last bit": lambda data, other: _flipped(data, -1) if data else None,
    "cut": lambda data, other: data[:-1] if data else None,
    "cut in half": lambda data, other: data[: len(data) // 2] if data else None,
    "empty": lambda data, other: b"" if data else b"x",
    "grown": lambda data, other: data + b"\0",
    "removed": lambda data, other: None,
    "of another run": lambda data, other: other,
}


# ---- two kinds of runs -----------------------------------------------------------------------------------------------


def write_rows_and_ids(path: Path, seed: int) -> None:
    write_chain(replace(EVICTING, seed=seed), path, first=32, every=8, max_rows=160)


def model_of_rows() -> tuple[Any, Any]:
    dmp, pipeline = build(EVICTING, max_rows=160)
    pipeline.progress(iter(mine(EVICTING, all_batches(EVICTING)[:1])))
    return dmp, pipeline._optimizer


def write_sharded(path: Path, seed: int) -> None:
    dmp, fused = mixed.build()
    writer = checkpoint.DeltaWriter(path, dmp, fused)
    for step in range(3):  # without the name of the newest delta there may be one, of a writer that died
        mixed.train(dmp, fused, range(10 * seed + step, 10 * seed + step + 1))
        writer.save_delta() if step else writer.save_full()
    writer.close()


def model_of_sharded() -> tuple[Any, Any]:
    dmp, fused = mixed.build()
    mixed.train(dmp, fused, range(1))
    return dmp, fused


RUNS: dict[str, tuple[Callable[[Path, int], None], Callable[[], tuple[Any, Any]], tuple[str, ...]]] = {
    "rows and ids": (write_rows_and_ids, model_of_rows, (".rows", ".ids", "dense.pt", "ranks/00000.pt", "newest")),
    "sharded tensors": (write_sharded, model_of_sharded, (".rows", ".distcp", ".metadata", "latest", "manifest.json")),
}


# ---- readers ---------------------------------------------------------------------------------------------------------


def by_follower(path: Path, out: Path) -> Any:
    follower = checkpoint.follow(path)
    return followed(follower), follower.step, {name: bits(tensor) for name, tensor in follower.dense.items()}


def by_inspection(path: Path, out: Path) -> str:
    told, problem = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(told), contextlib.redirect_stderr(problem):
        status = main(["inspect", str(path), "--verify"])
    if status:
        raise HybridRecError(problem.getvalue())
    return told.getvalue()


def by_export(kind: str) -> Callable[[Path, Path], Any]:
    def export(path: Path, out: Path) -> dict[str, bytes]:
        shutil.rmtree(out, ignore_errors=True)
        write = checkpoint.export_parquet if kind == "parquet" else checkpoint.export_safetensors
        return {file.name: file.read_bytes() for file in write(path, out)}

    return export


READERS: dict[str, Callable[[Path, Path], Any]] = {
    "follow": by_follower,
    "inspect": by_inspection,
    "safetensors": by_export("safetensors"),
}
if importlib.util.find_spec("pyarrow") is not None:
    READERS["parquet"] = by_export("parquet")


def is_read(reader: str, name: str) -> bool:
    """Whether a reader has to refuse what is wrong with a file: exports take rows alone, and what they follow from."""
    if name == "latest":
        return False  # without it the newest snapshot is told by time
    if reader in ("safetensors", "parquet"):
        return name.endswith((".rows", ".ids", "manifest.json", "newest"))
    return True


# ---- every file ------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def damaged(file: Path, data: bytes | None) -> Iterator[None]:
    """Of all ranks: rank 0 does it, and undoes it."""
    before, is_first = file.read_bytes(), dist.get_rank() == 0
    dist.barrier()
    if is_first and data is None:
        file.unlink()
    elif is_first and data is not None:
        file.write_bytes(data)
    dist.barrier()
    yield
    dist.barrier()
    if is_first:
        file.write_bytes(before)
    dist.barrier()


def outcome(name: str, file: Path, reader: str, read: Callable[[], Any], expected: Any) -> str:
    """What is wrong with what a reader made of a damaged file; "" if nothing is."""
    try:
        found = read()
    except HybridRecError as e:
        # Of what names other files, the file that does not follow from it may be the one that is told.
        words = [str(file)] if not name.endswith(("manifest.json", "newest", "latest")) else ["step_", "complete"]
        return "" if any(word in str(e) for word in words) else f"refused without its name: {e}"
    if found != expected:
        return "what was read is wrong"
    return "was not refused" if is_read(reader, name) else ""


def damage_every_file(path: Path, other: Path, kind: str, damages: tuple[str, ...], out: Path) -> tuple[int, list[str]]:
    """(how many cases, what is wrong of which)."""
    dmp, optimizer = RUNS[kind][1]()
    is_first = dist.get_rank() == 0
    expected = {reader: read(path, out) for reader, read in READERS.items()} if is_first else {}
    before, num_cases, wrong = bits_of(dmp, optimizer), 0, []

    def load() -> str:
        checkpoint.load(path, dmp, optimizer)
        return "loaded"

    names = sorted(files_in(path), key=lambda name: name.endswith(("newest", "latest")))  # these may be loaded
    for name in names:
        data = (path / name).read_bytes()
        others = other / name
        for damage in damages:
            now = DAMAGES[damage](data, others.read_bytes() if others.exists() else b"nothing")
            if now == data or (name.endswith("newest") and now is not None and now.split() == data.split()):
                continue  # it says the same
            with damaged(path / name, now):
                found = {"load": outcome(name, path / name, "load", load, "loaded")}
                if is_first:
                    for reader, read in READERS.items():
                        reading = lambda read=read: read(path, out)  # noqa: E731
                        found[reader] = outcome(name, path / name, reader, reading, expected[reader])
            if not name.endswith(("newest", "latest")) and bits_of(dmp, optimizer) != before:
                raise AssertionError(f"{name}, {damage}: the model is not what it was")
            num_cases += len(found)
            wrong += [f"{name}, {damage}, {reader}: {problem}" for reader, problem in found.items() if problem]
    checkpoint.load(path, dmp, optimizer)
    loaded = bits_of(dmp, optimizer)
    with damaged(path / "latest", None):
        checkpoint.load(path, dmp, optimizer)
    if bits_of(dmp, optimizer) != loaded or loaded == before:
        raise AssertionError("what is loaded without the name of the newest is something else")
    return num_cases, wrong


FAST = ("middle bit", "cut", "removed", "of another run")


@pytest.mark.parametrize("kind", RUNS)
@pytest.mark.parametrize(
    ("world_size", "damages"),
    [
        (1, FAST),
        pytest.param(1, tuple(set(DAMAGES) - set(FAST)), marks=pytest.mark.slow),
        pytest.param(2, tuple(DAMAGES), marks=pytest.mark.slow),
    ],
    ids=["one rank", "one rank, more", "two ranks"],
)
def test_every_file_that_is_damaged(
    pools: RankPools, tmp_path: Path, kind: str, world_size: int, damages: tuple[str, ...]
) -> None:
    path, other = tmp_path / "run", tmp_path / "other"
    for root, seed in ((path, 1), (other, 2)):
        pools[world_size].run(RUNS[kind][0], root, seed)
    names = list(files_in(path))
    for suffix in RUNS[kind][2]:
        assert any(name.endswith(suffix) for name in names), suffix
    arguments = path, other, kind, damages, tmp_path / "out"
    found = pools[world_size].run(damage_every_file, *arguments, watchdog=1200)
    assert [one[1] for one in found] == [[]] * world_size
    assert found[0][0] > 4 * len(names)
