"""Tables that TorchRec shards, beside hashed ones, go through a snapshot with every bit, on any ranks and plan."""

from __future__ import annotations

import dataclasses
import errno
import hashlib
import json
import os
import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from hybridrec import ConfigError, HybridRecError, StateError, checkpoint
from hybridrec.checkpoint import __main__ as tool
from hybridrec.checkpoint.manifest import MANIFEST, digest_of, read_manifest
from hybridrec.checkpoint.sharded import ShardedReader, ShardedWriter
from tests.checkpoint.mixed import DIM, MOVED, PLAN, ROWS, build, kernels_of, same, tensors_of, train
from tests.ranks import RankPool, RankPools


def save_and_go_on(path: Path, plan: Mapping[str, str], optimizer: str, *, in_background: bool = False) -> Any:
    """(losses behind the snapshot, tensors in it, tensors at the end)."""
    dmp, fused = build(plan, optimizer=optimizer)
    train(dmp, fused, range(3))
    for kernel in kernels_of(dmp):
        kernel.iter.fill_(41)  # on a host FBGEMM's optimizers do not count
    found = tensors_of(dmp, fused)
    saving = checkpoint.Saving(path, dmp, fused, extra=dist.get_rank())
    if not in_background:
        saving.write()
    losses = train(dmp, fused, range(3, 6))
    if in_background:
        saving.start()
    saving.finish()
    return losses, found, tensors_of(dmp, fused)


def load_and_go_on(path: Path, plan: Mapping[str, str], optimizer: str) -> Any:
    """(losses, tensors that were loaded, tensors at the end)."""
    dmp, fused = build(plan, optimizer=optimizer)
    train(dmp, fused, range(1))
    fused.param_groups[0]["lr"] = 7.0
    checkpoint.load(path, dmp, fused)
    assert {int(c) for k in kernels_of(dmp) for c in (k.iter, k.iter_cpu)} == {41}
    found = tensors_of(dmp, fused)
    return train(dmp, fused, range(3, 6)), found, tensors_of(dmp, fused)


@pytest.mark.parametrize("in_background", [False, True])
def test_training_goes_on_bit_for_bit(pools: RankPools, tmp_path: Path, in_background: bool) -> None:
    """In the background the snapshot is of the moment when it was begun, though tables train before it is written."""
    saved = pools[2].run(save_and_go_on, tmp_path, PLAN, "adagrad", in_background=in_background)
    again = pools[2].run(load_and_go_on, tmp_path, PLAN, "adagrad")
    for (losses, before, final), (losses_again, loaded, final_again) in zip(saved, again, strict=True):
        assert same(before, loaded) and len(before) > 8 and not same(before, final)
        assert losses == losses_again and same(final, final_again)


@pytest.mark.parametrize(
    ("before", "after", "plan", "optimizer"),
    [
        (2, 3, MOVED, "adagrad"),
        (3, 1, PLAN, "adagrad"),
        (1, 2, PLAN | {"row": "table_wise", "table": "row_wise"}, "rowwise_adagrad"),
    ],
)
def test_other_ranks_and_plans(
    pools: RankPools, tmp_path: Path, before: int, after: int, plan: Mapping[str, str], optimizer: str
) -> None:
    first = PLAN if optimizer == "adagrad" else PLAN | {"column": "table_wise"}
    plan = plan if optimizer == "adagrad" else plan | {"column": "row_wise"}
    saved = pools[before].run(save_and_go_on, tmp_path, first, optimizer)
    for _, loaded, _ in pools[after].run(load_and_go_on, tmp_path, plan, optimizer):
        assert same(saved[0][1], loaded)


def weights_in(kernels: list[Any]) -> list[torch.Tensor]:
    return [weight.clone() for kernel in kernels for weight in kernel.split_embedding_weights()]


def resets_while_loading(path: Path) -> tuple[int, int]:
    """(FBGEMM's kernels of this rank, those of them that dropped their caches when they had what was saved)."""
    dmp, fused = build()
    train(dmp, fused, range(2))
    checkpoint.save(path, dmp, fused)
    kernels = kernels_of(dmp)
    saved = {id(kernel): weights_in([kernel]) for kernel in kernels}
    train(dmp, fused, range(2, 4))
    assert not all(map(torch.equal, weights_in(kernels), sum(saved.values(), [])))
    found = set()

    def reset(kernel: Any) -> None:
        if all(map(torch.equal, weights_in([kernel]), saved[id(kernel)])):
            found.add(id(kernel))

    with mock.patch.object(type(kernels[0]), "reset_cache_states", reset):
        checkpoint.load(path, dmp, fused)
    return len(kernels), len(found)


def test_caches_of_fbgemm_are_dropped_when_rows_are_loaded(pools: RankPools, tmp_path: Path) -> None:
    """On a device FBGEMM goes on with rows that it had cached before, unless it is told."""
    for num_kernels, num_reset in pools[2].run(resets_while_loading, tmp_path):
        assert num_kernels == num_reset > 1


def save_only(path: Path, **kwargs: Any) -> None:
    dmp, fused = build(**kwargs)
    train(dmp, fused, range(2))
    checkpoint.save(path, dmp, fused)


def refusal(path: Path, **kwargs: Any) -> str:
    """Why a snapshot is not loaded; nothing changed."""
    dmp, fused = build(**kwargs)
    train(dmp, fused, range(1))
    before = tensors_of(dmp, fused)
    with pytest.raises(HybridRecError) as caught:
        checkpoint.load(path, dmp, fused)
    assert same(before, tensors_of(dmp, fused))
    return f"{type(caught.value).__name__}: {caught.value}"


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {"plan": {n: PLAN[n] for n in ("row", "table", "all")} | {"other": "row_wise"}},
            ["other.weight", "column.weight"],
        ),
        ({"rows": ROWS + 2}, ["row.weight", f"[{ROWS}, {DIM}]", f"[{ROWS + 2}, {DIM}]"]),
        ({"optimizer": "rowwise_adagrad"}, ["row.momentum1", f"[{ROWS}, {DIM}]", f"[{ROWS}]"]),
    ],
)
def test_what_does_not_fit_is_refused_with_both_values(
    pools: RankPools, tmp_path: Path, changes: dict[str, Any], words: list[str]
) -> None:
    pools[2].run(save_only, tmp_path)
    for text in pools[2].run(refusal, tmp_path, **changes):
        assert text.startswith("ConfigError") and all(word in text for word in words), text


def save_dense_kernel(path: Path) -> str:
    dmp, fused = build({"row": "dense", "table": "table_wise", "column": "column_wise", "all": "data_parallel"})
    with pytest.raises(ConfigError) as caught:
        checkpoint.save(path, dmp, fused)
    return str(caught.value)


def test_parts_that_an_optimizer_of_their_own_trains_are_refused(pools: RankPools, tmp_path: Path) -> None:
    for text in pools[2].run(save_dense_kernel, tmp_path):
        assert "'plain.embedding_bags.row.weight' is sharded" in text and "apply_optimizer_in_backward" in text
    assert checkpoint.latest(tmp_path) is None


# ---- files ---------------------------------------------------------------------------------------------------------


class Attack:
    """What runs code when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.path),)


def forge(folder: Path, name: str, data: bytes) -> None:
    """Replace a file of a snapshot, and say so in its manifest: what everybody can do who can write there."""
    (folder / name).write_bytes(data)
    content = json.loads((folder / MANIFEST).read_bytes())
    del content["sha256"]
    entry = next(file for file in content["sharded"] if file["name"] == name)
    entry |= {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    (folder / MANIFEST).write_text(json.dumps(content | {"sha256": digest_of(content)}))


def test_forged_metadata_runs_nothing(pool_1: RankPool, tmp_path: Path) -> None:
    pool_1.run(save_only, tmp_path)
    folder = checkpoint.latest(tmp_path)
    assert folder is not None
    mark = tmp_path / "was run"
    forge(folder, "sharded/.metadata", pickle.dumps(Attack(mark)))
    (text,) = pool_1.run(refusal, tmp_path)
    assert not mark.exists()
    assert text.startswith("StateError") and "sharded/.metadata" in text and "mkdir" in text
    with pytest.raises(StateError, match="metadata"):
        checkpoint.follow(tmp_path)
    assert not mark.exists()


def altered(metadata: Any, how: str) -> Any:
    (index, info), *_ = metadata.storage_data.items()
    name = index.fqn
    if how == "elsewhere":
        return dataclasses.replace(
            metadata, storage_data=metadata.storage_data | {index: dataclasses.replace(info, relative_path="../x")}
        )
    entry = metadata.state_dict_metadata[name]
    part = dataclasses.replace(entry, chunks=entry.chunks[:-1])
    if how == "huge":
        size = torch.Size((2**40, *entry.size[1:]))
        part = dataclasses.replace(entry, size=size, chunks=[dataclasses.replace(entry.chunks[0], sizes=size)])
    return dataclasses.replace(metadata, state_dict_metadata=metadata.state_dict_metadata | {name: part})


@pytest.mark.parametrize(
    ("how", "words"), [("elsewhere", "../x"), ("without a part", "not the whole tensor"), ("huge", "bytes, the files")]
)
def test_metadata_that_does_not_fit_the_snapshot(pool_1: RankPool, tmp_path: Path, how: str, words: str) -> None:
    pool_1.run(save_only, tmp_path)
    folder = checkpoint.latest(tmp_path)
    assert folder is not None
    metadata = pickle.loads((folder / "sharded/.metadata").read_bytes())
    assert str(tmp_path) not in str(metadata)
    forge(folder, "sharded/.metadata", pickle.dumps(altered(metadata, how)))
    with pytest.raises(StateError, match=words):
        ShardedReader(folder, read_manifest(folder).sharded)


def test_an_altered_shard_is_refused_by_its_name(pools: RankPools, tmp_path: Path) -> None:
    pools[2].run(save_only, tmp_path)
    folder = checkpoint.latest(tmp_path)
    assert folder is not None
    file = folder / "sharded/__1_0.distcp"
    data = bytearray(file.read_bytes())
    data[-9] ^= 1
    file.write_bytes(data)
    for text in pools[2].run(refusal, tmp_path):
        assert text.startswith("StateError") and "sharded/__1_0.distcp is damaged" in text


def save_on_a_full_disk(path: Path) -> tuple[str, bool, list[str]]:
    """(error, whether training went on as a run that did not save, what is left in the folder)."""
    dmp, fused = build()
    train(dmp, fused, range(2))
    with pytest.MonkeyPatch.context() as patch:
        if dist.get_rank() == 1:
            patch.setattr(ShardedWriter, "write", _no_space)
        with pytest.raises(HybridRecError) as caught:
            checkpoint.save(path, dmp, fused)
    losses, (other, other_fused) = train(dmp, fused, range(2, 4)), build()
    return str(caught.value), losses == train(other, other_fused, range(4))[2:], sorted(p.name for p in path.iterdir())


def _no_space(self: ShardedWriter) -> Any:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "sharded/__1_0.distcp")


def test_a_full_disk_fails_on_all_ranks_and_leaves_nothing(pools: RankPools, tmp_path: Path) -> None:
    for text, goes_on, left in pools[2].run(save_on_a_full_disk, tmp_path):
        assert "No space left on device (on rank 1 of 2)" in text and goes_on
        assert not [name for name in left if name.startswith(("step", ".unfinished"))]


def test_the_tool_names_them_and_what_differs(
    pool_1: RankPool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pool_1.run(save_only, tmp_path / "a")
    pool_1.run(save_only, tmp_path / "b", optimizer="rowwise_adagrad")
    pool_1.run(save_and_go_on, tmp_path / "c", PLAN, "adagrad")
    assert tool.main(["inspect", str(tmp_path / "a"), "--verify"]) == 0
    shown = capsys.readouterr().out
    assert f"'plain.embedding_bags.row.weight', torch.float32 [{ROWS}, {DIM}]" in shown
    for other, words in (("b", "have other names or shapes"), ("c", "'sequence.embeddings.sequence.weight' differs")):
        assert tool.main(["diff", str(tmp_path / "a"), str(tmp_path / other)]) == 1
        assert words in capsys.readouterr().out


# ---- deltas --------------------------------------------------------------------------------------------------------


def write_deltas(path: Path) -> list[dict[str, torch.Tensor]]:
    """What a follower must have after the snapshot and after each delta."""
    dmp, fused = build()
    writer = checkpoint.DeltaWriter(path, dmp, fused)
    follower, found = None, []
    for step in range(3):
        train(dmp, fused, range(step, step + 1))
        writer.save_delta() if step else writer.save_full()
        if dist.get_rank() == 0:
            follower = follower or checkpoint.follow(path)
            follower.update()
            found.append(follower.dense)
        expected = {name: t for name, t in tensors_of(dmp, fused).items() if ":" not in name}
        if follower is not None:
            assert {n for n in follower.dense if not n.startswith("dense.")} == set(expected)
            assert all(torch.equal(follower.dense[name], tensor) for name, tensor in expected.items())
    writer.close()
    return found


def test_deltas_have_them_whole(pools: RankPools, tmp_path: Path) -> None:
    snapshots, _ = pools[2].run(write_deltas, tmp_path)
    assert len(snapshots) == 3
    name = "plain.embedding_bags.column.weight"
    assert not torch.equal(snapshots[0][name], snapshots[1][name])
