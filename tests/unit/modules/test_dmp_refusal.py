"""A hashed collection that `DistributedModelParallel` did not shard is refused: a real one, on a real gloo group."""

from __future__ import annotations

import pytest

from tests.ranks import RankPool
from tests.unit.modules import dmp_jobs


@pytest.mark.parametrize(
    ("how", "num_embeddings", "has_dense"),
    [
        ("sharders without ours", 1, False),
        ("sharders without ours", 1, True),
        ("sharders without ours", 10**12, False),
        ("empty plan", 1, False),
        ("empty plan", 10**12, False),
    ],
)
def test_refused(pool_1: RankPool, how: str, num_embeddings: int, has_dense: bool) -> None:
    (message,) = pool_1.run(dmp_jobs.refusal, num_embeddings, has_dense, how)
    if how == "empty plan":
        assert "was not sharded: DistributedModelParallel got no sharder for 'HashEmbeddingBagCollection'" in message
    else:  # the planner is asked first
        assert message.startswith("no sharder for 'HashEmbeddingBagCollection' (hashed) is among those")
    assert "sharders=get_default_hybrid_sharders(host_env)" in message
