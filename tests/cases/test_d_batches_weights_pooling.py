"""Section D of the list of peers' defects: variable batches, weights, pooling. A test is named after the report.

TR: TorchRec, FB: FBGEMM, RE: recsys-examples, TER: TorchEasyRec, TFRA: recommenders-addons.
"""

from __future__ import annotations

import random

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torchrec.modules.embedding_configs import PoolingType
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from hybridrec.distributed.input_dist import FeatureOrder
from hybridrec.errors import IdError
from tests.cases.small import Bags, kjt, sharded, table, train_alike, unsharded
from tests.cases.test_c_degenerate_input import poisoned_memory
from tests.distributed.kjt_forms import MIXED_TABLES, train_mixed
from tests.distributed.scenario import Scenario
from tests.distributed.test_vbe import train_variable
from tests.ranks import RankPool

RAW_IDS = (0, -1, 2**63 - 1, -(2**63), 2**62 + 1, -(2**40), 12345678901234567)
MEAN = {"pooling": PoolingType.MEAN}


def _bags(seed: int, features: str, *, num_bags: int = 4, longest: int = 4) -> Bags:
    rng = random.Random(seed)
    return {
        f: [[rng.choice(RAW_IDS) for _ in range(rng.randint(0, longest))] for _ in range(num_bags)] for f in features
    }


def _steps(features: str, count: int = 4) -> list[list[Bags]]:
    return [[_bags(10 * s + r, features, num_bags=3 + r) for r in range(2)] for s in range(count)]


# ---- pooling -------------------------------------------------------------------------------------------------------


def _sum_and_mean() -> None:
    tables = [table("s", 4, ["a", "b"]), table("m", 3, ["c"], **MEAN), table("n", 8, ["d", "a"], **MEAN)]
    train_alike(tables, _steps("dcab"))
    train_alike(tables, _steps("dcab"), is_weighted=True)


@pytest.mark.parametrize("world_size", [1, 2])
def test_tr2808_sum_and_mean_tables_in_one_model(pools: dict[int, RankPool], world_size: int) -> None:
    """Against the unsharded collection, plain and weighted; bit for bit against the oracle."""
    pools[world_size].run(_sum_and_mean)
    pools[world_size].run(train_mixed, Scenario(tables=MIXED_TABLES, steps=10))


def _mean_of_nothing() -> None:
    tables = [table("m", 4, ["a"], **MEAN)]
    bags: Bags = {"a": [[], [5, 6], []]}
    dmp = sharded(tables)
    pools = dmp(kjt(bags))
    assert not pools[0].any() and not pools[2].any() and pools[1].all()
    before = dmp.eval()(kjt({"a": [[5], [6], [7]]}))
    # The empty bags' gradients are huge, and reach no row; the other's is halved.
    (pools * torch.tensor([[1e30], [1.0], [1e30]])).sum().backward()
    after = dmp(kjt({"a": [[5], [6], [7]]}))
    assert torch.equal(after[2], before[2])
    torch.testing.assert_close(before[:2] - after[:2], torch.full((2, 4), 0.25))  # lr 0.5 x 1/2, from every rank


@pytest.mark.parametrize("world_size", [1, 2])
def test_ter104_mean_of_an_empty_bag(pools: dict[int, RankPool], world_size: int) -> None:
    """0, gradient 0; never NaN."""
    pools[world_size].run(_mean_of_nothing)
    collection = unsharded([table("m", 4, ["a"], **MEAN)])
    pooled = collection(kjt({"a": [[], []]})).values()
    assert torch.equal(pooled, torch.zeros(2, 4))
    pooled.sum().backward()
    assert collection.num_rows() == {"m": 0}


# ---- weights -------------------------------------------------------------------------------------------------------


def _weighted_in_poison() -> None:
    with poisoned_memory():
        train_mixed(Scenario(tables=MIXED_TABLES, steps=12, is_weighted=True, optimizer="rowwise_adagrad"))


@pytest.mark.parametrize("world_size", [1, 2])
def test_tr1130_weights_in_memory_that_nobody_wrote(pools: dict[int, RankPool], world_size: int) -> None:
    pools[world_size].run(_weighted_in_poison)


def test_re469_weights_get_gradients() -> None:
    """Unsharded. Sum and mean, against the rows themselves."""
    collection = unsharded([table("s", 4, ["a"]), table("m", 4, ["b"], **MEAN)], is_weighted=True)
    bags: Bags = {"a": [[1, 2], []], "b": [[3], [3, 4]]}
    weights = torch.tensor([0.5, -1.0, 2.0, 3.0, 0.0], requires_grad=True)
    rows = {n: bag.read(torch.arange(5)) for n, bag in collection.embedding_bags.items()}
    collection(kjt(bags, weights=weights)).values().sum().backward()
    expected = torch.stack(
        [rows["s"][1], rows["s"][2], rows["m"][3], rows["m"][3] / 2, rows["m"][4] / 2]  # a mean divides by the length
    ).sum(1)
    torch.testing.assert_close(weights.grad, expected)


def _weights_that_require_grad() -> str:
    dmp = sharded([table("s", 4, ["a"])], is_weighted=True)
    features = kjt({"a": [[1, 2], []]}, weights=torch.ones(2, requires_grad=dist.get_rank() == 0))
    with pytest.raises(IdError) as caught:
        dmp(features)
    with torch.no_grad():
        dmp(features)  # nothing would be lost
    return str(caught.value)


@pytest.mark.parametrize("world_size", [1, 2])
def test_re469_sharded_weights_that_require_grad_are_refused(pools: dict[int, RankPool], world_size: int) -> None:
    texts = pools[world_size].run(_weights_that_require_grad)
    assert len(set(texts)) == 1 and "the KJT's weights require grad" in texts[0]


def _victims(weight: float) -> tuple[list[int], dict[str, int]]:
    """Train on a cache that is too small for all; which rows moved, and what lives in slots."""
    dmp = sharded([table("s", 4, ["a"])], is_weighted=True, device_rows=4)
    for step in range(30):
        ids = [(step * k) % 31 + dist.get_rank() for k in (1, 3)]
        weights = torch.tensor([weight, weight * 1e6])
        dmp(kjt({"a": [ids]}, weights=weights)).sum().backward()
    (stats,) = dmp.module.ebc.stats()
    slots = dmp.module.ebc.lookup.log.group.entries(0)[3]
    return slots.tolist(), {"loads": stats.loads, "victims": stats.victims}


@pytest.mark.parametrize("world_size", [1, 2])
def test_re469_weights_are_no_frequencies(pools: dict[int, RankPool], world_size: int) -> None:
    """What is evicted does not depend on weights, however large."""
    small, large = (pools[world_size].run(_victims, weight) for weight in (1e-9, 1e9))
    assert small == large
    assert all(counters["victims"] > 0 for _, counters in small)


# ---- variable batches ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("depth", [None, 3])
def test_tr2256_variable_batches(pool_2: RankPool, depth: int | None) -> None:
    """Strides [[4, 2], [0, 3]] among others, equal ones on one rank alone, inverse indices; see test_vbe.py."""
    pool_2.run(train_variable, Scenario(steps=10, ids_per_table=60, optimizer="adam"), depth)


@pytest.mark.parametrize("seed", range(20))
def test_tr3597_what_is_remapped_keeps_every_field(seed: int) -> None:
    """A batch in the order of the lookup says of each feature what it said before."""
    rng = random.Random(seed)
    names = rng.sample("abcdef", 5)
    wanted = rng.choices(names, k=4)  # tables may share a feature
    strides = [rng.randint(1, 4) for _ in names]
    bags = [[[rng.choice(RAW_IDS) for _ in range(rng.randint(0, 3))] for _ in range(n)] for n in strides]
    entries = [i for feature in bags for bag in feature for i in bag]
    index = torch.tensor([[rng.randrange(n) for _ in range(6)] for n in strides])
    features = KeyedJaggedTensor(
        keys=names,
        values=torch.tensor(entries, dtype=torch.int64),
        weights=torch.arange(len(entries)).float(),
        lengths=torch.tensor([len(bag) for feature in bags for bag in feature]),
        stride_per_key_per_rank=[[n] for n in strides],
        inverse_indices=(names, index),
    )
    before = {name: (features[name].values(), features[name].weights()) for name in names}
    order = FeatureOrder(wanted, is_weighted=True)
    ordered, inverse = order.apply(features), order.inverse(features)
    assert ordered.keys() == wanted and inverse is not None
    lengths = ordered.lengths().view(len(wanted), -1)
    for f, (name, part) in enumerate(zip(wanted, ordered.split([1] * len(wanted)), strict=True)):
        values, weights = before[name]
        assert torch.equal(part.values(), values) and torch.equal(part.weights(), weights)
        position = names.index(name)
        expected = [len(bag) for bag in bags[position]]
        assert lengths[f].tolist() == expected + [0] * (max(strides) - len(expected))
        assert torch.equal(inverse[f], index[position])


# ---- features that share ids, tables that share features -----------------------------------------------------------


def _two_features_of_one_table() -> None:
    rng = random.Random(3 + dist.get_rank())
    dmp = sharded([table("t", 4, ["few", "many"])])
    bags: Bags = {"few": [[rng.randrange(40) for _ in range(33)]], "many": [[rng.randrange(2000) for _ in range(1280)]]}
    rows = dmp.eval()(kjt({"few": [[i] for i in range(2000)], "many": [[]] * 2000}))[:, :4]
    assert sum(s.rows for s in dmp.module.ebc.stats()) == 0  # reading inserts nothing
    pools = dmp(kjt(bags))
    expected = torch.cat([rows[bags["few"][0]].sum(0), rows[bags["many"][0]].sum(0)])
    torch.testing.assert_close(pools[0], expected, rtol=1e-5, atol=1e-5)
    dmp.train()
    torch.testing.assert_close(dmp(kjt(bags)).detach()[0], expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("world_size", [1, 2])
def test_tr4525_two_features_of_one_table_keep_their_ids(pools: dict[int, RankPool], world_size: int) -> None:
    """Lengths 33 and 1280, ids that overlap."""
    pools[world_size].run(_two_features_of_one_table)


def _with_and_without_repeats() -> None:
    tables = [table("t", 4, ["a", "b"]), table("u", 3, ["b"])]
    dmp, reference = sharded(tables).eval(), unsharded(tables).eval()
    distinct: Bags = {"a": [[i] for i in RAW_IDS], "b": [[i] for i in reversed(RAW_IDS)]}
    repeated = {f: bags * 3 for f, bags in distinct.items()}
    assert torch.equal(dmp(kjt(distinct)), reference(kjt(distinct)).values())
    assert torch.equal(dmp(kjt(repeated)), dmp(kjt(distinct)).repeat(3, 1))
    dmp.train()
    assert torch.equal(dmp(kjt(repeated)).detach(), dmp(kjt(distinct)).detach().repeat(3, 1))


@pytest.mark.parametrize("world_size", [1, 2])
def test_tr3905_repeated_ids_read_what_distinct_ones_do(pools: dict[int, RankPool], world_size: int) -> None:
    """There is no switch for deduplication: a batch with repeats is compared with one without."""
    pools[world_size].run(_with_and_without_repeats)


def _raw_ids_at_every_position() -> None:
    for position in range(4):
        everyone: list[Bags] = []
        for rank in range(2):
            bags = {f: [[1], [2, 1], []] for f in "abcd"}
            bags["abcd"[position]] = [list(RAW_IDS), [RAW_IDS[rank]], [2**63 - 1, 2**63 - 1]]
            everyone.append(bags)
        tables = [table("t", 4, ["a", "b"]), table("u", 5, ["c"]), table("v", 3, ["d"], **MEAN)]
        train_alike(tables, [everyone, everyone])


@pytest.mark.parametrize("world_size", [1, 2])
def test_fb5799_raw_ids_at_every_position(pools: dict[int, RankPool], world_size: int) -> None:
    """The last feature, too."""
    pools[world_size].run(_raw_ids_at_every_position)


def _three_features() -> None:
    for empty in "abc":
        steps = _steps("abc")
        for everyone in steps:
            for bags in everyone:
                bags[empty] = [[] for _ in bags[empty]]
        pools = train_alike([table("t", 4, ["a", "b", "c"])], steps)
        at = "abc".index(empty)
        assert not pools[:, 4 * at : 4 * at + 4].any()


@pytest.mark.parametrize("world_size", [1, 2])
def test_tfra496_three_features_of_one_table_one_empty(pools: dict[int, RankPool], world_size: int) -> None:
    """The first, the middle one, the last."""
    pools[world_size].run(_three_features)


def _one_id_often() -> None:
    dmp = sharded([table("t", 4, ["a"])], lr=0.001)
    bags: Bags = {"a": [[42]] * 1000}
    before = dmp(kjt(bags))
    assert all(torch.equal(row, before[0]) for row in before)
    before.sum().backward()
    after: Tensor = dmp.eval()(kjt({"a": [[42]]}))
    torch.testing.assert_close(before.detach()[0] - after[0], torch.full((4,), 1.0))  # one step of 1000 gradients
    stats = dmp.module.ebc.stats()
    assert stats[0].rows <= 1 and stats[0].pins == 0


@pytest.mark.parametrize("world_size", [1, 2])
def test_tr1298_one_id_a_thousand_times(pools: dict[int, RankPool], world_size: int) -> None:
    pools[world_size].run(_one_id_often)


def _odd_dims(optimizer: type[torch.optim.Optimizer]) -> None:
    tables = [table(f"t{dim}", dim, [name]) for name, dim in zip("abcde", (1, 3, 6, 7, 33), strict=True)]
    pools = train_alike(tables, _steps("abcde"), optimizer=optimizer, lr=0.1)
    assert pools.shape[1] == 50 and pools.isfinite().all()


@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.Adagrad])
@pytest.mark.parametrize("world_size", [1, 2])
def test_tr1612_dims_that_are_no_multiple_of_four(
    pools: dict[int, RankPool], world_size: int, optimizer: type[torch.optim.Optimizer]
) -> None:
    pools[world_size].run(_odd_dims, optimizer)
