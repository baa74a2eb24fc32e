"""Section C of the list of peers' defects: empty and degenerate input. A test is named after the report.

TR: TorchRec, FB: FBGEMM, RE: recsys-examples, TER: TorchEasyRec.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor

from hybridrec import HybridTrainPipelineSparseDist
from hybridrec.errors import IdError
from hybridrec.kernels.base import KernelSpec, KernelTable, LookupKernel
from hybridrec.kernels.optimizer import OptimizerSpec
from hybridrec.kernels.tbe_kernel import TbeKernel
from hybridrec.kernels.torch_kernel import TorchKernel
from tests.cases.small import Bags, kjt, sharded, table, train_alike, unsharded
from tests.distributed.kjt_forms import MIXED_TABLES, column, every_second, train_mixed
from tests.distributed.pipelines import PipelineBatch, PipelinedModel
from tests.distributed.scenario import Scenario, build, state_of
from tests.ranks import RankPool

FULL: Bags = {"a": [[1, 2], [], [3]], "b": [[4], [1, 1], []]}
NO_IDS: Bags = {"a": [[], []], "b": [[], []]}
NO_BAGS: Bags = {"a": [], "b": []}


def _tables() -> list:
    return [table("t", 4, ["a"]), table("u", 3, ["b"])]


@contextlib.contextmanager
def poisoned_memory() -> Iterator[None]:
    """Memory that torch hands out without writing it is full of NaN (or of the largest integer)."""
    torch.use_deterministic_algorithms(True)
    try:
        assert torch.empty(3).isnan().all()
        yield
    finally:
        torch.use_deterministic_algorithms(False)


# ---- empty batches -------------------------------------------------------------------------------------------------


def _one_rank_empty(empty: Bags) -> None:
    train_alike(_tables(), [[FULL, empty], [empty, FULL], [empty, empty], [FULL, FULL]])


@pytest.mark.parametrize("empty", [NO_IDS, NO_BAGS], ids=["no ids", "no bags"])
def test_tr2773_empty_batch_on_one_rank(pool_2: RankPool, empty: Bags) -> None:
    """Forward and backward, on one rank, on the other, on both."""
    pool_2.run(_one_rank_empty, empty)


def _sizes_of_nothing() -> None:
    dmp = sharded(_tables())
    for bags in (NO_IDS, NO_BAGS):
        pools = dmp(kjt(bags))
        assert pools.shape == (len(bags["a"]), 7) and not pools.any()
        pools.sum().backward()
    with pytest.raises(IdError, match=r"lacks 'a' \(table 't'\), 'b' \(table 'u'\).*It has no feature"):
        dmp(KeyedJaggedTensor.empty())
    assert all(s.rows == 0 and s.pins == 0 for s in dmp.module.ebc.stats())


@pytest.mark.parametrize("world_size", [1, 2])
def test_tr4638_no_keys_no_values_stride_zero(pools: dict[int, RankPool], world_size: int) -> None:
    pools[world_size].run(_sizes_of_nothing)
    collection = unsharded(_tables())
    assert collection(kjt(NO_BAGS)).to_dict().keys() == {"a", "b"}
    with pytest.raises(IdError, match="lacks 'a'"):
        collection(KeyedJaggedTensor.empty())


def _kernels() -> list[LookupKernel]:
    spec = KernelSpec(
        tables=(KernelTable(name="t", dim=4, num_slots=3),),
        feature_table=(0, 0),
        optimizer=OptimizerSpec(kind="adagrad", learning_rate=0.1),
        is_weighted=False,
        device=torch.device("cpu"),
    )
    return [TbeKernel(spec), TorchKernel(spec)]


@pytest.mark.parametrize("num_bags", [0, 2])
def test_re292_update_of_no_rows(num_bags: int) -> None:
    """Each kernel, with bags and without."""
    for kernel in _kernels():
        kernel.slot_arrays(0).weights.fill_(1)
        pooled, saved = kernel.forward(
            torch.empty(0, dtype=torch.int64), torch.zeros(2 * num_bags + 1, dtype=torch.int64), None
        )
        assert torch.equal(pooled, torch.zeros(num_bags, 8))
        kernel.backward(saved, torch.ones(num_bags, 8), step=1)
        assert torch.equal(kernel.slot_arrays(0).weights, torch.ones(3, 4))


def _empty_at_one_entry(entry: str) -> None:
    """A batch of no ids meets one entry point, after one that has rows."""
    scenario = Scenario(tables=MIXED_TABLES, steps=1)
    features = list(dict.fromkeys(f for t in MIXED_TABLES for f in t.features))
    full, empty = kjt({f: [[1, 2], [3]] for f in features}), kjt({f: [[], []] for f in features})
    labels = torch.ones(2)
    dmp, optimizer = build(scenario, {t.name: 10 for t in MIXED_TABLES}, PipelinedModel)
    if entry == "prefetch":
        pipeline = HybridTrainPipelineSparseDist(dmp, optimizer, torch.device("cpu"), pipe_n_batch=3)
        steps = iter([PipelineBatch(b, labels) for b in (full, empty, empty, full)])
        losses = [pipeline.progress(steps).item() for _ in range(4)]
        assert losses[0] > losses[3] and pipeline.stats().batches_committed == 4
        return
    dmp(PipelineBatch(full, labels))[0].backward()
    before = state_of(dmp)
    if entry == "forward":
        with torch.no_grad():
            loss, _ = dmp(PipelineBatch(empty, labels))
        assert loss.isfinite()
    else:
        loss, _ = dmp(PipelineBatch(empty, labels))
        loss.backward()
        if entry == "update":
            optimizer.step()
    for table_before, table_after in zip(before, state_of(dmp), strict=True):
        assert table_before.keys() == table_after.keys()
        assert all((table_after[i] == row).all() for i, row in table_before.items())
    assert all(s.pins == 0 for s in dmp.module.ebc.stats())


@pytest.mark.parametrize("entry", ["forward", "prefetch", "backward", "update"])
def test_re271_empty_batch_at_every_entry(pool_1: RankPool, entry: str) -> None:
    pool_1.run(_empty_at_one_entry, entry)


# ---- malformed batches ---------------------------------------------------------------------------------------------


def test_fb4111_weights_of_some_features_only() -> None:
    """TorchRec drops them or keeps some: either way the numbers do not fit, and are refused."""
    collection = unsharded(_tables(), is_weighted=True)
    some = KeyedJaggedTensor(
        keys=["a", "b"], values=torch.arange(4), lengths=torch.tensor([2, 2]), weights=torch.ones(2)
    )
    with pytest.raises(IdError, match=r"weights have shape \[2\] for 4 ids"):
        collection(some)
    ids, lengths = torch.tensor([1, 2]), torch.tensor([2])
    put_together = {
        "a": JaggedTensor(values=ids, lengths=lengths),
        "b": JaggedTensor(values=ids, lengths=lengths, weights=torch.ones(2)),
    }
    with pytest.raises(IdError, match="weights"):
        collection(KeyedJaggedTensor.from_jt_dict(put_together))


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        (
            {"lengths": torch.tensor([2, 0, 1, 1, 2, 1])},
            r"to 7 but there are 6 ids \(by feature: 'a' 3, 'b' 4\)",
        ),
        (
            {"lengths": torch.tensor([2, 0, 1, 1, 1, 0])},
            r"to 5 but there are 6 ids \(by feature: 'a' 3, 'b' 2\)",
        ),
        ({"lengths": torch.tensor([9, 0, 0, 0, 0, 0])}, r"a length is 9 \(feature 'a', bag 0\) but there are 6 ids"),
        ({"lengths": torch.tensor([2, 0, 1, 1, 3, -1])}, r"a length is -1 \(feature 'b', bag 2\)"),
        ({"stride": 2}, r"6 lengths for 2 features of 2 bags"),
        ({"lengths": torch.tensor([6, 0, 0])}, r"3 lengths for 2 features of 3 bags"),
        ({"lengths": None, "offsets": torch.tensor([0, 2, 1, 3, 4, 6, 6])}, r"a length is -1 \(feature 'a', bag 1\)"),
        ({"lengths": None, "offsets": torch.tensor([1, 2, 2, 3, 4, 6, 6])}, r"offsets begin with 1"),
    ],
    ids=["too long", "too short", "far too long", "negative", "stride", "half", "decreasing", "late start"],
)
def test_tr1756_lengths_that_do_not_sum(changes: dict, match: str) -> None:
    """An error (a ValueError, too) that names feature and numbers."""
    collection = unsharded(_tables())
    with pytest.raises(ValueError, match=match):
        collection(kjt(FULL, **changes))
    assert collection.num_rows() == {"t": 0, "u": 0}


def test_tr1075_length_per_key_is_not_believed() -> None:
    collection = unsharded(_tables())
    expected = collection(kjt(FULL)).values()
    assert torch.equal(collection(kjt(FULL, length_per_key=[1, 5], offset_per_key=[0, 1, 6])).values(), expected)


def _trailing() -> str:
    dmp = sharded(_tables())
    good = kjt(FULL)
    bad = kjt(FULL, values=torch.cat([good.values(), torch.tensor([77, 78])]))
    with pytest.raises(IdError) as caught:
        dmp(bad if dist.get_rank() == 0 else good)
    assert all(s.rows == 0 for s in dmp.module.ebc.stats())
    return str(caught.value)


@pytest.mark.parametrize("world_size", [1, 2])
def test_fb6291_ids_beyond_the_last_offset(pools: dict[int, RankPool], world_size: int) -> None:
    """An error on all ranks; nothing of the batch was looked up."""
    texts = pools[world_size].run(_trailing)
    assert len(set(texts)) == 1 and "lengths add up to 6 but there are 8 ids" in texts[0]


# ---- tensors as they lie in memory ---------------------------------------------------------------------------------


def _odd_layouts() -> None:
    dmp = sharded(_tables(), is_weighted=True).eval()
    plain = kjt(FULL, is_weighted=True)
    expected = dmp(plain)
    ids, weights, lengths = plain.values(), plain.weights(), plain.lengths()
    for spread in (every_second, column):
        assert not spread(ids, 7).is_contiguous()
        odd = kjt(FULL, values=spread(ids, 7), weights=spread(weights, 5.0), lengths=spread(lengths, 1))
        assert torch.equal(dmp(odd), expected)
    same: Bags = {"a": [[3, 3], [3], []], "b": [[3], [3], [3]]}
    expanded = {"values": torch.tensor([3]).expand(6), "weights": torch.tensor([0.0]).expand(6)}
    assert torch.equal(dmp(kjt(same, **expanded)), dmp(kjt(same, is_weighted=True)))


@pytest.mark.parametrize("world_size", [1, 2])
def test_re99_ids_that_are_not_contiguous(pools: dict[int, RankPool], world_size: int) -> None:
    """Every second of a larger tensor, a column, expanded: ids, weights and lengths."""
    pools[world_size].run(_odd_layouts)


# ---- uninitialised memory ------------------------------------------------------------------------------------------


def _poisoned(scenario: Scenario, depth: int | None) -> None:
    with poisoned_memory(), torch.autograd.detect_anomaly(check_nan=True):
        train_mixed(scenario, depth)


@pytest.mark.parametrize("depth", [None, 3])
def test_tr2648_memory_that_nobody_wrote(pool_2: RankPool, depth: int | None) -> None:
    """50 steps, some with an empty batch on one rank: the oracle's bits, so no NaN."""
    pool_2.run(_poisoned, Scenario(tables=MIXED_TABLES, steps=50), depth)


# ---- only hashed tables --------------------------------------------------------------------------------------------


def _only_hashed() -> None:
    dmp = sharded(_tables(), optimizer=torch.optim.Adagrad, lr=0.5)
    for _ in range(3):
        before = dmp(kjt(FULL))
        before.sum().backward()
    assert dmp(kjt(FULL)).sum() < before.sum()
    dmp.eval()
    after = dmp(kjt(FULL))
    saved = dmp.state_dict()
    dmp.train()
    dmp(kjt(FULL)).sum().backward()
    dmp.eval()
    assert not torch.equal(dmp(kjt(FULL)), after)
    dmp.load_state_dict(saved)
    assert torch.equal(dmp(kjt(FULL)), after)


@pytest.mark.parametrize("world_size", [1, 2])
def test_ter120_only_hashed_tables(pools: dict[int, RankPool], world_size: int) -> None:
    """A model without a dense part trains. It is saved and loaded whole."""
    pools[world_size].run(_only_hashed)
