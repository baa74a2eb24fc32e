"""Every symbol of TorchRec's train pipelines that hybridrec needs, imported and checked once."""

from __future__ import annotations

from hybridrec._compat.torchrec import _symbol

TrainPipelineSparseDist = _symbol(
    "torchrec.distributed.train_pipeline.train_pipelines",
    "TrainPipelineSparseDist",
    parameters=("model", "optimizer", "device", "execute_all_batches", "apply_jit"),
)
BaseForward = _symbol(
    "torchrec.distributed.train_pipeline.runtime_forwards",
    "BaseForward",
    parameters=("name", "args", "module", "context", "stream"),
)
rewrite_model = _symbol(
    "torchrec.distributed.train_pipeline.utils",
    "_rewrite_model",
    parameters=("model", "context", "dist_stream", "batch", "apply_jit", "pipelined_forward"),
)
ShardedModule = _symbol("torchrec.distributed.types", "ShardedModule")
