"""Resume: which models a checkpoint goes into, what is told of one that does not fit, and what goes on afterwards.

Defects of other systems, each with a test of the right behaviour here. Snapshots themselves: test_i_checkpoint.py.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad

from hybridrec import ConfigError, HybridRecError, checkpoint
from hybridrec.checkpoint import points
from hybridrec.checkpoint.files import read_rows
from hybridrec.checkpoint.manifest import FileEntry, read_manifest
from hybridrec.checkpoint.points import Layer
from tests.cases.checkpoints import EVICTING, load_rows, peak_growth
from tests.cases.small import Bags, kjt, sharded, table
from tests.checkpoint.runs import build, load_and_go_on, records_of, save_and_go_on
from tests.checkpoint.test_deltas import everyone, followed
from tests.checkpoint.test_save_load import everything
from tests.distributed.pipelines import all_batches, mine
from tests.distributed.scenario import TABLES, Scenario
from tests.ranks import RankPool, RankPools

ADAM = Scenario(optimizer="adam", steps=9, ids_per_table=40)


# ---- other caches and tiers ------------------------------------------------------------------------------------------


def refused_dims(scenario: Scenario, path: Path) -> str:
    dmp, pipeline = build(scenario)
    with pytest.raises(ConfigError) as caught:
        checkpoint.load(path, dmp, pipeline._optimizer, pipeline=pipeline)
    assert not any(records_of(dmp).values())
    return str(caught.value)


def test_ter176_ter600_another_cache_is_loaded_and_another_dim_refused(pools: RankPools, tmp_path: Path) -> None:
    saved = pools[2].run(save_and_go_on, ADAM, tmp_path, 5)
    for cache in ("all", "tenth", "one", "default"):
        again = pools[2].run(load_and_go_on, replace(ADAM, cache=cache), tmp_path)
        assert [one["final"] for one in again] == [one["final"] for one in saved]
        assert [one["losses"] for one in again] == [one["losses"][5:] for one in saved]
    first, *rest = TABLES
    (text, same) = pools[2].run(refused_dims, replace(ADAM, tables=(replace(first, dim=12), *rest)), tmp_path)
    assert text == same and re.search(r"table 'user': embedding_dim is 8 in the snapshot.* and 12 in the model", text)


@pytest.mark.parametrize(
    ("kernel", "device"),
    [
        ("fused", "cpu"),
        ("fused_uvm", "cpu"),
        ("fused_uvm_caching", "cpu"),
        ("fused", "npu"),
        ("fused_uvm", "npu"),
        ("fused_uvm_caching", "npu"),
    ],
)
def test_fb5816_rows_are_loaded_straight_into_host_memory(
    pools: RankPools, npu_pools: RankPools, tmp_path: Path, kernel: str, device: str
) -> None:
    """Wherever rows are to be used, they lie in the host's pageable store after the load; pinned memory is passed
    through when a batch asks for them (on a device)."""
    of_device = pools if device == "cpu" else npu_pools
    scenario = replace(ADAM, kernel=kernel, device=device)
    saved = of_device[2].run(save_and_go_on, scenario, tmp_path, 5)
    assert [one["resident"] for one in of_device[2].run(load_rows, scenario, tmp_path)] == [0, 0]
    for before, after in zip(saved, of_device[2].run(load_and_go_on, scenario, tmp_path), strict=True):
        assert before["records"] == after["records"] and before["final"] == after["final"]


def save_much(path: Path) -> tuple[float, float]:
    """(peak growth of this process while saving and while loading, both as a share of the bytes of the table)."""
    dmp = sharded([table("t", 128, ["f"], max_rows=None)], optimizer=torch.optim.Adam, lr=0.1)
    generator = torch.Generator().manual_seed(1)
    for first in range(0, 60_000, 20_000):
        ids = torch.arange(first, first + 20_000)
        checkpoint.import_rows(dmp, "t", ids, torch.randn((len(ids), 128), generator=generator))
    size = 60_000 * 3 * 128 * 4
    saving = peak_growth(lambda: checkpoint.save(path, dmp))
    again = sharded([table("t", 128, ["f"])], optimizer=torch.optim.Adam, lr=0.1)
    return saving / size, peak_growth(lambda: checkpoint.load(path, again)) / size


def test_tfra243_a_save_needs_little_memory_beside_the_table(pool_1: RankPool, tmp_path: Path) -> None:
    ((saving, loading),) = pool_1.run(save_much, tmp_path)
    assert saving < 0.2 and 0.9 < loading < 1.3, (saving, loading)


def shares_of_the_work(path: Path) -> tuple[int, int]:
    """(bytes that this rank verifies, rows that it reads) in a load."""
    dmp, pipeline = build(ADAM)
    seen, lock, verify = {"verify": 0, "read": 0}, threading.Lock(), Layer.verify

    def verifying(layer: Layer, file: FileEntry) -> None:
        with lock:  # files are verified side by side
            seen["verify"] += file.bytes
        verify(layer, file)

    def reading(folder: Path, table: Any, file: FileEntry, layout: Any) -> Any:
        seen["read"] += file.rows
        return read_rows(folder, table, file, layout)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Layer, "verify", verifying)
        patch.setattr(points, "read_rows", reading)
        checkpoint.load(path, dmp, pipeline._optimizer)
    return seen["verify"], seen["read"]


def test_re182_ranks_share_the_work_of_saving_and_loading(pools: RankPools, tmp_path: Path) -> None:
    """How fast that is, beside the disk itself: `python -m benchmarks.checkpoint`."""
    rows = everything(pools[3].run(save_and_go_on, ADAM, tmp_path, 6))
    folder = checkpoint.latest(tmp_path)
    assert folder is not None
    entries = read_manifest(folder).files()
    total, num_rows = sum(file.bytes for file in entries), sum(map(len, rows.values()))
    for rank in range(3):
        written = sum(file.rows for file in entries if file.rank == rank)
        assert num_rows / 5 < written < num_rows / 2
    shares = pools[3].run(shares_of_the_work, tmp_path)
    assert sum(verified for verified, _ in shares) == total and max(v for v, _ in shares) < total / 2
    assert sum(read for _, read in shares) == num_rows and max(read for _, read in shares) < num_rows / 2


# ---- what does not fit is told by name -------------------------------------------------------------------------------


def told(call: Callable[[], Any]) -> str:
    """What is raised, or returned: `DistributedModelParallel.load_state_dict` returns what was missing or too much."""
    try:
        return str(call())
    except (HybridRecError, RuntimeError, KeyError) as e:
        return str(e)


def missing_and_unexpected(path: Path) -> dict[str, str]:
    """Key of a state_dict, taken out or put in, or name of a parameter of a snapshot's model -> what is said."""
    dmp, pipeline = build(ADAM)
    pipeline.progress(iter(mine(ADAM, all_batches(ADAM))))
    pipeline.reset()
    state, before = dict(dmp.state_dict()), records_of(dmp)
    said = {}
    for key in state:
        said[f"- {key}"] = told(lambda key=key: dmp.load_state_dict({k: v for k, v in state.items() if k != key}))
    for key in ("ebc.rows.user.rank_7_of_9.ids", "ebc.rows.nobody.rank_0_of_1.ids", "dense.bias2"):
        said[f"+ {key}"] = told(lambda key=key: dmp.load_state_dict(state | {key: torch.zeros(1)}))
    assert records_of(dmp) == before
    checkpoint.save(path, dmp)
    dmp.module.dense.register_parameter("new", torch.nn.Parameter(torch.zeros(2)))
    said["- new"] = told(lambda: checkpoint.load(path, dmp))
    checkpoint.save(path, dmp)
    del dmp.module.dense.new
    said["+ new"] = told(lambda: checkpoint.load(path, dmp))
    assert records_of(dmp) == before
    return said


@pytest.mark.parametrize("world_size", [1, 2])
def test_pytorch148252_pytorch192224_pytorch79016_missing_and_unexpected_keys_are_named(
    pools: RankPools, tmp_path: Path, world_size: int
) -> None:
    for said in pools[world_size].run(missing_and_unexpected, tmp_path):
        for key, text in said.items():
            name = re.sub(r"^(ebc|dense(\.\d)?)\.", "", key.split()[1])  # TorchRec leaves the path of the module away
            if "progress" in name:
                name = "has rows of the ranks"
            elif re.fullmatch(r"- .*rows\.\w+\..*\.ids", key):  # without its ids a table is not there
                name = f"table {name.split('.')[1]!r}: its columns"
            assert name in text, said


# ---- optimizers and scores -------------------------------------------------------------------------------------------


NEVER: Bags = {"f": [[1, 2], [2, 3]], "never": [[], []], "g": [[5], [-1, 2**63 - 1]]}


def tables_of_three_policies() -> list[Any]:
    return [
        table("grows", 3, ["f"]),
        table("evicts", 8, ["never"], max_rows=150, full_policy="evict"),
        table("errs", 5, ["g"], max_rows=400, full_policy="error"),
    ]


def save_load_and_train(path: Path, optimizer: type[torch.optim.Optimizer], lr: float) -> tuple[Any, Any, list[Any]]:
    """With a table that was never looked up: (rows that were saved, rows that were loaded, states of each table)."""
    dmp, again = (sharded(tables_of_three_policies(), optimizer=optimizer, lr=lr) for _ in range(2))
    for _ in range(3):
        dmp(kjt(NEVER)).sum().backward()
    again(kjt(NEVER | {"never": [[9], [8]]})).sum().backward()  # rows that must not be there afterwards
    folder = checkpoint.save(path, dmp)
    before = records_of(dmp)
    checkpoint.load(path, again)
    after = records_of(again)
    for model in (dmp, again):
        model(kjt(NEVER | {"never": [[1, 4], []]})).sum().backward()
    assert records_of(dmp) == records_of(again)
    return before, after, [t.states for t in read_manifest(folder).collections[0].tables]


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize(
    ("optimizer", "lr", "states"),
    [
        (torch.optim.SGD, 0.1, ()),
        (torch.optim.Adagrad, 0.1, (("sum", False),)),
        (RowWiseAdagrad, 0.1, (("sum", True),)),
        (torch.optim.Adam, 0.01, (("exp_avg", False), ("exp_avg_sq", False))),
        (torch.optim.AdamW, 0.01, (("exp_avg", False), ("exp_avg_sq", False))),
    ],
)
def test_re305_fb4512_fb5525_fb5965_tr3267_every_state_and_a_table_that_was_never_looked_up(
    pools: RankPools, tmp_path: Path, optimizer: Any, lr: float, states: Any, world_size: int
) -> None:
    for before, after, found in pools[world_size].run(save_load_and_train, tmp_path, optimizer, lr):
        assert before == after and before["evicts"] == {} and before["grows"]
        assert found == [states] * 3


def three_policies(path: Path) -> tuple[Any, Any, int]:
    """Tables of three policies and dims, saved while one of them evicts: (final rows, as if never saved, evicted)."""
    found = []
    for is_saved in (False, True):
        dmp = sharded(tables_of_three_policies(), optimizer=torch.optim.Adagrad, lr=0.1)
        for step in range(40):
            first = 7 * step
            bags = {"f": [[first % 90, 3]], "never": [list(range(first, first + 9))], "g": [[first % 50], [1]]}
            bags = {name: (bag * 2)[:2] for name, bag in bags.items()}
            dmp(kjt(bags)).square().sum().backward()
            if is_saved and step == 30:
                checkpoint.save(path, dmp)
                before, dmp = (
                    records_of(dmp),
                    sharded(tables_of_three_policies(), optimizer=torch.optim.Adagrad, lr=0.1),
                )
                checkpoint.load(path, dmp)
                assert records_of(dmp) == before
        found.append(records_of(dmp))
    return found[0], found[1], sum(s.evicted for s in dmp.module.ebc.stats())


@pytest.mark.parametrize("world_size", [1, 2])
def test_fb4701_fb4769_fb5148_fb4952_fb4374_fb4563_scores_stay_with_their_table_and_row(
    pools: RankPools, tmp_path: Path, world_size: int
) -> None:
    for never_saved, saved, evicted in pools[world_size].run(three_policies, tmp_path):
        assert never_saved == saved and evicted > 0
        assert len({score for _, score in saved["evicts"].values()}) > 3


# ---- what goes on ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("world_size", [1, 3])
def test_re272_re258_future_evictions_are_those_of_a_run_that_was_not_interrupted(
    pools: RankPools, tmp_path: Path, world_size: int
) -> None:
    max_rows, arguments = 80 * max(2, world_size), (save_and_go_on, EVICTING, tmp_path, 36)
    saved = pools[world_size].run(*arguments, max_rows=max_rows)
    other = replace(EVICTING, cache="all")
    again = pools[world_size].run(load_and_go_on, other, tmp_path, max_rows=max_rows, depth=4)
    assert sum(one["evicted"] for one in saved) > 0
    for before, after in zip(saved, again, strict=True):
        assert before["records"] == after["records"] and before["final"] == after["final"]
        assert before["losses"][36:] == after["losses"]
    assert any(set(one["records"]["item"]) - set(one["final"]["item"]) for one in saved)


def counted(path: Path) -> list[tuple[int, int, int]]:
    """(batches, Adam's step, ordinal) after each of three starts, each of which resumes and trains two batches."""
    found = []
    for _ in range(3):
        dmp, pipeline = build(ADAM)
        with checkpoint.Checkpointer(path, dmp, pipeline._optimizer, pipeline, every=2) as checkpointer:
            first = checkpointer.resume()
            batches = iter(mine(ADAM, all_batches(ADAM)[first : first + 2]))
            for _ in range(2):
                pipeline.progress(batches)
                checkpointer.after_batch()
        log = dmp.module.ebc.lookup.log
        found.append((pipeline.batches_committed, log.committed, log.group.ordinal))
    return [*found, *(tuple(map(int, (p.name[-3:], 0, 0))) for p in sorted(path.glob("step_*")))]


def test_ter606_step_counters_go_on_after_each_resume(pool_2: RankPool, tmp_path: Path) -> None:
    names = [(2, 0, 0), (4, 0, 0), (6, 0, 0)]
    assert pool_2.run(counted, tmp_path) == [[(2, 2, 2), (4, 4, 4), (6, 6, 6), *names]] * 2


def base_and_increments(path: Path) -> tuple[int, int]:
    """An empty snapshot is one; then a base and three increments are the live table, also if one changes nothing."""
    dmp, pipeline = build(ADAM)
    writer = checkpoint.DeltaWriter(path, dmp, pipeline._optimizer, pipeline=pipeline)
    writer.save_full()
    follower = checkpoint.follow(path)
    assert not any(followed(follower).values())
    other, other_pipeline = build(ADAM)
    other_pipeline.progress(iter(mine(ADAM, all_batches(ADAM))))
    checkpoint.load(path, other, other_pipeline._optimizer, pipeline=other_pipeline)
    assert not any(records_of(other).values())
    batches = iter(mine(ADAM, all_batches(ADAM)))
    for num_batches in (2, 1, 0):
        for _ in range(num_batches):
            pipeline.progress(batches)
        writer.save_delta()
    dist.barrier()
    follower.update()
    live = everyone(dmp)
    assert followed(follower) == followed(checkpoint.follow(path)) == live
    return follower.number, sum(map(len, live.values()))


@pytest.mark.parametrize("world_size", [1, 2])
def test_dr999_dr983_dr455_dr741_a_base_and_three_increments_are_the_live_table(
    pools: RankPools, tmp_path: Path, world_size: int
) -> None:
    for number, num_rows in pools[world_size].run(base_and_increments, tmp_path):
        assert number == 3 and num_rows > 20
