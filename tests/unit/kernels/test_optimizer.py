"""Every argument is honoured or refused by name, with the library's own defaults, and nobody's dict is changed."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torchrec.optim
from torchrec.distributed.types import DataType
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad

from hybridrec._compat.fbgemm import EmbOptimType
from hybridrec.errors import ConfigError
from hybridrec.kernels.optimizer import OptimizerSpec
from hybridrec.types import RowState

SGD, ADAGRAD, ADAM = torch.optim.SGD, torch.optim.Adagrad, torch.optim.Adam


@pytest.mark.parametrize(
    ("optimizer_class", "expected"),
    [
        (SGD, OptimizerSpec(kind="sgd", learning_rate=1e-3)),
        (ADAGRAD, OptimizerSpec(kind="adagrad", learning_rate=1e-2, eps=1e-10)),
        (ADAM, OptimizerSpec(kind="adam", learning_rate=1e-3, eps=1e-8)),
        (
            torch.optim.AdamW,
            OptimizerSpec(kind="adam", learning_rate=1e-3, weight_decay=0.01, decoupled_weight_decay=True),
        ),
        (RowWiseAdagrad, OptimizerSpec(kind="rowwise_adagrad", learning_rate=1e-2, eps=1e-10)),
        (torchrec.optim.SGD, OptimizerSpec(kind="sgd", learning_rate=1e-2)),
        (torchrec.optim.Adagrad, OptimizerSpec(kind="adagrad", learning_rate=1e-2, eps=1e-8)),
        (
            torchrec.optim.Adam,
            OptimizerSpec(kind="adam", learning_rate=1e-2, eps=1e-8, decoupled_weight_decay=True),
        ),
    ],
)
def test_defaults_are_those_of_the_class(optimizer_class: type, expected: OptimizerSpec) -> None:
    assert OptimizerSpec.from_class(optimizer_class, {}, table="t") == expected


@pytest.mark.parametrize("optimizer_class", [SGD, ADAGRAD, ADAM, torch.optim.AdamW, RowWiseAdagrad])
def test_defaults_are_those_of_the_installed_library(optimizer_class: type) -> None:
    group = optimizer_class([torch.nn.Parameter(torch.zeros(1, 1))]).param_groups[0]
    spec = OptimizerSpec.from_class(optimizer_class, {}, table="t")
    assert spec.learning_rate == group["lr"]
    assert spec.weight_decay == group["weight_decay"]
    assert spec.eps == group.get("eps", spec.eps)
    assert (spec.beta1, spec.beta2) == group.get("betas", (spec.beta1, spec.beta2))
    # All the arguments of the class, at their defaults, ask for nothing that is refused.
    arguments = {k: v for k, v in group.items() if k != "params"}
    assert OptimizerSpec.from_class(optimizer_class, arguments, table="t") == spec


@pytest.mark.parametrize(
    ("optimizer_class", "kwargs", "expected"),
    [
        (SGD, {"lr": 0.5, "weight_decay": 0.1}, {"learning_rate": 0.5, "weight_decay": 0.1}),
        (SGD, {"lr": torch.tensor(0.5)}, {"learning_rate": 0.5}),
        (SGD, {"lr": torch.tensor([0.5])}, {"learning_rate": 0.5}),
        (SGD, {"lr": np.float32(0.5), "momentum": np.float32(0)}, {"learning_rate": 0.5}),
        (SGD, {"lr": 1, "momentum": 0.0, "foreach": True, "fused": None}, {"learning_rate": 1.0}),
        (ADAGRAD, {"eps": 1e-3, "initial_accumulator_value": 0.2}, {"eps": 1e-3, "initial_accumulator_value": 0.2}),
        (ADAGRAD, {"lr_decay": 0}, {}),
        (ADAM, {"betas": (0.5, 0.6), "eps": 1e-6, "amsgrad": False}, {"beta1": 0.5, "beta2": 0.6, "eps": 1e-6}),
        (RowWiseAdagrad, {"learning_rate": 0.3, "weight_decay": 0.1}, {"learning_rate": 0.3, "weight_decay": 0.1}),
        (torchrec.optim.Adagrad, {"learning_rate": 0.3, "eps": 0.1}, {"learning_rate": 0.3, "eps": 0.1}),
        (torchrec.optim.Adam, {"lr": 0.3, "beta1": 0.1, "beta2": 0.2}, {"beta1": 0.1, "beta2": 0.2}),
        (torchrec.optim.Adam, {"weight_decay": 0.1}, {"weight_decay": 0.1, "decoupled_weight_decay": True}),
        (torchrec.optim.SGD, {"gradient_clipping": True, "max_gradient": 0.25}, {"max_gradient": 0.25}),
        (torch.optim.AdamW, {"lr": 0.1, "weight_decay": 0.3}, {"weight_decay": 0.3, "decoupled_weight_decay": True}),
    ],
)
def test_arguments_are_honoured(optimizer_class: type, kwargs: dict[str, Any], expected: dict[str, float]) -> None:
    before = dict(kwargs)
    spec = OptimizerSpec.from_class(optimizer_class, kwargs, table="t")
    assert {name: getattr(spec, name) for name in expected} == expected
    assert kwargs == before


@pytest.mark.parametrize(
    ("optimizer_class", "kwargs", "match"),
    [
        (SGD, {"momentum": 0.9}, "table 'user': SGD: momentum=0.9 is not honoured. Accepted: 0"),
        (SGD, {"dampening": 0.1}, "dampening=0.1 is not honoured"),
        (SGD, {"nesterov": True}, "nesterov=True is not honoured"),
        (SGD, {"maximize": True}, "maximize=True is not honoured"),
        (SGD, {"differentiable": True}, "differentiable=True is not honoured"),
        (SGD, {"learning_rate": 0.1}, "argument 'learning_rate' is not honoured. Accepted: 'lr', 'weight_decay'"),
        (SGD, {"lr": -0.1}, "learning_rate=-0.1 is out of range. Accepted: numbers >= 0 and finite"),
        (SGD, {"lr": float("nan")}, "learning_rate=nan is out of range"),
        (SGD, {"lr": float("inf")}, "learning_rate=inf is out of range"),
        (SGD, {"lr": "0.1"}, "lr='0.1' has type str. Pass a number"),
        (SGD, {"lr": True}, "lr=True has type bool"),
        (SGD, {"lr": torch.ones(2)}, r"lr is a tensor of shape \[2\]"),
        (SGD, {"weight_decay": -1}, "weight_decay=-1.0 is out of range"),
        (ADAGRAD, {"lr_decay": 0.1}, "lr_decay=0.1 is not honoured"),
        (ADAGRAD, {"eps": -1e-8}, "eps=-1e-08 is out of range"),
        (ADAGRAD, {"initial_accumulator_value": -1}, "initial_accumulator_value=-1.0 is out of range"),
        (ADAM, {"amsgrad": True}, "amsgrad=True is not honoured"),
        (ADAM, {"decoupled_weight_decay": True}, "decoupled_weight_decay=True is not honoured"),
        (ADAM, {"betas": (0.9, 1.0)}, "beta2=1.0 is out of range. Accepted: numbers >= 0 and < 1"),
        (ADAM, {"betas": (-0.1, 0.9)}, "beta1=-0.1 is out of range"),
        (ADAM, {"betas": 0.9}, "betas=0.9 is not a pair"),
        (ADAM, {"momentum": 0.9}, "argument 'momentum' is not honoured"),
        (RowWiseAdagrad, {"lr_decay": 0.1}, "lr_decay=0.1 is not honoured"),
        (RowWiseAdagrad, {"maximize": True}, "maximize=True is not honoured"),
        (RowWiseAdagrad, {"beta1": 0.1}, "argument 'beta1' is not honoured"),
        (RowWiseAdagrad, {"lr": 0.1, "learning_rate": 0.1}, "another name of it are both given"),
        (torchrec.optim.SGD, {"weight_decay": 0.1}, "weight_decay=0.1 is not honoured"),
        (torchrec.optim.SGD, {"eps": 0.1}, "eps=0.1 is not honoured. Accepted: 1e-08"),
        (torchrec.optim.Adagrad, {"initial_accumulator_value": 0.1}, "'initial_accumulator_value' is not honoured"),
        (torch.optim.AdamW, {"amsgrad": True}, "AdamW: amsgrad=True is not honoured"),
        (torch.optim.AdamW, {"decoupled_weight_decay": False}, "decoupled_weight_decay=False is not honoured"),
        (torch.optim.NAdam, {}, "optimizer torch.optim.nadam.NAdam cannot run inside the backward.*Accepted: torch"),
        (torchrec.optim.LAMB, {}, "optimizer torchrec.optim.optimizers.LAMB cannot run"),
        (torchrec.optim.LarsSGD, {}, "optimizer torchrec.optim.optimizers.LarsSGD cannot run"),
        (torchrec.optim.PartialRowWiseAdam, {}, "torchrec.optim.optimizers.PartialRowWiseAdam cannot run"),
        (torchrec.optim.PartialRowWiseLAMB, {}, "torchrec.optim.optimizers.PartialRowWiseLAMB cannot run"),
        (type("Mine", (SGD,), {}), {}, "Mine cannot run inside the backward"),
    ],
)
def test_what_is_not_honoured_is_refused_by_name(optimizer_class: type, kwargs: dict[str, Any], match: str) -> None:
    before = dict(kwargs)
    with pytest.raises(ConfigError, match=match):
        OptimizerSpec.from_class(optimizer_class, kwargs, table="user")
    assert kwargs.keys() == before.keys()


@pytest.mark.parametrize(
    ("fused_params", "expected"),
    [
        ({"learning_rate": 0.2}, OptimizerSpec(kind="sgd", learning_rate=0.2)),
        ({"optimizer": EmbOptimType.EXACT_SGD}, OptimizerSpec(kind="sgd", learning_rate=0.01)),
        (
            {"optimizer": EmbOptimType.EXACT_ADAGRAD, "learning_rate": 0.2, "eps": 1e-3},
            OptimizerSpec(kind="adagrad", learning_rate=0.2, eps=1e-3),
        ),
        ({"optimizer": EmbOptimType.EXACT_ROWWISE_ADAGRAD}, OptimizerSpec(kind="rowwise_adagrad", eps=1e-8)),
        (
            {"optimizer": EmbOptimType.ADAM, "beta1": 0.5, "beta2": 0.6, "lr": 0.1},
            OptimizerSpec(kind="adam", learning_rate=0.1, beta1=0.5, beta2=0.6, decoupled_weight_decay=True),
        ),
        ({"gradient_clipping": True}, OptimizerSpec(kind="sgd", max_gradient=1.0)),
        ({"gradient_clipping": False}, OptimizerSpec(kind="sgd")),
        (
            {"weight_decay": 0, "stochastic_rounding": False, "output_dtype": DataType.FP32, "momentum": 0.9},
            OptimizerSpec(kind="sgd"),
        ),
    ],
)
def test_fused_params(fused_params: dict[str, Any], expected: OptimizerSpec) -> None:
    before = dict(fused_params)
    assert OptimizerSpec.from_fused_params(fused_params, table="t") == expected
    assert fused_params == before


@pytest.mark.parametrize(
    ("fused_params", "match"),
    [
        (
            {"optimizer": EmbOptimType.LAMB},
            "table 'user': fused_params optimizer=.*lamb.*Accepted: EmbOptimType.EXACT_SGD",
        ),
        ({"optimizer": EmbOptimType.SGD}, "fused_params optimizer=.*sgd"),
        ({"optimizer": "adagrad"}, "fused_params optimizer='adagrad' cannot be honoured"),
        ({"weight_decay": 0.1}, "table 'user': fused_params of EXACT_SGD: weight_decay=0.1 is not honoured"),
        ({"optimizer": EmbOptimType.EXACT_ROWWISE_ADAGRAD, "weight_decay": 0.1}, "weight_decay=0.1 is not honoured"),
        ({"max_gradient": 0.1}, "max_gradient=0.1 is not honoured"),
        ({"gradient_clipping": True, "max_gradient": -1.0}, "max_gradient=-1.0 is out of range"),
        ({"optimizer": EmbOptimType.EXACT_ADAGRAD, "beta1": 0.8}, "beta1=0.8 is not honoured. Accepted: 0.9"),
        ({"max_norm": 1.0}, "max_norm=1.0 is not honoured"),
        ({"output_dtype": DataType.FP16}, "output_dtype=.*FP16.* is not honoured. Accepted: 'FP32'"),
        ({"cache_load_factor": 0.1}, "argument 'cache_load_factor' is not honoured. Accepted: 'learning_rate', 'lr'"),
        ({"learning_rate": -1.0}, "learning_rate=-1.0 is out of range"),
    ],
)
def test_fused_params_that_are_refused(fused_params: dict[str, Any], match: str) -> None:
    before = dict(fused_params)
    with pytest.raises(ConfigError, match=match):
        OptimizerSpec.from_fused_params(fused_params, table="user")
    assert fused_params == before


SERVED = {"EXACT_SGD", "EXACT_ADAGRAD", "EXACT_ROWWISE_ADAGRAD", "ADAM"}


@pytest.mark.parametrize("optimizer", list(EmbOptimType), ids=lambda o: o.name)
def test_every_optimizer_of_fbgemm_is_served_or_refused_by_name(optimizer: EmbOptimType) -> None:
    if optimizer.name in SERVED:
        assert OptimizerSpec.from_fused_params({"optimizer": optimizer}, table="t").kind != "none"
        return
    with pytest.raises(ConfigError, match=f"'t': fused_params optimizer=.*{optimizer.value}.* Accepted: EmbOptimType"):
        OptimizerSpec.from_fused_params({"optimizer": optimizer}, table="t")


def attached(optimizer_class: type, *kwargs: dict[str, Any]) -> torch.nn.Parameter:
    """A parameter for which `apply_optimizer_in_backward` was called so many times."""
    parameter = torch.nn.Parameter(torch.zeros(1, 4))
    if kwargs:
        parameter._optimizer_classes = [optimizer_class] * len(kwargs)  # type: ignore[attr-defined]
        parameter._optimizer_kwargs = list(kwargs)  # type: ignore[attr-defined]
    return parameter


def test_an_optimizer_of_the_parameter_wins_over_fused_params() -> None:
    fused_params = {"optimizer": EmbOptimType.EXACT_SGD, "learning_rate": 0.25, "stochastic_rounding": False}
    spec = OptimizerSpec.of_parameter(attached(ADAGRAD, {"lr": 0.5}), fused_params, table="t")
    assert spec == OptimizerSpec(kind="adagrad", learning_rate=0.5, eps=1e-10)
    assert OptimizerSpec.of_parameter(attached(ADAGRAD), fused_params, table="t").learning_rate == 0.25
    assert OptimizerSpec.of_parameter(attached(ADAGRAD), None, table="t").kind == "none"
    # eps means nothing to SGD, so that mixing it in changes nothing
    assert OptimizerSpec.of_parameter(attached(SGD, {"lr": 0.5}), {"eps": 0.1, "lr": 1.0}, table="t").kind == "sgd"
    with pytest.raises(ConfigError, match="'t': apply_optimizer_in_backward was called for it 2 times"):
        OptimizerSpec.of_parameter(attached(ADAGRAD, {}, {}), None, table="t")


@pytest.mark.parametrize(
    "fused_params",
    [{"eps": 1e-3}, {"learning_rate": 0.1}, {"gradient_clipping": True}, {"cache_load_factor": 0.1}],
    ids=str,
)
def test_fused_params_are_not_mixed_into_an_optimizer_of_the_parameter(fused_params: dict[str, Any]) -> None:
    (name,) = fused_params
    with pytest.raises(ConfigError, match=f"'t': apply_optimizer_in_backward gave it Adagrad, without '{name}'"):
        OptimizerSpec.of_parameter(attached(ADAGRAD, {}), fused_params, table="t")


def test_row_states() -> None:
    assert OptimizerSpec(kind="sgd").row_states() == ()
    assert OptimizerSpec(kind="none").row_states() == ()
    assert OptimizerSpec(kind="adagrad", initial_accumulator_value=0.5).row_states() == (
        RowState(name="sum", is_row_wise=False, initial_value=0.5),
    )
    assert OptimizerSpec(kind="rowwise_adagrad").row_states() == (RowState(name="sum", is_row_wise=True),)
    assert [s.name for s in OptimizerSpec(kind="adam").row_states()] == ["exp_avg", "exp_avg_sq"]


def test_a_spec_cannot_be_made_wrong() -> None:
    with pytest.raises(ConfigError, match="kind='rmsprop' is unknown. Known: 'sgd'"):
        OptimizerSpec(kind="rmsprop")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="optimizer 'adam': beta1=1.0 is out of range"):
        OptimizerSpec(kind="adam", beta1=1.0)
    with pytest.raises(ConfigError, match="decoupled_weight_decay=True exists for 'adam' alone"):
        OptimizerSpec(kind="sgd", decoupled_weight_decay=True)
    with pytest.raises(ConfigError, match="learning_rate='x' is out of range"):
        OptimizerSpec(kind="sgd", learning_rate="x")  # type: ignore[arg-type]
