"""Both ways to give an optimizer, schedulers, wrappers and names, side by side with TorchRec's collection."""

from __future__ import annotations

import contextlib
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.optim.clipping import GradientClipping, GradientClippingOptimizer
from torchrec.optim.keyed import KeyedOptimizer
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad
from torchrec.optim.warmup import WarmupOptimizer, WarmupPolicy, WarmupStage

from hybridrec import ConfigError
from hybridrec._compat.fbgemm import EmbOptimType
from hybridrec.distributed.fused_optimizer import HashFusedOptimizer
from tests.distributed.beside_torchrec import Script, batch, build_ours, optimizer_of, train_both
from tests.ranks import RankFailure, RankPool

SGD, ADAGRAD, ROWWISE = EmbOptimType.EXACT_SGD, EmbOptimType.EXACT_ADAGRAD, EmbOptimType.EXACT_ROWWISE_ADAGRAD


def adagrad_for_all(ebc: nn.Module) -> None:
    apply_optimizer_in_backward(torch.optim.Adagrad, ebc.parameters(), {"lr": 0.1, "eps": 1e-6})


def one_each(ebc: Any) -> None:
    """Tables a and b have optimizers of their own, c has what ``fused_params`` say, if anything."""
    bags = ebc.embedding_bags
    apply_optimizer_in_backward(RowWiseAdagrad, bags["a"].parameters(), {"lr": 0.2, "eps": 1e-6})
    apply_optimizer_in_backward(torch.optim.SGD, bags["b"].parameters(), {"lr": 0.3})


def all_three(ebc: Any) -> None:
    one_each(ebc)
    apply_optimizer_in_backward(torch.optim.Adagrad, ebc.embedding_bags["c"].parameters(), {"lr": 0.1, "eps": 1e-6})


def step_of_fused(fused: KeyedOptimizer, combined: KeyedOptimizer) -> Any:
    return torch.optim.lr_scheduler.StepLR(fused, step_size=3, gamma=0.5)


def lambda_of_combined(fused: KeyedOptimizer, combined: KeyedOptimizer) -> Any:
    return torch.optim.lr_scheduler.LambdaLR(combined, lambda step: 1.0 / (1 + step % 4))


def warm_up(fused: KeyedOptimizer) -> KeyedOptimizer:
    stages = [
        WarmupStage(policy=WarmupPolicy.LINEAR, max_iters=8, value=0.1),
        WarmupStage(policy=WarmupPolicy.STEP, max_iters=20, value=0.5, decay_iters=4),
    ]
    return WarmupOptimizer(fused, stages, lr=0.4)


SCRIPTS = {
    "fused_params sgd": Script(fused_params={"optimizer": SGD, "learning_rate": 0.2}),
    "fused_params adagrad": Script(fused_params={"optimizer": ADAGRAD, "learning_rate": 0.2, "eps": 1e-4}),
    "fused_params rowwise": Script(fused_params={"optimizer": ROWWISE, "learning_rate": 0.2, "eps": 1e-4}),
    "fused_params clipping": Script(
        fused_params={"optimizer": SGD, "learning_rate": 0.2, "gradient_clipping": True, "max_gradient": 0.05}
    ),
    "apply to all": Script(attach=adagrad_for_all),
    "apply to each": Script(attach=all_three),
    "apply to two, fused_params": Script(attach=one_each, fused_params={"optimizer": ADAGRAD, "learning_rate": 0.2}),
    "both": Script(attach=adagrad_for_all, fused_params={"optimizer": SGD, "learning_rate": 7.0, "eps": 0.5}),
    "scheduler of fused": Script(attach=all_three, schedule=step_of_fused),
    "scheduler of combined": Script(attach=adagrad_for_all, schedule=lambda_of_combined),
    "warm-up": Script(attach=adagrad_for_all, wrap=warm_up),
}


@pytest.mark.parametrize("name", SCRIPTS)
def test_trains_as_torchrec_does(pool_2: RankPool, name: str) -> None:
    for result in pool_2.run(train_both, SCRIPTS[name]):
        for both in ("keys", "state keys", "parameters"):
            # TorchRec lists the tables that a rank owns; here each rank owns rows of all.
            first, second = result[both]
            assert set(second) <= set(first)
        assert result["dense"][0] == result["dense"][1] == ["dense.bias", "dense.weight"]
        assert result["fused"][0] == [f"ebc.embedding_bags.{t}.weight" for t in "abc"]
        assert set(result["fused"][1]) <= set(result["fused"][0])


def test_one_rank_too(pool_1: RankPool) -> None:
    (result,) = pool_1.run(train_both, SCRIPTS["apply to each"])
    assert result["parameters"][0] == result["parameters"][1]
    assert result["keys"][0] == result["keys"][1]
    assert result["state keys"][0] == result["state keys"][1]
    ours, theirs = result["print"]
    assert ours.count("Fused") == theirs.count("Fused") == 3
    for rate in (0.1, 0.2, 0.3):
        assert f"lr: {rate}" in ours and f"lr: {rate}" in theirs


def trains_under(script: Script, *patches: tuple[type, str]) -> None:
    with contextlib.ExitStack() as stack:
        for owner, name in patches:
            stack.enter_context(mock.patch.object(owner, name, lambda self, *args, **kwargs: None))
        train_both(script)


@pytest.mark.parametrize("name", ["scheduler of fused", "warm-up"])
def test_a_rate_that_comes_one_batch_late_is_noticed(pool_1: RankPool, name: str) -> None:
    pool_1.run(trains_under, SCRIPTS[name])
    with pytest.raises(RankFailure, match="losses"):
        pool_1.run(trains_under, SCRIPTS[name], (HashFusedOptimizer, "zero_grad"))


def clip(how: str) -> list[str]:
    """Refused before a gradient was touched; the dense part alone can be clipped."""
    dmp = build_ours(Script(attach=adagrad_for_all))
    dmp(batch(0, raw=True)).backward()
    fused, combined = optimizer_of(Script(), dmp)
    before = [p.grad.clone() for p in dmp.module.dense.parameters()]
    calls = {
        "norm": lambda: torch.nn.utils.clip_grad_norm_(dmp.parameters(), 1e-3),
        "value": lambda: torch.nn.utils.clip_grad_value_(dmp.parameters(), 1e-3),
        "wrapper": GradientClippingOptimizer(combined, GradientClipping.NORM, 1e-3).step,
        "wrapper of values": GradientClippingOptimizer(combined, GradientClipping.VALUE, 1e-3).step,
    }
    with pytest.raises(ConfigError, match="gradient clipping: .* table 'a' .*in_backward_optimizer_filter"):
        calls[how]()
    for parameter, grad in zip(dmp.module.dense.parameters(), before, strict=True):
        assert torch.equal(parameter.grad, grad)
    torch.nn.utils.clip_grad_norm_(dmp.module.dense.parameters(), 1e-3)
    dmp.zero_grad()
    return [name for name, p in dmp.named_parameters() if p.grad is not None]


@pytest.mark.parametrize("how", ["norm", "value", "wrapper", "wrapper of values"])
def test_clipping_that_would_pass_over_hashed_tables_is_refused(pool_1: RankPool, how: str) -> None:
    assert pool_1.run(clip, how) == [[]]
