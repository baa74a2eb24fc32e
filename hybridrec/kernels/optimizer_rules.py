"""The update rules: what one optimizer step does to the rows of a batch.

Written with ``+ - * /`` and square root only, one rounded operation at a time, never with torch's combined operators
(``add(alpha=)``, ``addcdiv``, ``lerp``, ``mean``): those may use a fused multiply-add in the vectorised part of a loop
and not in its remainder, so that a row's bits would depend on where in the batch it stands. IEEE 754 rounds each of
the operations used here exactly, so a row's new value is a function of the row, its states and its gradient alone,
whatever else is in the batch, whatever the number of threads, and on any processor.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from hybridrec.kernels.optimizer import OptimizerSpec


def updated_rows(
    spec: OptimizerSpec,
    rows_UD: Tensor,
    states: Sequence[Tensor],
    grads_UD: Tensor,
    *,
    step: int,
    learning_rate: float,
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Step every row once. Pure: the arguments are not changed.

    Args:
        spec: The optimizer.
        rows_UD: float32 [U, D].
        states: In the order of ``spec.row_states()``: float32 [U, D], or [U] if row-wise.
        grads_UD: float32 [U, D], summed over a row's occurrences.
        step: 1 at the first batch (Adam's bias correction).
        learning_rate: The value in force, instead of the spec's.

    Returns:
        The new rows and the new states.
    """
    if spec.weight_decay != 0.0 and spec.decoupled_weight_decay:
        rows_UD = rows_UD - rows_UD * (learning_rate * spec.weight_decay)
    elif spec.weight_decay != 0.0:
        grads_UD = grads_UD + rows_UD * spec.weight_decay
    if spec.kind == "sgd":
        return sgd(rows_UD, grads_UD, learning_rate), ()
    if spec.kind == "adagrad":
        rows, total = adagrad(rows_UD, states[0], grads_UD, learning_rate, spec.eps)
        return rows, (total,)
    if spec.kind == "rowwise_adagrad":
        rows, total = rowwise_adagrad(rows_UD, states[0], grads_UD, learning_rate, spec.eps)
        return rows, (total,)
    if spec.kind == "adam":
        rows, first, second = adam(
            rows_UD, states[0], states[1], grads_UD, step, learning_rate, spec.beta1, spec.beta2, spec.eps
        )
        return rows, (first, second)
    return rows_UD, tuple(states)


def sgd(rows_UD: Tensor, grads_UD: Tensor, learning_rate: float) -> Tensor:
    """``w - lr * g``. Source: torch.optim.SGD without momentum."""
    return rows_UD - grads_UD * learning_rate


def adagrad(
    rows_UD: Tensor, sum_UD: Tensor, grads_UD: Tensor, learning_rate: float, eps: float
) -> tuple[Tensor, Tensor]:
    """``s += g^2; w -= lr * (g / (sqrt(s) + eps))``. Source: Duchi et al. 2011, as torch.optim.Adagrad has it."""
    total = (grads_UD * grads_UD).add_(sum_UD)
    delta = grads_UD / total.sqrt().add_(eps)
    return rows_UD - delta.mul_(learning_rate), total


def rowwise_adagrad(
    rows_UD: Tensor, sum_U: Tensor, grads_UD: Tensor, learning_rate: float, eps: float
) -> tuple[Tensor, Tensor]:
    """``s += mean(g^2); w -= lr / (sqrt(s) + eps) * g``, one ``s`` a row. Source: FBGEMM's EXACT_ROWWISE_ADAGRAD."""
    total = (_tree_sum(grads_UD * grads_UD) / grads_UD.shape[1]).add_(sum_U)
    rate = learning_rate / total.sqrt().add_(eps)
    return rows_UD - grads_UD * rate.unsqueeze(1), total


def adam(
    rows_UD: Tensor,
    exp_avg_UD: Tensor,
    exp_avg_sq_UD: Tensor,
    grads_UD: Tensor,
    step: int,
    learning_rate: float,
    beta1: float,
    beta2: float,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """``m += (1-b1)(g-m); v += (1-b2)(g^2-v); w -= lr/(1-b1^t) * (m / (sqrt(v)/sqrt(1-b2^t) + eps))``.

    Source: Kingma & Ba 2015, as torch.optim.Adam has it (eps outside the square root). ``v`` moves towards ``g^2``
    instead of being scaled by ``b2``, which is the same: 0.999 as a float32 is off by 1.3e-8 at every step, all in one
    direction; 0.001 is not.
    """
    first = (grads_UD - exp_avg_UD).mul_(1.0 - beta1).add_(exp_avg_UD)
    second = (grads_UD * grads_UD).sub_(exp_avg_sq_UD).mul_(1.0 - beta2).add_(exp_avg_sq_UD)
    denominator = second.sqrt().div_((1.0 - beta2**step) ** 0.5).add_(eps)
    delta = (first / denominator).mul_(learning_rate / (1.0 - beta1**step))
    return rows_UD - delta, first, second


def _tree_sum(values_UD: Tensor) -> Tensor:
    """Sum of each row: columns are halved and added until one is left, an order that depends on D alone."""
    while (width := values_UD.shape[1]) > 1:
        half = (width + 1) // 2
        folded = values_UD[:, :half].clone()
        folded[:, : width - half] += values_UD[:, half:]
        values_UD = folded
    return values_UD.squeeze(1)
