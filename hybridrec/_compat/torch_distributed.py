"""Names of torch.distributed that changed between the versions that hybridrec runs on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.distributed as dist

# torch 2.13 renamed it and warns of the old name; 2.10 has the old name alone.
all_gather_single: Callable[..., Any] = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_single: Callable[..., Any] = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
