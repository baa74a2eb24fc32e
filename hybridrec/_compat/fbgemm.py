"""Every symbol of FBGEMM that hybridrec needs, imported and checked once.

FBGEMM promises no stable Python interface. One whose internals moved fails here, at import, with the symbol's name.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import inspect
from typing import Any

from hybridrec.errors import BackendError

_TESTED = "1.8.0"
_DISTRIBUTIONS = ("fbgemm-gpu-cpu", "fbgemm-gpu")


def _version() -> str:
    for name in _DISTRIBUTIONS:
        try:
            return f"{name} {importlib.metadata.version(name)}"
        except importlib.metadata.PackageNotFoundError:
            continue
    return "FBGEMM (not installed)"


def _fail(symbol: str, detail: str) -> BackendError:
    return BackendError(
        f"{_version()}: {symbol} {detail}. hybridrec was tested with FBGEMM {_TESTED}; install that version."
    )


def _symbol(module: str, name: str) -> Any:
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, OSError) as e:
        raise _fail(f"{module}.{name}", f"cannot be imported ({e})") from e


def _require_parameters(symbol: str, function: Any, parameters: tuple[str, ...]) -> None:
    known = inspect.signature(function).parameters
    missing = [p for p in parameters if p not in known]
    if missing:
        raise _fail(symbol, f"has no parameter {', '.join(map(repr, missing))}")


def _require_attributes(symbol: str, value: Any, names: tuple[str, ...]) -> None:
    missing = [n for n in names if not hasattr(value, n)]
    if missing:
        raise _fail(symbol, f"has no {', '.join(map(repr, missing))}")


_TRAINING = "fbgemm_gpu.split_table_batched_embeddings_ops_training"
_COMMON = "fbgemm_gpu.split_table_batched_embeddings_ops_common"

SplitTableBatchedEmbeddingBagsCodegen = _symbol(_TRAINING, "SplitTableBatchedEmbeddingBagsCodegen")
ComputeDevice = _symbol(_TRAINING, "ComputeDevice")
EmbeddingLocation = _symbol(_COMMON, "EmbeddingLocation")
BoundsCheckMode = _symbol(_COMMON, "BoundsCheckMode")
PoolingMode = _symbol(_COMMON, "PoolingMode")
EmbOptimType = _symbol("fbgemm_gpu.split_embedding_configs", "EmbOptimType")

_require_parameters(
    "SplitTableBatchedEmbeddingBagsCodegen()",
    SplitTableBatchedEmbeddingBagsCodegen.__init__,
    (
        "embedding_specs",
        "feature_table_map",
        "optimizer",
        "learning_rate",
        "eps",
        "pooling_mode",
        "device",
        "bounds_check_mode",
    ),
)
_require_parameters(
    "SplitTableBatchedEmbeddingBagsCodegen.forward()",
    SplitTableBatchedEmbeddingBagsCodegen.forward,
    ("indices", "offsets", "per_sample_weights"),
)
_require_attributes(
    "SplitTableBatchedEmbeddingBagsCodegen",
    SplitTableBatchedEmbeddingBagsCodegen,
    ("split_embedding_weights", "split_optimizer_states", "set_learning_rate", "set_optimizer_step"),
)
_require_attributes("BoundsCheckMode", BoundsCheckMode, ("NONE",))
_require_attributes("PoolingMode", PoolingMode, ("SUM",))
_require_attributes("EmbOptimType", EmbOptimType, ("EXACT_SGD", "EXACT_ADAGRAD", "EXACT_ROWWISE_ADAGRAD"))


def table_placement(location: str, compute_device: str) -> tuple[Any, Any]:
    """FBGEMM's (location, compute device) of the same names. Raises BackendError: it has none of that name."""
    _require_attributes("EmbeddingLocation", EmbeddingLocation, (location,))
    _require_attributes("ComputeDevice", ComputeDevice, (compute_device,))
    return getattr(EmbeddingLocation, location), getattr(ComputeDevice, compute_device)


HAS_PREALLOCATED_HOST_BUFFERS = (
    "preallocated_host_buffers" in inspect.signature(SplitTableBatchedEmbeddingBagsCodegen.__init__).parameters
)
"""Whether slots can be put into memory of ours (FBGEMM 1.8), else FBGEMM allocates and writes them at once."""
