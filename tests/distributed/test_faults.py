"""What goes wrong in the middle of a step: the collection says so, or goes on as if the batch had never been."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from hybridrec import HybridRecError
from hybridrec.cache.swap import HostMemorySwapper
from hybridrec.kernels.torch_kernel import TorchKernel
from tests.distributed.scenario import Scenario, build, make_batch, to_kjt
from tests.distributed.test_refusal import SLOTS, bits, train
from tests.ranks import RankPool


class Planted(Exception):
    """Raised by a test in the middle of a step."""


def planted(*args: Any, **kwargs: Any) -> None:
    raise Planted


def first_batch(scenario: Scenario, step: int = 11) -> tuple[KeyedJaggedTensor, torch.Tensor]:
    batch = make_batch(scenario, step, dist.get_rank(), dist.get_world_size())
    return to_kjt(scenario, batch), batch.labels


def swap_fails() -> dict[str, bool]:
    scenario = Scenario(steps=20)
    dmp, optimizer = build(scenario, SLOTS)
    untouched, untouched_optimizer = build(scenario, SLOTS)
    train(dmp, optimizer, scenario, range(10))
    train(untouched, untouched_optimizer, scenario, range(10))
    with mock.patch.object(HostMemorySwapper, "swap", planted), pytest.raises(Planted):
        dmp(*first_batch(scenario))
    pins = sum(s.pins for s in dmp.module.ebc.stats())
    losses = train(dmp, optimizer, scenario, range(10, 20))
    expected = train(untouched, untouched_optimizer, scenario, range(10, 20))
    return {"no pins": pins == 0, "goes on": losses == expected and bits(dmp) == bits(untouched)}


def test_failed_swap_is_undone(pool_1: RankPool) -> None:
    assert pool_1.run(swap_fails) == [{"no pins": True, "goes on": True}]


def second_kernel_fails() -> list[str]:
    """Tables 'user' and 'item' are stepped, 'word' is not: nobody may go on with such rows."""
    scenario = Scenario(steps=20)
    dmp, optimizer = build(scenario, SLOTS)
    train(dmp, optimizer, scenario, range(2))
    ebc, features = dmp.module.ebc, first_batch(scenario)[0]  # without DDP, which has no state after a failed backward
    loss = ebc(features).values().sum()
    with mock.patch.object(TorchKernel, "backward", planted), pytest.raises(Planted):
        loss.backward()
    texts = []
    for call in (lambda: ebc(features).values(), loss.backward, lambda: ebc.eval()(features).values()):
        try:
            call()
            texts.append("went on")
        except (HybridRecError, RuntimeError) as e:
            texts.append(f"{type(e).__name__}: {e}")
    return texts


def test_half_stepped_rows_are_not_used(pool_1: RankPool) -> None:
    (texts,) = pool_1.run(second_kernel_fails)
    assert texts[0].startswith("StateError") and "Planted" in texts[0]
    assert "went on" not in texts


def modes_differ() -> str:
    scenario = Scenario(steps=20)
    dmp, optimizer = build(scenario, SLOTS)
    train(dmp, optimizer, scenario, range(2))
    before = bits(dmp)
    dmp.train(dist.get_rank() == 0)
    try:
        dmp(*first_batch(scenario))
    except HybridRecError as e:
        text = f"{type(e).__name__}: {e}"
    else:
        text = "no error"
    dmp.train()
    train(dmp, optimizer, scenario, range(2, 4))
    return text if bits(dmp) != before else "did not go on"


def test_ranks_in_different_modes_are_told(pool_2: RankPool) -> None:
    first, second = pool_2.run(modes_differ)
    assert first == second and first.startswith("StateError")
    assert "rank 0 trains, rank 1 reads" in first


def growth(kind: str) -> dict[str, Any]:
    """Batches larger than the slots of `fused_uvm` tables; with a forward pending slots cannot move, so they stay."""
    scenario = Scenario(kernel="fused_uvm", steps=4, batch_size=60)
    dmp, optimizer = build(scenario, {"user": 200, "item": 3, "word": 3})
    pending = None
    if kind == "pending":
        only_users = first_batch(scenario)[0]
        lengths = only_users.lengths().clone()
        num_users = only_users.length_per_key()[0]
        lengths[only_users.stride() :] = 0
        features = KeyedJaggedTensor(keys=only_users.keys(), values=only_users.values()[:num_users], lengths=lengths)
        pending = dmp.module.ebc(features).values().sum()  # the dense part is stepped meanwhile
    try:
        losses = train(dmp, optimizer, scenario, range(2))
        error = ""
    except HybridRecError as e:
        losses, error = [], f"{type(e).__name__}: {e}"
    if pending is not None:
        before = bits(dmp)
        pending.backward()
        losses.append(float(bits(dmp) != before))
    stats = dmp.module.ebc.stats()
    return {"losses": losses, "error": error, "stats": stats}


def test_growth_is_no_refusal(pool_1: RankPool) -> None:
    (result,) = pool_1.run(growth, "free")
    assert not result["error"] and len(result["losses"]) == 2
    assert all(s.rejected == 0 for s in result["stats"])
    assert result["stats"][1].slots > 3


def test_slots_do_not_move_under_a_pending_backward(pool_1: RankPool) -> None:
    (result,) = pool_1.run(growth, "pending")
    assert not result["error"]
    assert len(result["losses"]) == 3 and result["losses"][2] == 1.0  # the pending batch was stepped
    assert result["stats"][1].slots == 3 and result["stats"][1].oversized == 2  # so the others went in passes


def fused_optimizer_changes(name: str, value: Any) -> str:
    dmp, optimizer = build(Scenario(optimizer="adam"), SLOTS)
    dmp.fused_optimizer.param_groups[0][name] = value
    try:
        optimizer.zero_grad()
    except HybridRecError as e:
        return f"{type(e).__name__}: {e}"
    return "no error"


@pytest.mark.parametrize(("name", "value"), [("betas", (0.5, 0.5)), ("weight_decay", 0.1), ("lr", float("nan"))])
def test_what_a_scheduler_cannot_change_is_refused(pool_1: RankPool, name: str, value: Any) -> None:
    (text,) = pool_1.run(fused_optimizer_changes, name, value)
    assert text.startswith("ConfigError") and name in text


def weights_with_grad() -> str:
    scenario = Scenario(is_weighted=True)
    dmp, _ = build(scenario, SLOTS)
    features, labels = first_batch(scenario)
    weights = features.weights().clone().requires_grad_()
    with_grad = KeyedJaggedTensor(
        keys=features.keys(), values=features.values(), lengths=features.lengths(), weights=weights
    )
    try:
        dmp(with_grad, labels)
    except HybridRecError as e:
        return f"{type(e).__name__}: {e}"
    return "no error"


def test_weights_that_need_grad_are_refused(pool_1: RankPool) -> None:
    (text,) = pool_1.run(weights_with_grad)
    assert text.startswith("IdError") and "require grad" in text


def misuse(kind: str) -> str:
    """What cannot be done to a sharded collection says so, and training goes on."""
    scenario = Scenario(steps=20)
    dmp, optimizer = build(scenario, SLOTS)
    train(dmp, optimizer, scenario, range(2))
    before = bits(dmp)
    calls = {
        "half": dmp.half,
        "share_memory": dmp.share_memory,
        "meta": lambda: dmp.to("meta"),
        "slots": dmp.module.ebc.embedding_bags.state_dict,
    }
    try:
        calls[kind]()
    except HybridRecError as e:
        text = f"{type(e).__name__}: {e}"
    else:
        text = "no error"
    same = bits(dmp) == before
    if kind in ("half", "meta", "share_memory"):  # torch has converted what came before in the model
        dmp.module.ebc(first_batch(scenario)[0]).values().sum().backward()
    else:
        train(dmp, optimizer, scenario, range(2, 4))
    return text if same and bits(dmp) != before else f"rows changed or do not train: {text}"


@pytest.mark.parametrize(
    ("kind", "match"),
    [
        ("half", "ConfigError"),
        ("share_memory", "ConfigError"),
        ("meta", "ConfigError"),
        ("slots", "StateError"),
    ],
)
def test_misuse_is_refused(pool_1: RankPool, kind: str, match: str) -> None:
    (text,) = pool_1.run(misuse, kind)
    assert text.startswith(match), text


def inference_mode_reads() -> bool:
    scenario = Scenario(steps=20)
    dmp, optimizer = build(scenario, SLOTS)
    train(dmp, optimizer, scenario, range(4))
    dmp.eval()
    with torch.inference_mode():
        inferred = dmp(*first_batch(scenario, 2))
    with torch.no_grad():
        expected = dmp(*first_batch(scenario, 2))
    return torch.equal(inferred, expected)


def test_inference_mode(pool_2: RankPool) -> None:
    assert pool_2.run(inference_mode_reads) == [True, True]


def wrapping_lengths() -> str:
    scenario = Scenario()
    dmp, _ = build(scenario, SLOTS)
    lengths = torch.zeros(4 * 4, dtype=torch.int64)
    lengths[:4] = torch.tensor([2**62, 2**62, 2**62, 2**62 + 3])
    keys = first_batch(scenario)[0].keys()
    try:
        dmp.module.ebc(KeyedJaggedTensor(keys=keys, values=torch.tensor([1, 2, 3]), lengths=lengths)).values()
    except HybridRecError as e:
        return f"{type(e).__name__}: {e}"
    return "no error"


def test_lengths_whose_sum_wraps_round_are_refused(pool_1: RankPool) -> None:
    (text,) = pool_1.run(wrapping_lengths)
    assert text.startswith("IdError") and "a length is" in text
