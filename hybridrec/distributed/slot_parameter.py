"""`SlotParameter`: what ``model.parameters()`` lists for a hashed table; it never has a gradient, and says so."""

from __future__ import annotations

import sys

from torch import Tensor, nn

from hybridrec.errors import ConfigError

_CLIPPING = ("torch.nn.utils.clip_grad", "torchrec.optim.clipping")
"""Modules that read gradients in order to clip them."""


class SlotParameter(nn.Parameter):
    """A view of the slots of one table.

    Its rows are stepped in the backward, so ``grad`` is always None. Whoever clips gradients would pass over it without
    a word: torch's ``clip_grad_norm_`` and ``clip_grad_value_`` and TorchRec's ``GradientClippingOptimizer`` are told
    so when they ask, before they have changed anything.
    """

    table = ""
    """Name for messages."""

    @property
    def grad(self) -> Tensor | None:
        """None.

        Raises:
            ConfigError: To who clips.
        """
        asking = sys._getframe(1).f_globals.get("__name__")
        if asking in _CLIPPING:
            raise ConfigError(
                f"gradient clipping: the rows of hashed table {self.table!r} are stepped in the backward and keep no "
                "gradient that could be clipped afterwards. Clip the dense part alone: dict("
                "in_backward_optimizer_filter(model.named_parameters())).values(). For the rows give the optimizer "
                "gradient_clipping=True and max_gradient=..., in fused_params or with torchrec.optim's classes."
            )
        return None

    @grad.setter
    def grad(self, value: Tensor | None) -> None:
        if value is not None:
            raise ConfigError(
                f"hashed table {self.table!r}: a gradient cannot be given to it; rows are stepped in the backward."
            )


def slot_parameter(slots: Tensor, table: str) -> SlotParameter:
    """A parameter that is ``slots`` [C, D], of the table's type."""
    parameter = SlotParameter(slots)
    parameter.table = table
    return parameter
