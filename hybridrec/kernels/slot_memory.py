"""Zeroed memory for slots."""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from hybridrec.backend import HOST

_ALIGNMENT_BYTES = 64


def zeros(shape: tuple[int, ...], device: torch.device) -> Tensor:
    """float32 zeros. In host memory pages are taken only when they are first written, and start on a cache line.

    ``torch.zeros`` writes every page at once; numpy asks the system for pages that are zero already.
    """
    if device.type != HOST.type:
        return torch.zeros(shape, dtype=torch.float32, device=device)
    size = math.prod(shape)
    raw = np.zeros(size + _ALIGNMENT_BYTES // 4, dtype=np.float32)
    skip = -raw.ctypes.data % _ALIGNMENT_BYTES // 4
    return torch.from_numpy(raw[skip : skip + size].reshape(shape))
