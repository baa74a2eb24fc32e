"""What users see of an optimizer that runs inside the backward: parameter groups, no step of its own."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn
from torchrec.optim.keyed import CombinedOptimizer

from hybridrec._compat.torchrec import FusedOptimizer
from hybridrec.distributed.gradient_group import GradientGroup
from hybridrec.errors import ConfigError
from hybridrec.kernels.base import LookupKernel


class HashFusedOptimizer(FusedOptimizer):
    """The optimizer of the tables of one kernel.

    A learning rate that a scheduler wrote into ``param_groups`` takes effect at the next `step` or `zero_grad`, as
    with TorchRec's own fused optimizer. The rows' states are not in ``state_dict()``: they live beside their rows.
    """

    def __init__(self, kernel: LookupKernel, params: Mapping[str, nn.Parameter]) -> None:
        self._kernel = kernel
        optimizer = kernel.spec.optimizer
        group = {
            "params": list(params.values()),
            "lr": optimizer.learning_rate,
            "kind": optimizer.kind,
            "eps": optimizer.eps,
            "betas": (optimizer.beta1, optimizer.beta2),
            "weight_decay": optimizer.weight_decay,
        }
        self._fixed = {name: group[name] for name in ("kind", "eps", "betas", "weight_decay")}
        super().__init__(dict(params), {p: {} for p in params.values()}, [group])

    def zero_grad(self, set_to_none: bool = False) -> None:
        """Rows have no gradients to zero; hands the learning rate on."""
        self._hand_on_learning_rate()

    def step(self, closure: Any = None) -> None:
        """Rows were updated in the backward; hands the learning rate on."""
        self._hand_on_learning_rate()

    def _hand_on_learning_rate(self) -> None:
        (group,) = self.param_groups
        learning_rate = float("nan") if group["lr"] is None else float(group["lr"])
        if not 0.0 <= learning_rate < math.inf:
            raise ConfigError(
                f"fused optimizer: lr={learning_rate!r} in param_groups. It must be finite and at least 0."
            )
        for name, value in self._fixed.items():
            if group[name] != value:
                raise ConfigError(
                    f"fused optimizer: {name} in param_groups was changed from {value!r} to {group[name]!r}. Only lr "
                    "can change while training; give the others to apply_optimizer_in_backward."
                )
        self._kernel.learning_rate = learning_rate


class HashCollectionOptimizer(CombinedOptimizer):
    """The optimizers of all kernels of one collection; and where gradients are accumulated, what steps the rows."""

    def __init__(self, optimizers: Sequence[HashFusedOptimizer], gradients: GradientGroup) -> None:
        self._gradients = gradients
        super().__init__([("", optimizer) for optimizer in optimizers])

    def zero_grad(self, set_to_none: bool = False) -> None:
        """Hand the learning rates on, and drop accumulated gradients that were not stepped."""
        super().zero_grad(set_to_none)
        self._gradients.drop()

    def step(self, closure: Any = None) -> None:
        """Hand the learning rates on, then step rows with the accumulated gradients, if there are any."""
        super().step(closure)
        self._gradients.step()
