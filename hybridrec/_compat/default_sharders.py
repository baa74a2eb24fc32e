"""TorchRec's default sharders, and what takes their place once a script asked for that.

TorchRec has no registry: `DistributedModelParallel`, `shard`, `shard_modules` and the planners call a function of fixed
answer, each under a name of its own.
"""

from __future__ import annotations

import functools
import importlib
import sys
from collections.abc import Sequence
from typing import Any

from hybridrec._compat.torchrec import _symbol

_DEFINED_IN = "torchrec.distributed.sharding_plan"
_NAME = "get_default_sharders"
torchrec_default_sharders = _symbol(_DEFINED_IN, _NAME)
"""TorchRec's own answer, whatever is registered."""
_registered: Sequence[Any] | None = None


@functools.wraps(torchrec_default_sharders)
def _default_sharders() -> list[Any]:
    return torchrec_default_sharders() if _registered is None else list(_registered)


def set_default_sharders(sharders: Sequence[Any] | None) -> None:
    """What TorchRec takes where it is given no sharders; None: its own again."""
    global _registered
    _registered = sharders
    # All that hold the function by import; who imports it later gets it from where it is defined.
    importlib.import_module("torchrec.distributed.model_parallel")
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] == "torchrec" and getattr(module, _NAME, None) is torchrec_default_sharders:
            setattr(module, _NAME, _default_sharders)


def default_sharders() -> list[Any]:
    """What TorchRec takes now where it is given no sharders."""
    return _default_sharders()
