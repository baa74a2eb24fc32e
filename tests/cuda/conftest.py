"""A pool of one rank with a GPU. Its process starts with the first job, so a machine without one starts none."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.ranks import RankKind, RankPool


@pytest.fixture(scope="session")
def cuda_pool() -> Iterator[RankPool]:
    """One rank: gloo between hosts, NCCL between GPUs; deterministic mode."""
    pool = RankPool(1, RankKind(backend="cpu:gloo,cuda:nccl", prepare="tests.cuda.bodies:prepare"))
    yield pool
    pool.close()
