"""What a pipeline accepts as arguments, and what it says when it does not."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from hybridrec.backend import parse_device
from hybridrec.errors import ConfigError

MIN_DEAD_SECONDS = 10.0
"""Five heartbeats; see `watchdog`."""
MAX_DEPTH = 12
"""As deep as store evictions are decided alike; see docs/design/transaction.md, "Order"."""


def check_arguments(
    model: Any, optimizer: Any, device: Any, *, apply_jit: bool, depth: Any, dead_rank_seconds: Any
) -> torch.device:
    """The device, parsed.

    Raises:
        ConfigError: An argument cannot be honoured.
    """
    if not isinstance(model, nn.Module):
        raise ConfigError(f"model has type {type(model).__name__}. Pass the sharded nn.Module.")
    parsed = parse_device(device)
    if parsed is None:
        raise ConfigError("device=None. Pass the device of the model, for example torch.device('cpu').")
    if apply_jit:
        raise ConfigError("apply_jit=True: torch.jit.script of the dense part is not available. Pass False.")
    if isinstance(depth, bool) or not isinstance(depth, int) or not 1 <= depth <= MAX_DEPTH:
        raise ConfigError(
            f"pipe_n_batch={depth!r}: it is how many batches are taken and not yet released, the computing "
            f"one included. Accepted: an int from 1 (no prefetch) to {MAX_DEPTH}."
        )
    for call in ("zero_grad", "step"):
        if not callable(getattr(optimizer, call, None)):
            raise ConfigError(f"optimizer has type {type(optimizer).__name__}, without {call}(). Pass an optimizer.")
    if dead_rank_seconds is not None and not _is_patience(dead_rank_seconds):
        raise ConfigError(
            f"dead_rank_seconds={dead_rank_seconds!r}. Pass a number of seconds from {MIN_DEAD_SECONDS:g} on, "
            "below which a rank that is only busy would count as dead, or None."
        )
    return parsed


def _is_patience(seconds: Any) -> bool:
    """Whether a value can be ``dead_rank_seconds``."""
    return isinstance(seconds, (int, float)) and not isinstance(seconds, bool) and seconds >= MIN_DEAD_SECONDS
