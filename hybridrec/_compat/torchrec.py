"""Every symbol of TorchRec that hybridrec needs and that TorchRec does not promise, imported and checked once.

A TorchRec whose internals moved fails here, at import, with the symbol's name.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import inspect
from typing import Any

from hybridrec.errors import BackendError

_TESTED = ("1.5.0", "1.8.0")


def _fail(symbol: str, detail: str) -> BackendError:
    try:
        version = importlib.metadata.version("torchrec")
    except importlib.metadata.PackageNotFoundError:
        version = "none"
    return BackendError(
        f"TorchRec {version}: {symbol} {detail}. hybridrec was tested with {' and '.join(_TESTED)}: "
        "install one of them."
    )


def _symbol(module: str, name: str, *, parameters: tuple[str, ...] = ()) -> Any:
    """Import one symbol and check that its signature has the parameters that hybridrec passes."""
    try:
        value = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as e:
        raise _fail(f"{module}.{name}", f"cannot be imported ({e})") from e
    if parameters:
        known = inspect.signature(value).parameters
        missing = [p for p in parameters if p not in known]
        if missing:
            raise _fail(f"{module}.{name}", f"has no parameter {', '.join(map(repr, missing))}")
    return value


BaseEmbeddingSharder = _symbol(
    "torchrec.distributed.embedding_types",
    "BaseEmbeddingSharder",
    parameters=("fused_params", "qcomm_codecs_registry"),
)
ShardedEmbeddingModule = _symbol("torchrec.distributed.embedding_types", "ShardedEmbeddingModule")
KJTList = _symbol("torchrec.distributed.embedding_types", "KJTList")
EmbeddingComputeKernel = _symbol("torchrec.distributed.embedding_types", "EmbeddingComputeKernel")
EmbeddingShardingContext = _symbol("torchrec.distributed.embedding_sharding", "EmbeddingShardingContext")
KJTListSplitsAwaitable = _symbol("torchrec.distributed.embedding_sharding", "KJTListSplitsAwaitable")
KJTAllToAll = _symbol("torchrec.distributed.dist_data", "KJTAllToAll", parameters=("pg", "splits"))
bucketize_kjt_before_all2all = _symbol(
    "torchrec.distributed.embedding_sharding",
    "bucketize_kjt_before_all2all",
    parameters=("kjt", "num_buckets", "block_sizes", "output_permute", "keep_original_indices"),
)
RwPooledEmbeddingDist = _symbol("torchrec.distributed.sharding.rw_sharding", "RwPooledEmbeddingDist")
RwPooledEmbeddingSharding = _symbol("torchrec.distributed.sharding.rw_sharding", "RwPooledEmbeddingSharding")
LazyGetItemMixin = _symbol("torchrec.distributed.embeddingbag", "LazyGetItemMixin")
ShardedEmbeddingBagCollection = _symbol("torchrec.distributed.embeddingbag", "ShardedEmbeddingBagCollection")
EmbeddingBagCollectionSharder = _symbol("torchrec.distributed.embeddingbag", "EmbeddingBagCollectionSharder")
get_gradient_division = _symbol("torchrec.distributed.comm_ops", "get_gradient_division")
EmptyFusedOptimizer = _symbol("torchrec.optim.fused", "EmptyFusedOptimizer")
FusedOptimizer = _symbol("torchrec.optim.fused", "FusedOptimizer")
FusedOptimizerModule = _symbol("torchrec.optim.fused", "FusedOptimizerModule")


def torch_optimizer(optimizer: Any) -> Any:
    """What wrappers of TorchRec have inside, which does the step; the optimizer itself without them."""
    while (inside := getattr(optimizer, "_optimizer", None)) is not None:
        optimizer = inside
    return optimizer
