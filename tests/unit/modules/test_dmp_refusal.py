"""A hashed collection that `DistributedModelParallel` did not shard is refused: a real one, on a real gloo group."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from hybridrec.errors import ConfigError
from tests.ranks import RankFailure, RankPool
from tests.unit.modules.dmp_jobs import wrap_with_empty_plan, wrap_with_sharders_without_ours


@pytest.mark.parametrize(
    ("job", "num_embeddings", "has_dense"),
    [
        (wrap_with_sharders_without_ours, 1, False),
        (wrap_with_sharders_without_ours, 1, True),
        (wrap_with_sharders_without_ours, 10**12, False),
        (wrap_with_empty_plan, 1, False),
        (wrap_with_empty_plan, 10**12, False),
    ],
)
def test_refused(pool_1: RankPool, job: Callable[[int, bool], None], num_embeddings: int, has_dense: bool) -> None:
    with pytest.raises(RankFailure) as failure:
        pool_1.run(job, num_embeddings, has_dense)
    error = failure.value.errors[0]
    assert isinstance(error, ConfigError)
    assert "was not sharded: DistributedModelParallel got no sharder for 'HashEmbeddingBagCollection'" in str(error)
    assert "sharders=get_default_hybrid_sharders(host_env)" in str(error)
