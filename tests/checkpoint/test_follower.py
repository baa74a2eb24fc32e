"""What a serving process reads: the rows of the model in eval, unknown ids too; one version whatever else happens."""

from __future__ import annotations

import itertools
import shutil
import threading
import tracemalloc
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torchrec.distributed import DistributedModelParallel
from torchrec.modules.embedding_configs import DataType
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from hybridrec import Constant, HashEmbeddingBagConfig, Normal, Uniform, checkpoint
from hybridrec.checkpoint import follower as follower_module
from hybridrec.checkpoint.delta_chain import read_delta
from hybridrec.checkpoint.files import read_rows, remove_folder
from hybridrec.checkpoint.followed_rows import FollowedRows, RowStorage
from hybridrec.checkpoint.manifest import read_manifest
from hybridrec.errors import ConfigError
from hybridrec.store.row_export import RowChunk
from hybridrec.store.row_state_layout import RowStateLayout
from hybridrec.types import RowState
from tests.cases.small import kjt, sharded
from tests.checkpoint.made_snapshots import rows_of, snapshot_of, table_in
from tests.checkpoint.test_deltas import ADAM, EVICTING, write_chain
from tests.distributed import scenario as scenarios
from tests.distributed.pipelines import all_batches
from tests.distributed.scenario import Scenario, build, device_rows, make_batch, to_kjt
from tests.distributed.test_row_types import TABLES as TYPED
from tests.distributed.test_sequence_oracle import COLUMNS
from tests.distributed.test_sharding_types import MIXED
from tests.ranks import RankPools

UNKNOWN = [2**63 - 1, -(2**63), 0, -1, 12345678901234567]

# ---- parity with the model in eval -----------------------------------------------------------------------------------


def in_eval(dmp: DistributedModelParallel, ebc: Any, features: list[str], ids_N: Tensor) -> dict[str, Tensor]:
    """Feature -> float32 [N, D]: what the model reads for each id. Collective."""
    lengths = torch.ones(len(features) * len(ids_N), dtype=torch.int64)
    dmp.eval()
    with torch.no_grad():
        out = ebc(KeyedJaggedTensor(features, ids_N.repeat(len(features)), lengths=lengths))
        found = {f: (v if isinstance(v, Tensor) else v.values()).float() for f, v in as_dict(out).items()}
    dmp.train()
    return found


def as_dict(output: Any) -> dict[str, Any]:
    output = output.wait() if hasattr(output, "wait") else output
    return dict(output) if isinstance(output, dict) else output.to_dict()


def compare_reads(
    follower: checkpoint.Follower, tables: dict[str, list[str]], live: dict[str, Tensor], ids: Tensor
) -> int:
    """Rows of every table alike, known or not; how many were known."""
    num_known = 0
    for table, features in tables.items():
        read, is_known = follower.embeddings(table, ids)
        zeros, is_known_too = follower.embeddings(table, ids, unknown="zeros")
        assert torch.equal(is_known, is_known_too) and torch.equal(zeros[is_known], read[is_known])
        assert not zeros[~is_known].any() and bool((~is_known).any())
        for feature in features:
            if not torch.equal(read.float(), live[feature]):
                raise AssertionError(f"{table}: {read} is not {live[feature]}")
        num_known += int(is_known.sum())
    return num_known


def parity(scenario: Scenario, path: Path) -> int:
    batches = all_batches(scenario)
    world_size = dist.get_world_size()
    dmp, optimizer = build(scenario, {t.name: device_rows(scenario, t, batches, world_size) for t in scenario.tables})
    writer = checkpoint.DeltaWriter(path, dmp, optimizer)
    tables = {t.name: list(t.features) for t in scenario.tables}
    features = [f for names in tables.values() for f in names]
    follower, num_known = None, 0
    for step in range(scenario.steps):
        batch = make_batch(scenario, step, dist.get_rank(), world_size)
        optimizer.zero_grad()
        dmp(to_kjt(scenario, batch), batch.labels).backward()
        optimizer.step()
        writer.save_delta() if step else writer.save_full()
        dist.barrier()
        follower = follower or checkpoint.follow(path)
        follower.update()
        ids = torch.tensor([i for t in scenario.tables for i in scenarios.universe(scenario, t)] + UNKNOWN)
        num_known += compare_reads(follower, tables, in_eval(dmp, dmp.module.ebc, features, ids), ids)
    return num_known


@pytest.mark.parametrize(
    "changes",
    [{"tables": MIXED}, {"tables": TYPED}, {"tables": COLUMNS, "is_sequence": True}],
    ids=["tables and columns on single ranks", "16 bits", "columns of sequences"],
)
def test_every_id_reads_what_the_model_reads_in_eval(pools: RankPools, tmp_path: Path, changes: dict[str, Any]) -> None:
    assert min(pools[2].run(parity, replace(ADAM, steps=3, **changes), tmp_path)) > 50


def one_row_of_three(rows: Tensor) -> Tensor:
    return rows.copy_(torch.arange(rows.numel()).view_as(rows) % 97 / 100)


INITIALIZERS: dict[str, dict[str, Any]] = {
    "uniform": {"initializer": Uniform(-0.25, 0.5), "seed": 5},
    "normal": {"initializer": Normal(0.1, 0.02), "data_type": DataType.BF16},
    "constant": {"initializer": Constant(0.3), "data_type": DataType.FP16},
    "bank": {"init_fn": one_row_of_three},
}


def initial_parity(path: Path) -> int:
    tables = [
        HashEmbeddingBagConfig(3000, 5, name, feature_names=[f"f_{name}"], **kind)
        for name, kind in INITIALIZERS.items()
    ]
    dmp = sharded(tables)
    features = [f"f_{name}" for name in INITIALIZERS]
    bags = {f: [[1, 2], [3 + dist.get_rank()]] for f in features}
    dmp(kjt(bags)).sum().backward()
    writer = checkpoint.DeltaWriter(path, dmp)
    writer.save_full()
    dmp(kjt({f: [[4, 5]] for f in features})).sum().backward()
    writer.save_delta()
    dist.barrier()
    ids = torch.tensor([1, 2, 3, 4, 5, 6, *UNKNOWN])
    live = in_eval(dmp, dmp.module.ebc, features, ids)
    return compare_reads(checkpoint.follow(path), {n: [f"f_{n}"] for n in INITIALIZERS}, live, ids)


def test_initial_rows_of_every_kind(pools: RankPools, tmp_path: Path) -> None:
    assert pools[2].run(initial_parity, tmp_path) == [20, 20]
    follower = checkpoint.follow(tmp_path)
    for arguments, message in (
        ({"unknown": "nothing"}, "unknown='nothing'"),
        ({"ids_N": torch.tensor([1], dtype=torch.int32)}, r"ids are torch.int32 \[1\]"),
        ({"ids_N": "1"}, "ids are a str that holds no array .* Pass a tensor, a numpy array or a list"),
        ({"table": "banks"}, "no table 'banks' is in"),
    ):
        with pytest.raises(ConfigError, match=message):
            follower.embeddings(**({"table": "bank", "ids_N": torch.tensor([1])} | arguments))
    ids = np.array([1, 9])
    ids.flags.writeable = False
    expected, _ = follower.embeddings("bank", torch.tensor([1, 9]))
    for kind in ([1, 9], (1, 9), ids, np.array([1, 0, 9, 0])[::2]):
        assert torch.equal(follower.embeddings("bank", kind)[0], expected)
    assert follower.embeddings("bank", [])[0].shape == (0, 5)


# ---- versions --------------------------------------------------------------------------------------------------------

Show = Callable[[int], None]


@pytest.fixture
def chain(pools: RankPools, tmp_path: Path) -> tuple[Path, Show]:
    """A snapshot with six deltas, and what shows so many of them."""
    pools[1].run(write_chain, EVICTING, tmp_path / "runs", first=30, every=3, max_rows=160)
    (snapshot,) = (tmp_path / "runs").glob("step_*")
    digests = [read_manifest(snapshot).digest]
    for number in range(1, 7):
        digests.append(read_delta(snapshot, number, digests[-1]).digest)

    deltas, hidden = snapshot / "deltas", tmp_path / "deltas that are not shown"

    def show(number: int) -> None:
        if (number == 0) != hidden.exists():
            source, target = (hidden, deltas) if number else (deltas, hidden)
            source.replace(target)
        if not number:
            return
        beside = deltas / "newer"
        beside.write_text(f"{number} {digests[number]}\n")
        beside.replace(deltas / "newest")

    return tmp_path / "runs", show


def state(tables: Any) -> list[bytes]:
    """All bits of all tables, through the public calls."""
    chunks = [tables.rows(name) for name in tables.table_names]
    return [a.contiguous().numpy().tobytes() for c in chunks for a in (c.ids_N, c.weights_ND, *c.states.values())]


def test_a_version_stays_as_it_is(chain: tuple[Path, Show]) -> None:
    path, show = chain
    expected = []
    for number in range(7):
        show(number)
        expected.append(state(checkpoint.follow(path)))
    show(0)
    follower, held = checkpoint.follow(path), []
    for number in range(7):
        show(number)
        follower.update()
        held.append(follower.now)
    assert [state(version) for version in held] == expected and len({tuple(e) for e in expected}) == 7
    del held[1:]  # one that is old is enough for all positions after it
    assert state(held[0]) == expected[0]


def test_positions_of_versions_that_nobody_has_are_used_again(chain: tuple[Path, Show]) -> None:
    path, show = chain
    show(0)
    follower = checkpoint.follow(path)
    for number in range(7):
        show(number)
        follower.update()
    follower._take(follower._snapshot_layer(follower.snapshot))  # everything back, and forth
    follower.update()
    for version in follower.now.versions.values():
        storage = version.storage
        storage.reclaim()
        assert storage._num_used < 1.6 * len(version.ids) < 2.5 * (storage._num_used - len(storage._free))


def test_readers_beside_an_update_see_one_version(chain: tuple[Path, Show]) -> None:
    """Four threads read while another one updates, thirty times over the chain, or as often as it takes to be seen."""
    path, show = chain
    names = checkpoint.follow(path).table_names
    ids = {name: checkpoint.follow(path).rows(name).ids_N for name in names}
    expected = {}
    for number in range(7):
        show(number)
        alone = checkpoint.follow(path)
        expected[number] = {name: alone.embeddings(name, ids[name])[0] for name in names}
    show(0)
    follower = checkpoint.follow(path)
    wrong: list[str] = []
    seen, num_readings = [0] * 7, 50
    is_over = threading.Event()

    def read() -> None:
        while not is_over.is_set() and not wrong:
            now = follower.now
            try:
                same = [torch.equal(now.embeddings(n, ids[n])[0], expected[now.number][n]) for n in names]
            except Exception as e:
                wrong.append(f"{type(e).__name__}: {e}")
                return
            if not all(same):
                wrong.append(f"{dict(zip(names, same, strict=True))} of version {now.number}")
                return
            seen[now.number] += 1

    readers = [threading.Thread(target=read) for _ in range(4)]
    for reader in readers:
        reader.start()
    for round_ in itertools.count():
        if wrong or (round_ >= 30 and sum(seen) > num_readings):
            break
        for number in range(1 if round_ == 0 else 0, 7):
            if number == 0:  # as if a newer snapshot were there
                follower._take(follower._snapshot_layer(follower.snapshot))
            show(number)
            follower.update()
    is_over.set()
    for reader in readers:
        reader.join()
    assert not wrong, wrong


def test_a_newer_snapshot_changes_what_differs(chain: tuple[Path, Show], tmp_path: Path) -> None:
    path, show = chain
    show(0)
    follower = checkpoint.follow(path)
    first = state(follower)
    show(6)
    follower.update()
    used = {key: version.storage._num_used for key, version in follower.now.versions.items()}
    (snapshot,) = path.glob("step_*")
    shutil.copytree(snapshot, path / "step_000000000099")  # the same rows as at first, without deltas
    shutil.rmtree(path / "step_000000000099" / "deltas")
    (path / "latest").write_text("step_000000000099\n")
    assert follower.update() and not follower.update()
    assert follower.number == 0 and state(follower) == first
    for key, version in follower.now.versions.items():
        assert version.storage._num_used - used[key] < len(version.ids)


LAYOUT = RowStateLayout(
    dim=32,
    states=(
        RowState(name="m", is_row_wise=False),
        RowState(name="v", is_row_wise=False),
        RowState(name="sum", is_row_wise=True),
    ),
)


def made(ids: np.ndarray, seed: int) -> list[RowChunk]:
    records = torch.from_numpy(np.random.default_rng(seed).random((len(ids), LAYOUT.record_floats), np.float32))
    return [
        RowChunk.of_records(i, torch.full_like(i, seed), r.clone(), LAYOUT)
        for i, r in zip(torch.from_numpy(ids).split(1000), records.split(1000), strict=True)
    ]


@pytest.mark.parametrize("kind", ["changed", "inserted and removed", "snapshot"])
def test_an_update_takes_memory_for_what_changed(kind: str) -> None:
    """1 % of 100,000 rows."""
    num_rows, num_bytes = 100_000, 100_000 * LAYOUT.record_floats * 4
    ids = np.arange(num_rows) * 3
    before, _ = FollowedRows.none(RowStorage(LAYOUT.record_floats)).after(made(ids, 1), LAYOUT, None)
    removed: np.ndarray | None = np.empty(0, np.int64)
    changed = made(ids[::100], 2)
    if kind == "inserted and removed":
        changed, removed = made(ids[::100] + 1, 2), ids[5::100]
    elif kind == "snapshot":
        changed, removed = made(ids, 1), None
        for chunk in changed:
            chunk.records(LAYOUT)[:10] += 1
    tracemalloc.start()
    after, left = before.after(iter(changed), LAYOUT, removed)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 0.2 * num_bytes, f"{peak / num_bytes:.1%}"  # a block for new rows is an eighth
    assert len(left) == 1000 and len(after.ids) == num_rows
    assert len(before.ids) == num_rows and before.chunk(slice(5), LAYOUT).scores_N.tolist() == [1] * 5
    assert (np.diff(after.ids) > 0).all()


def test_readers_of_one_table_name_in_two_collections_say_which(tmp_path: Path, pools: RankPools) -> None:
    """See `test_ter607...` of the cases for the rows; here the message."""
    pools[1].run(initial_parity, tmp_path)
    follower = checkpoint.follow(tmp_path)
    with pytest.raises(ConfigError, match=r"no table 'uniform' is in .*\('ebc', 'uniform'\)"):
        follower.rows("uniform", collection="other")


def test_a_snapshot_that_its_writer_lets_go_of_is_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is gone between two reads of a follower, as with ``keep=1``; the newer one is followed then."""
    for step in (1, 2):
        folder = tmp_path / f"step_{step}"
        ids, weights = rows_of(10 * step, 4)
        snapshot_of(folder, [table_in(folder, "t", ids, weights)])
    (tmp_path / "latest").write_text("step_1\n")
    original, gone = read_rows, []

    def read_and_let_go(folder: Path, *arguments: Any) -> Any:
        if folder.name == "step_1" and not gone:
            gone.append(folder)
            (tmp_path / "latest").write_text("step_2\n")
            remove_folder(folder)
        return original(folder, *arguments)

    monkeypatch.setattr(follower_module, "read_rows", read_and_let_go)
    follower = checkpoint.follow(tmp_path)
    assert gone and follower.snapshot.name == "step_2" and len(follower.rows("t").ids_N) == 20
    assert not follower.update()
