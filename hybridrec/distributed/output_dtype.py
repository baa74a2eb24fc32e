"""What type a sharded collection's output has, as TorchRec's ``fused_params`` say it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from hybridrec.errors import ConfigError

_DTYPES = {"FP32": torch.float32, "BF16": torch.bfloat16, "FP16": torch.float16}


def output_dtype_of(fused_params: Mapping[str, Any]) -> torch.dtype:
    """``output_dtype``, a member of FBGEMM's ``SparseType`` or TorchRec's ``DataType``; float32 if it is not given.

    Raises:
        ConfigError: It is another one.
    """
    if "output_dtype" not in fused_params:
        return torch.float32
    value = fused_params["output_dtype"]
    dtype = _DTYPES.get(getattr(value, "name", ""))
    if dtype is None:
        raise ConfigError(
            f"fused_params: output_dtype={value!r} is not available for hashed tables. Pass FP32, BF16 or FP16."
        )
    return dtype
