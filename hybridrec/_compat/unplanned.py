"""Hashed collections that TorchRec would leave unsharded: refused, before each rank trains rows of its own.

TorchRec plans the modules whose exact class a sharder names, and says nothing of the others.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

from hybridrec._compat.default_sharders import default_sharders
from hybridrec._compat.torchrec import _symbol
from hybridrec.errors import ConfigError

MARK = "is_hashed_collection"
"""Attribute, True, of the modules that must not be left out."""
_WRAPPED = "_hybridrec_refuses_unplanned"

REMEDY = (
    "Pass sharders=get_default_hybrid_sharders(host_env) to both the planner (EmbeddingShardingPlanner.collective_plan "
    "or .plan) and DistributedModelParallel, or call hybridrec.register_default_sharders(host_env) once, before, and "
    "pass neither."
)
"""What to do."""


def refuse_unplanned_collections() -> None:
    """Let TorchRec's planner refuse models with hashed collections that no sharder is for. Idempotent."""
    planner = _symbol("torchrec.distributed.planner.planners", "EmbeddingShardingPlanner", parameters=("topology",))
    if not hasattr(planner.plan, _WRAPPED):
        planner.plan, planner.collective_plan = _checked(planner.plan), _checked(planner.collective_plan)


def _checked(inner: Any) -> Any:
    @functools.wraps(inner)
    def checked(self: Any, module: Any, sharders: Sequence[Any] | None = None, *args: Any, **kwargs: Any) -> Any:
        _check(module, default_sharders() if sharders is None else sharders)
        return inner(self, module, sharders, *args, **kwargs)

    setattr(checked, _WRAPPED, True)
    return checked


def _check(module: Any, sharders: Sequence[Any]) -> None:
    """
    Raises:
        ConfigError: On every rank that plans the model, before anything is exchanged.
    """
    known = {sharder.module_type for sharder in sharders}
    for path, child in module.named_modules():
        if getattr(child, MARK, False) and type(child) not in known:
            raise ConfigError(
                f"no sharder for '{type(child).__name__}' ({path or 'the model itself'}) is among those that the "
                f"planner was given: TorchRec would leave it unsharded, each rank with rows of its own. {REMEDY}"
            )
