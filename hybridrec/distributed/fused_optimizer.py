"""What users see of an optimizer that runs inside the backward: parameter groups, no step of its own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from hybridrec._compat.torchrec import FusedOptimizer
from hybridrec.kernels.base import LookupKernel


class HashFusedOptimizer(FusedOptimizer):  # type: ignore[misc]
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
        super().__init__(dict(params), {p: {} for p in params.values()}, [group])

    def zero_grad(self, set_to_none: bool = False) -> None:
        """Rows have no gradients to zero; hands the learning rate on."""
        self._hand_on_learning_rate()

    def step(self, closure: Any = None) -> None:
        """Rows were updated in the backward; hands the learning rate on."""
        self._hand_on_learning_rate()

    def _hand_on_learning_rate(self) -> None:
        self._kernel.learning_rate = float(self.param_groups[0]["lr"])
