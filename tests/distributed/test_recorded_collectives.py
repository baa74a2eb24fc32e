"""Collectives are issued in the same order on all ranks; where they are not, the first difference is named."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
import torch.distributed as dist

from hybridrec import ConfigError, StateError
from hybridrec.debug import CollectiveLog, recorded_collectives
from hybridrec.debug.collectives import _device_of
from hybridrec.distributed.watchdog import watch_of
from tests.distributed.pipelines import delays
from tests.distributed.test_uneven_ranks import Uneven
from tests.ranks import RankPool, RankPools


def in_order(depth: int, uneven_ranks: str) -> tuple[int, set[str]]:
    original = dist.ProcessGroup.allreduce
    with recorded_collectives() as log, delays(3):
        run = Uneven(list(range(5, 5 + dist.get_world_size())), depth, uneven_ranks)
        iterator = iter(run.mine[: run.count])
        for step in range(3):
            run.pipeline.progress(iterator)
            log.check()
            if step == 1:  # an ordinary call, around which what was prepared is taken back
                run.dmp(run.mine[9])[0].backward()
        with pytest.raises(StopIteration):
            while True:
                run.pipeline.progress(iterator)
        run.pipeline._thread.settle()
        common = log.check()
        on_host = log.collectives(run.dmp.module.ebc.host_group)
    assert dist.ProcessGroup.allreduce is original
    return common, {c.place.split(" ")[0] for c in on_host} | {c.operation for c in on_host}


@pytest.mark.parametrize("uneven_ranks", ["stop", "drain"])
@pytest.mark.parametrize(("world_size", "depth"), [(2, 1), (2, 3), (3, 1), (3, 3)])
def test_ranks_issue_the_same_collectives(pools: RankPools, world_size: int, depth: int, uneven_ranks: str) -> None:
    answers = pools[world_size].run(in_order, depth, uneven_ranks)
    assert len({common for common, _ in answers}) == 1 and answers[0][0] > 30
    for _, seen in answers:
        assert {"DIST", "MAP", "FORWARD", "alltoall", "allgather"} <= seen


def two_swapped() -> str:
    group = dist.new_group(backend="gloo")
    watch = watch_of(group)
    assert watch is not None
    is_last = dist.get_rank() == dist.get_world_size() - 1
    with recorded_collectives() as log:
        for batch in (0, 1, 3, 2, 4) if is_last else range(5):
            with watch.stage("map", batch):
                dist.all_reduce(torch.ones(3), group=group)
        with pytest.raises(StateError) as raised:
            log.check()
        log_of_other_sizes(group)
    return str(raised.value)


def log_of_other_sizes(group: dist.ProcessGroup) -> None:
    """What a rank sends in an all-to-all is its own affair; that the operation is another one is not."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    with recorded_collectives() as log:
        sizes = [1] * world_size
        sizes[0] += rank
        mine = torch.ones(sum(sizes))
        received = [1 + (r if rank == 0 else 0) for r in range(world_size)]
        dist.all_to_all_single(torch.empty(sum(received)), mine, received, sizes, group=group)
        assert log.check() == 1


@pytest.mark.parametrize("world_size", [2, 3])
def test_two_swapped_collectives_are_named(pools: RankPools, world_size: int) -> None:
    texts = pools[world_size].run(two_swapped)
    assert len(set(texts)) == 1
    assert "differ in collective 2 of process group" in texts[0]
    assert "rank 0: allreduce in MAP of batch 2 of sizes [3]" in texts[0]
    assert f"rank {world_size - 1}: allreduce in MAP of batch 3 of sizes [3]" in texts[0]


def left_out_of_order() -> list[int]:
    """What two logs hold after blocks that overlap; then the class is as before."""
    original = vars(dist.ProcessGroup)["allreduce"]
    group = dist.new_group(backend="gloo")
    first, second = recorded_collectives(), recorded_collectives()
    logs = [first.__enter__()]
    dist.all_reduce(torch.ones(1), group=group)
    logs.append(second.__enter__())
    dist.all_reduce(torch.ones(1), group=group)
    first.__exit__(None, None, None)
    dist.all_reduce(torch.ones(1), group=group)
    second.__exit__(None, None, None)
    assert vars(dist.ProcessGroup)["allreduce"] is original
    dist.all_reduce(torch.ones(1), group=group)
    return [len(log.collectives(group)) for log in logs]


def test_recordings_may_overlap(pool_2: RankPool) -> None:
    assert pool_2.run(left_out_of_order) == [[2, 2]] * 2


def test_a_check_without_a_process_group_is_refused() -> None:
    with mock.patch.object(dist, "is_initialized", return_value=False):
        with pytest.raises(ConfigError, match="no default process group"):
            CollectiveLog().check()


@pytest.mark.parametrize(("backend", "device"), [("gloo", "cpu"), ("nccl", "cuda"), ("undefined", "cpu")])
def test_logs_travel_where_the_backend_takes_tensors(backend: str, device: str) -> None:
    assert _device_of(backend) == torch.device(device)
