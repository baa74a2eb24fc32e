"""What an optimizer inside the backward is, and how the two ways of asking TorchRec for one translate to it.

Every argument that a caller gives is honoured or refused by name. A neutral value of an argument that does not exist
here (``momentum=0``, ``amsgrad=False``) is accepted: it asks for nothing.
"""

from __future__ import annotations

import enum
import math
import numbers
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch

from hybridrec.errors import ConfigError
from hybridrec.row_type import RowType
from hybridrec.types import RowState

OptimizerKind = Literal["sgd", "adagrad", "rowwise_adagrad", "adam", "none"]

_KINDS: tuple[str, ...] = get_args(OptimizerKind)


@dataclass(frozen=True, kw_only=True)
class OptimizerSpec:
    """One optimizer with all that its update needs. Two tables may share a kernel only if theirs are equal.

    Only the rows of a batch are stepped, once each, with the sum of the gradients of their occurrences: FBGEMM's
    "exact" optimizers, and what ``torch.optim.SparseAdam`` does. So a row that is not in the batch does not decay.
    """

    kind: OptimizerKind
    """``"none"`` for kernels that only read."""
    learning_rate: float = 0.01
    """>= 0. What training starts with; a kernel's own value may change later."""
    eps: float = 1e-8
    """>= 0, added to the square root."""
    beta1: float = 0.9
    """Adam's decay of ``exp_avg``, in [0, 1)."""
    beta2: float = 0.999
    """Adam's decay of ``exp_avg_sq``, in [0, 1)."""
    weight_decay: float = 0.0
    """>= 0. L2: ``weight_decay * row`` is added to the gradient of every row of the batch."""
    decoupled_weight_decay: bool = False
    """Adam alone: ``learning_rate * weight_decay * row`` is taken from every row of the batch instead (AdamW)."""
    max_gradient: float | None = None
    """FBGEMM's gradient clipping: every element of a pool's gradient is brought into [-max_gradient, max_gradient]
    before gradients of occurrences are summed. >= 0; None: as it is."""
    initial_accumulator_value: float = 0.0
    """>= 0. What Adagrad's ``sum`` of a row that was never trained holds."""

    def __post_init__(self) -> None:
        if self.kind not in _KINDS:
            raise ConfigError(f"optimizer kind={self.kind!r} is unknown. Known: {', '.join(map(repr, _KINDS))}.")
        for name in ("learning_rate", "eps", "weight_decay", "initial_accumulator_value"):
            _check_range(f"optimizer {self.kind!r}", name, getattr(self, name), below=math.inf)
        for name in ("beta1", "beta2"):
            _check_range(f"optimizer {self.kind!r}", name, getattr(self, name), below=1.0)
        if self.max_gradient is not None:
            _check_range(f"optimizer {self.kind!r}", "max_gradient", self.max_gradient, below=math.inf)
        if self.decoupled_weight_decay and self.kind != "adam":
            raise ConfigError(f"optimizer {self.kind!r}: decoupled_weight_decay=True exists for 'adam' alone.")

    def row_states(self) -> tuple[RowState, ...]:
        """The states that every row has, in the order in which the update rule takes them."""
        if self.kind == "adagrad":
            return (RowState(name="sum", is_row_wise=False, initial_value=self.initial_accumulator_value),)
        if self.kind == "rowwise_adagrad":
            return (RowState(name="sum", is_row_wise=True, initial_value=self.initial_accumulator_value),)
        if self.kind == "adam":
            return (RowState(name="exp_avg", is_row_wise=False), RowState(name="exp_avg_sq", is_row_wise=False))
        return ()

    @classmethod
    def from_class(cls, optimizer_class: type, kwargs: Mapping[str, Any], *, table: str) -> OptimizerSpec:
        """Translate what `apply_optimizer_in_backward` was given.

        Defaults are the class's own: torch.optim's for its classes; for TorchRec's classes of the same names, which
        only stand for FBGEMM's, FBGEMM's; for TorchRec's ``RowWiseAdagrad`` those of its signature.

        Args:
            optimizer_class: ``torch.optim.{SGD, Adagrad, Adam, AdamW}`` or ``torchrec.optim.{SGD, Adagrad, Adam,
                RowWiseAdagrad}``; not a subclass, which may do anything.
            kwargs: Its arguments. Not kept, not changed.
            table: Name for messages.

        Raises:
            ConfigError: The class or an argument cannot be honoured; names it.
        """
        path = f"{optimizer_class.__module__}.{optimizer_class.__qualname__}"
        source = _CLASSES.get(path)
        if source is None:
            accepted = "torch.optim.SGD, Adagrad, Adam, AdamW and torchrec.optim.SGD, Adagrad, Adam, RowWiseAdagrad"
            raise ConfigError(
                f"table {table!r}: optimizer {path} cannot run inside the backward of a hashed table. "
                f"Accepted: {accepted}. Use one of them for this table."
            )
        return source.translate(kwargs, where=f"table {table!r}: {optimizer_class.__qualname__}")

    @classmethod
    def from_fused_params(cls, fused_params: Mapping[str, Any], *, table: str) -> OptimizerSpec:
        """Translate TorchRec's ``fused_params``, with FBGEMM's defaults (no optimizer given: ``EXACT_SGD``).

        Args:
            fused_params: ``{"optimizer": EmbOptimType, "learning_rate": ..., ...}``. Not kept, not changed.
            table: Name for messages.

        Raises:
            ConfigError: The optimizer or an argument cannot be honoured; names it.
        """
        arguments = dict(fused_params)
        optimizer = arguments.pop("optimizer", None)
        name = "EXACT_SGD" if optimizer is None else getattr(optimizer, "name", None)
        source = _FUSED.get(name) if isinstance(name, str) else None
        if source is None:
            raise ConfigError(
                f"table {table!r}: fused_params optimizer={optimizer!r} cannot be honoured. Accepted: EmbOptimType."
                f"{', '.join(_FUSED)}. Choose one of them."
            )
        return source.translate(arguments, where=f"table {table!r}: fused_params of {name}")

    @classmethod
    def of_parameter(
        cls, parameter: torch.nn.Parameter, fused_params: Mapping[str, Any] | None, *, table: str
    ) -> OptimizerSpec:
        """What a table is trained with.

        `apply_optimizer_in_backward` wins over ``fused_params``, as in TorchRec. There an argument that only
        ``fused_params`` has is mixed into the other optimizer; here that is refused unless it changes nothing.

        Args:
            parameter: The table's, with what `apply_optimizer_in_backward` left there.
            fused_params: The sharder's.
            table: Name for messages.

        Returns:
            The spec; of kind ``"none"`` if neither gives an optimizer.

        Raises:
            ConfigError: See `from_class` and `from_fused_params`; or it was called for the table more than once.
        """
        classes = getattr(parameter, "_optimizer_classes", [])
        if len(classes) > 1:
            raise ConfigError(
                f"table {table!r}: apply_optimizer_in_backward was called for it {len(classes)} times "
                f"({', '.join(c.__name__ for c in classes)}). Call it once."
            )
        if not classes:
            return cls.from_fused_params(fused_params, table=table) if fused_params else cls(kind="none")
        (kwargs,) = parameter._optimizer_kwargs  # type: ignore[attr-defined]  # set beside the classes
        spec = cls.from_class(classes[0], kwargs, table=table)
        _refuse_mixed(spec, classes[0].__name__, kwargs, fused_params or {}, table=table)
        return spec


def _refuse_mixed(
    spec: OptimizerSpec, name: str, kwargs: Mapping[str, Any], fused_params: Mapping[str, Any], *, table: str
) -> None:
    """Refuse arguments of ``fused_params`` that TorchRec would mix into an optimizer that was given otherwise."""
    given = {"learning_rate" if k == "lr" else k for k in kwargs} | {"optimizer"}
    if "betas" in given:
        given |= {"beta1", "beta2"}
    for argument, value in fused_params.items():
        ours = "learning_rate" if argument == "lr" else argument
        if ours in given or (ours in ("eps", "beta1", "beta2") and ours not in _READ[spec.kind]):
            continue
        neutral = (getattr(spec, ours),) if hasattr(spec, ours) else _FBGEMM_NEUTRAL.get(argument)
        if neutral is None or not _is_neutral(value, neutral):
            raise ConfigError(
                f"table {table!r}: apply_optimizer_in_backward gave it {name}, without {argument!r}, and fused_params "
                f"has {argument}={value!r} for all tables. Say in apply_optimizer_in_backward what {argument!r} of "
                "this table is, or leave it out of fused_params."
            )


@dataclass(frozen=True)
class _Source:
    """How the arguments of one optimizer of a library become a spec."""

    kind: OptimizerKind
    defaults: Mapping[str, float]
    """The library's defaults, in our names."""
    names: Mapping[str, str]
    """Their names of arguments that are honoured -> ours; ``"betas"`` is split."""
    neutral: Mapping[str, tuple[Any, ...]]
    """Arguments without a counterpart here -> values that ask for nothing. Empty: any value asks for nothing."""
    is_decoupled: bool = False
    """Whether weight decay is."""

    def translate(self, arguments: Mapping[str, Any], *, where: str) -> OptimizerSpec:
        fields: dict[str, Any] = {}
        arguments = dict(arguments)
        if "gradient_clipping" in self.neutral and arguments.get("gradient_clipping") is True:
            del arguments["gradient_clipping"]
            fields["max_gradient"] = _scalar(where, "max_gradient", arguments.pop("max_gradient", 1.0))
        for name, value in arguments.items():
            if name == "betas" and "betas" in self.names:
                fields |= _split_betas(where, value)
            elif name in self.names:
                if self.names[name] in fields:
                    raise ConfigError(f"{where}: {name!r} and another name of it are both given. Give one of them.")
                fields[self.names[name]] = _scalar(where, name, value)
            elif name in self.neutral:
                _refuse_unless_neutral(where, name, value, self.neutral[name])
            else:
                accepted = ", ".join(map(repr, sorted(self.names)))
                raise ConfigError(f"{where}: argument {name!r} is not honoured. Accepted: {accepted}. Leave it out.")
        for name, value in fields.items():
            _check_range(where, name, value, below=1.0 if name in ("beta1", "beta2") else math.inf)
        return OptimizerSpec(kind=self.kind, decoupled_weight_decay=self.is_decoupled, **{**self.defaults, **fields})


def _scalar(where: str, name: str, value: Any) -> float:
    """A Python float from a number or a tensor of one element."""
    if isinstance(value, torch.Tensor):
        if value.numel() != 1:
            raise ConfigError(f"{where}: {name} is a tensor of shape {list(value.shape)}. Pass a number or a scalar.")
        value = value.item()
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise ConfigError(f"{where}: {name}={value!r} has type {type(value).__name__}. Pass a number.")
    return float(value)


def _split_betas(where: str, value: Any) -> dict[str, float]:
    if not isinstance(value, (tuple, list)) or len(value) != 2:
        raise ConfigError(f"{where}: betas={value!r} is not a pair. Pass (beta1, beta2).")
    return {"beta1": _scalar(where, "betas[0]", value[0]), "beta2": _scalar(where, "betas[1]", value[1])}


def _is_neutral(value: Any, neutral: tuple[Any, ...]) -> bool:
    """Whether a value asks for nothing; see `_Source.neutral`."""
    if not neutral or any(value is n or (isinstance(value, numbers.Real) and value == n) for n in neutral):
        return True
    return isinstance(value, enum.Enum) and value.name in neutral


def _refuse_unless_neutral(where: str, name: str, value: Any, neutral: tuple[Any, ...]) -> None:
    if _is_neutral(value, neutral):
        return
    allowed = " or ".join(repr(n) for n in neutral)
    raise ConfigError(
        f"{where}: {name}={value!r} is not honoured. Accepted: {allowed}. Leave it out, or choose another optimizer."
    )


def _check_range(where: str, name: str, value: Any, *, below: float) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0.0 <= value < below:
        limits = ">= 0 and finite" if below == math.inf else f">= 0 and < {below:g}"
        raise ConfigError(f"{where}: {name}={value!r} is out of range. Accepted: numbers {limits}.")


def _identity(*names: str) -> dict[str, str]:
    return {n: n for n in names}


# Which implementation torch runs (one tensor at a time, many, fused, traced) changes nothing of what is asked for.
_TORCH_IMPLEMENTATION: dict[str, tuple[Any, ...]] = {
    "foreach": (),
    "fused": (),
    "capturable": (),
    "differentiable": (False,),
    "maximize": (False,),
}
_TORCH_SGD = _Source(
    kind="sgd",
    defaults={"learning_rate": 1e-3},
    names={"lr": "learning_rate", "weight_decay": "weight_decay"},
    neutral={**_TORCH_IMPLEMENTATION, "momentum": (0,), "dampening": (0,), "nesterov": (False,)},
)
_TORCH_ADAGRAD = _Source(
    kind="adagrad",
    defaults={"learning_rate": 1e-2, "eps": 1e-10},
    names={"lr": "learning_rate", **_identity("eps", "weight_decay", "initial_accumulator_value")},
    neutral={**_TORCH_IMPLEMENTATION, "lr_decay": (0,)},
)
_TORCH_ADAM = _Source(
    kind="adam",
    defaults={"learning_rate": 1e-3, "eps": 1e-8, "beta1": 0.9, "beta2": 0.999},
    names={"lr": "learning_rate", "betas": "betas", **_identity("eps", "weight_decay")},
    neutral={**_TORCH_IMPLEMENTATION, "amsgrad": (False,), "decoupled_weight_decay": (False,)},
)
_TORCH_ADAMW = _Source(
    kind="adam",
    defaults={**_TORCH_ADAM.defaults, "weight_decay": 1e-2},
    names=_TORCH_ADAM.names,
    neutral={**_TORCH_ADAM.neutral, "decoupled_weight_decay": (True,)},
    is_decoupled=True,
)
_ROWWISE_ADAGRAD = _Source(
    kind="rowwise_adagrad",
    defaults={"learning_rate": 1e-2, "eps": 1e-10},
    names={
        "lr": "learning_rate",
        "learning_rate": "learning_rate",
        **_identity("eps", "weight_decay", "initial_accumulator_value"),
    },
    neutral={"lr_decay": (0,), "maximize": (False,)},
)

# FBGEMM takes every argument with every optimizer; those that the optimizer does not read must be neutral here.
# Its EXACT_SGD and EXACT_ADAGRAD ignore weight_decay; its Adam decouples it.
# max_gradient is read where gradient_clipping is True.
# Stochastic rounding concerns rows of 16 bits only; see `refuse_stochastic_rounding`.
_FBGEMM_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "stochastic_rounding": (),
    "gradient_clipping": (False,),
    "max_gradient": (1.0,),
    "max_norm": (0.0,),
    "momentum": (0.9, 0.0),
    "eta": (0.001,),
    "weight_decay": (0.0,),
    "weight_decay_mode": ("NONE",),
    "weights_precision": ("FP32",),
    "output_dtype": ("FP32",),
}
_READ: Mapping[OptimizerKind, tuple[str, ...]] = {
    "sgd": (),
    "adagrad": ("eps",),
    "rowwise_adagrad": ("eps",),
    "adam": ("eps", "beta1", "beta2"),
    "none": (),
}
_FBGEMM_DEFAULTS = {"learning_rate": 0.01, "eps": 1e-8, "beta1": 0.9, "beta2": 0.999}


def refuse_stochastic_rounding(arguments: Mapping[str, Any], row_type: RowType, *, table: str) -> None:
    """Rows of 16 bits are rounded to the nearest: chance would make them depend on more than the batches.

    Args:
        arguments: Of the optimizer.
        row_type: Of the table's weights; to float32 rows the argument means nothing.
        table: Name for messages.

    Raises:
        ConfigError: They ask for it.
    """
    if row_type is not RowType.FLOAT32 and arguments.get("stochastic_rounding"):
        raise ConfigError(
            f"table {table!r}: stochastic_rounding={arguments['stochastic_rounding']!r} is not available for hashed "
            f"tables; {row_type.dtype} rows are rounded to the nearest. Pass stochastic_rounding=False."
        )


_LEARNING_RATE = {"lr": "learning_rate", "learning_rate": "learning_rate"}


def _fbgemm(
    kind: OptimizerKind,
    *honoured: str,
    unread: tuple[str, ...],
    more: Mapping[str, str] | None = None,
    is_decoupled: bool = False,
) -> _Source:
    unread_neutral = {name: (_FBGEMM_DEFAULTS[name],) for name in unread}
    neutral = {k: v for k, v in _FBGEMM_NEUTRAL.items() if k not in honoured} | unread_neutral
    names = {**_LEARNING_RATE, **_identity(*honoured), **(more or {})}
    return _Source(kind=kind, defaults=_FBGEMM_DEFAULTS, names=names, neutral=neutral, is_decoupled=is_decoupled)


_FBGEMM_SGD = _fbgemm("sgd", unread=("eps", "beta1", "beta2"))
_FBGEMM_ADAGRAD = _fbgemm("adagrad", "eps", unread=("beta1", "beta2"))
_FBGEMM_ROWWISE = _fbgemm("rowwise_adagrad", "eps", unread=("beta1", "beta2"))
_FBGEMM_ADAM = _fbgemm(
    "adam", "eps", "beta1", "beta2", "weight_decay", unread=(), more={"betas": "betas"}, is_decoupled=True
)

_CLASSES: dict[str, _Source] = {
    "torch.optim.sgd.SGD": _TORCH_SGD,
    "torch.optim.adagrad.Adagrad": _TORCH_ADAGRAD,
    "torch.optim.adam.Adam": _TORCH_ADAM,
    "torch.optim.adamw.AdamW": _TORCH_ADAMW,
    "torchrec.optim.optimizers.SGD": _FBGEMM_SGD,
    "torchrec.optim.optimizers.Adagrad": _FBGEMM_ADAGRAD,
    "torchrec.optim.optimizers.Adam": _FBGEMM_ADAM,
    "torchrec.optim.rowwise_adagrad.RowWiseAdagrad": _ROWWISE_ADAGRAD,
}
_FUSED: dict[str, _Source] = {
    "EXACT_SGD": _FBGEMM_SGD,
    "EXACT_ADAGRAD": _FBGEMM_ADAGRAD,
    "EXACT_ROWWISE_ADAGRAD": _FBGEMM_ROWWISE,
    "ADAM": _FBGEMM_ADAM,
}
