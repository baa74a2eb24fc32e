"""Embedding tables keyed by raw 64-bit ids, larger than device memory, trained through TorchRec.

The names below are the public interface. They are resolved when first used (PEP 562), so that ``import hybridrec``
loads neither torch nor torchrec.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hybridrec.config import HashEmbeddingBagConfig, HashEmbeddingConfig
    from hybridrec.distributed.accumulation import accumulate_gradients
    from hybridrec.distributed.hybrid_train_pipeline import HybridTrainPipelineSparseDist
    from hybridrec.distributed.planner_report import describe_plan
    from hybridrec.distributed.sharding_plan import (
        HybridEmbeddingBagCollectionSharder,
        HybridHashEmbeddingBagCollectionSharder,
        HybridHashEmbeddingCollectionSharder,
        get_default_hybrid_sharders,
        register_default_sharders,
        unregister_default_sharders,
    )
    from hybridrec.errors import BackendError, CapacityError, ConfigError, HybridRecError, IdError, StateError
    from hybridrec.metrics import PipelineStats, TableStats
    from hybridrec.modules.hash_embedding import HashEmbeddingCollection
    from hybridrec.modules.hash_embedding_bag import HashEmbeddingBagCollection
    from hybridrec.store.initializer import Constant, Normal, Uniform

    __version__: str

__all__ = [
    "BackendError",
    "CapacityError",
    "ConfigError",
    "Constant",
    "HashEmbeddingBagCollection",
    "HashEmbeddingBagConfig",
    "HashEmbeddingCollection",
    "HashEmbeddingConfig",
    "HybridEmbeddingBagCollectionSharder",
    "HybridHashEmbeddingBagCollectionSharder",
    "HybridHashEmbeddingCollectionSharder",
    "HybridRecError",
    "HybridTrainPipelineSparseDist",
    "IdError",
    "Normal",
    "PipelineStats",
    "StateError",
    "TableStats",
    "Uniform",
    "__version__",
    "accumulate_gradients",
    "describe_plan",
    "get_default_hybrid_sharders",
    "register_default_sharders",
    "unregister_default_sharders",
]

_NAMES_BY_MODULE = {
    "hybridrec.config": ("HashEmbeddingBagConfig", "HashEmbeddingConfig"),
    "hybridrec.distributed.accumulation": ("accumulate_gradients",),
    "hybridrec.distributed.planner_report": ("describe_plan",),
    "hybridrec.distributed.hybrid_train_pipeline": ("HybridTrainPipelineSparseDist",),
    "hybridrec.distributed.sharding_plan": (
        "HybridEmbeddingBagCollectionSharder",
        "HybridHashEmbeddingBagCollectionSharder",
        "HybridHashEmbeddingCollectionSharder",
        "get_default_hybrid_sharders",
        "register_default_sharders",
        "unregister_default_sharders",
    ),
    "hybridrec.errors": ("BackendError", "CapacityError", "ConfigError", "HybridRecError", "IdError", "StateError"),
    "hybridrec.metrics": ("PipelineStats", "TableStats"),
    "hybridrec.modules.hash_embedding": ("HashEmbeddingCollection",),
    "hybridrec.modules.hash_embedding_bag": ("HashEmbeddingBagCollection",),
    "hybridrec.store.initializer": ("Constant", "Normal", "Uniform"),
}
_MODULE_OF_NAME = {name: module for module, names in _NAMES_BY_MODULE.items() for name in names}


def __getattr__(name: str) -> Any:
    """Resolve a public name and keep it, so that the next use costs nothing."""
    value: Any
    if name == "__version__":
        from importlib.metadata import version

        value = version("hybridrec")
    elif name in _MODULE_OF_NAME:
        value = getattr(importlib.import_module(_MODULE_OF_NAME[name]), name)
    else:
        raise AttributeError(f"module 'hybridrec' has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    """What completion shows: the public names, resolved or not."""
    return sorted(__all__)
