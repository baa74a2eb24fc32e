"""A length that is damaged between two ranks: all refuse in the same step, and name the sender."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from hybridrec import BackendError
from hybridrec._compat.exchange import Received
from hybridrec.distributed.exchange_check import problem_of
from tests.distributed.test_pipeline_life import Run
from tests.ranks import RankPools


def received(lengths: list[int], num_lengths: list[int], num_ids: list[int]) -> Received:
    return Received(lengths=torch.tensor(lengths, dtype=torch.int64), num_lengths=num_lengths, num_ids=num_ids)


@pytest.mark.parametrize(
    ("lengths", "num_lengths", "num_ids", "problem"),
    [
        ([1, 2, 0, 4], [2, 2], [3, 4], ""),
        ([], [0, 0], [0, 0], ""),
        ([5], [0, 1], [0, 5], ""),
        ([1, 2, 0, 4], [2, 2], [3, 5], "rank 1 5 ids and lengths that add up to 4"),
        ([1, 2, 3, 0, 4], [3, 0, 2], [5, 0, 4], "rank 0 5 ids and lengths that add up to 6"),
        ([2, 1, 7, -3], [2, 2], [3, 4], "rank 1 a length of -3"),
        ([-1, 4, 1, 3], [2, 2], [3, 4], "rank 0 a length of -1"),
        ([1 << 62, 1], [1, 1], [2, 1], "rank 0 2 ids and lengths that add up to 4,611,686,018,427,387,904"),
    ],
)
def test_what_does_not_fit(lengths: list[int], num_lengths: list[int], num_ids: list[int], problem: str) -> None:
    assert problem_of(received(lengths, num_lengths, num_ids)) == problem


class _Late:
    """The work of an exchange whose output is damaged when it is over."""

    def __init__(self, work: Any, damage: Callable[[], None]) -> None:
        self._work, self._damage = work, damage

    def wait(self) -> None:
        self._work.wait()
        damage, self._damage = self._damage, lambda: None
        damage()


def damaged(depth: int, at: int, by: int) -> None:
    """The last rank's ``at``-th exchange of lengths arrives with a first length from rank 1 that is off."""
    run, rank, world_size = Run(depth), dist.get_rank(), dist.get_world_size()
    real, seen = dist.all_to_all_single, 0
    group = run.dmp.module.ebc.host_group

    def exchange(*args: Any, **kwargs: Any) -> Any:
        nonlocal seen
        work = real(*args, **kwargs)
        if kwargs["group"] is group and kwargs.get("output_split_sizes") is not None:
            seen += 1  # lengths and ids of every batch
            if seen == 2 * at + 1 and rank == world_size - 1:
                first = kwargs["output_split_sizes"][0]
                return _Late(work, lambda: kwargs["output"][first].add_(by))
        return work

    iterator = run.loader(0, 10)
    with mock.patch.object(dist, "all_to_all_single", exchange):
        run.train(iterator, range(at))
        with pytest.raises(BackendError, match=rf"rank {world_size - 1} of {world_size} received from rank 1 "):
            run.pipeline.progress(iterator)
        run.train(iterator, range(at + 1, 10))
        run.ends(iterator)
    run.check()


@pytest.mark.parametrize(("world_size", "depth", "by"), [(2, 1, 1), (2, 3, 10**12), (3, 2, -5)])
def test_a_damaged_length_is_refused_in_its_step(pools: RankPools, world_size: int, depth: int, by: int) -> None:
    pools[world_size].run(damaged, depth, 4, by)
