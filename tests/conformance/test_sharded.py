"""Sharded: what TorchRec's tutorial does with a collection, sharder, plan and environment, done with ours beside it."""

from __future__ import annotations

import math

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torchrec import KeyedTensor
from torchrec.distributed import DistributedModelParallel
from torchrec.distributed.embedding_types import EmbeddingComputeKernel
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder, ShardedEmbeddingBagCollection
from torchrec.distributed.planner import EmbeddingShardingPlanner, ParameterConstraints, Topology
from torchrec.distributed.sharding_plan import (
    apply_to_all,
    column_wise,
    construct_module_sharding_plan,
    data_parallel,
    get_sharding_constructor_from_type,
    grid_shard,
    row_wise,
    table_row_wise,
    table_wise,
)
from torchrec.distributed.types import (
    EmbeddingModuleShardingPlan,
    LazyAwaitable,
    ShardingEnv,
    ShardingPlan,
    ShardingType,
)
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad

from hybridrec import (
    ConfigError,
    HybridHashEmbeddingBagCollectionSharder,
    HybridTrainPipelineSparseDist,
    get_default_hybrid_sharders,
)
from hybridrec.distributed.sharded_embedding_bag import ShardedHashEmbeddingBagCollection
from tests.conformance.twins import IDS, KEYS, TABLES, batch, dense, hashed, initial_rows, numbered
from tests.distributed.pipelines import PipelineBatch
from tests.ranks import RankPool, RankPools

CPU = torch.device("cpu")
STEPS = 6


def planner(sharding_type: str | None = None) -> EmbeddingShardingPlanner:
    size = dist.get_world_size()
    constraint = ParameterConstraints(sharding_types=None if sharding_type is None else [sharding_type])
    return EmbeddingShardingPlanner(
        topology=Topology(world_size=size, local_world_size=size, compute_device="cpu"),
        constraints={str(table["name"]): constraint for table in TABLES},
    )


def world_env() -> ShardingEnv:
    return ShardingEnv.from_process_group(dist.GroupMember.WORLD)


def options(optimizer: type, lr: float) -> dict[str, float]:
    """FBGEMM's epsilon: what TorchRec's sharded tables use, whatever torch's default is."""
    return {"lr": lr} if optimizer is torch.optim.SGD else {"lr": lr, "eps": 1e-8}


def ours(optimizer: type = torch.optim.SGD, lr: float = 0.1) -> ShardedHashEmbeddingBagCollection:
    """As the tutorial shards TorchRec's: plan, then ``shard`` with the entry of the root."""
    collection = hashed(optimizer, **options(optimizer, lr))
    sharder = HybridHashEmbeddingBagCollectionSharder()
    plan = planner().collective_plan(collection, [sharder], dist.GroupMember.WORLD)
    return sharder.shard(collection, plan.plan[""], world_env(), CPU)


def theirs(optimizer: type = torch.optim.SGD, lr: float = 0.1) -> ShardedEmbeddingBagCollection:
    """The same lines with TorchRec's classes; rows are set afterwards, as its shards draw their own."""
    collection = dense()
    apply_optimizer_in_backward(optimizer, collection.parameters(), options(optimizer, lr))
    sharder = EmbeddingBagCollectionSharder()
    plan = planner("table_wise").collective_plan(collection, [sharder], dist.GroupMember.WORLD)
    sharded = sharder.shard(collection, plan.plan[""], world_env(), CPU)
    rows = initial_rows()
    with torch.no_grad():
        for name, parameter in sharded.named_parameters():
            if parameter.numel():  # this rank has the table
                parameter.copy_(rows[name.split(".")[1]].view_as(parameter))
    return sharded


def loss_of(output: KeyedTensor, step: int) -> Tensor:
    target = torch.linspace(-1, 1, 6 * 24).view(6, 24) * (1 + step)
    by_key = output.to_dict()
    return ((torch.cat([by_key[key] for key in sorted(by_key)], 1) - target) ** 2).mean()


def side_by_side(optimizer: type, lr: float) -> None:
    """Both train on each rank's own batches; outputs stay equal to rounding of what is added in another order."""
    mine, reference = ours(optimizer, lr), theirs(optimizer, lr)
    assert (mine.fused_optimizer.params.keys() > set()) and mine.unsharded_module_type is type(hashed())
    for step in range(STEPS):
        features = batch(100 * dist.get_rank() + step)
        outputs = mine(features), reference(numbered(features))
        for output in outputs:
            assert isinstance(output, LazyAwaitable)
        got, expected = outputs[0].wait(), outputs[1].wait()
        assert type(got) is type(expected) is KeyedTensor
        assert got.to_dict().keys() == expected.to_dict().keys()
        for key, value in expected.to_dict().items():
            torch.testing.assert_close(got[key], value, rtol=2e-6, atol=1e-6)
        for output in (got, expected):
            loss_of(output, step).backward()


@pytest.mark.parametrize(
    ("world_size", "optimizer", "lr"),
    [
        (1, torch.optim.Adagrad, 0.3),
        (2, torch.optim.SGD, 2.0),
        (2, torch.optim.Adagrad, 0.3),
        (3, RowWiseAdagrad, 0.3),
    ],
)
def test_trains_like_torchrecs_sharded_collection(
    pools: RankPools, world_size: int, optimizer: type, lr: float
) -> None:
    pools[world_size].run(side_by_side, optimizer, lr)


def parts() -> None:
    mine, reference = ours(), theirs()
    reference(numbered(batch(3))).wait()  # TorchRec makes its input dists in the first forward
    for name in ("_input_dists", "_lookups", "_output_dists"):
        assert len(getattr(mine, name)) > 0 and len(getattr(reference, name)) > 0, name
    # TorchRec's stages by hand.
    features = batch(3)
    ctx = mine.create_context()
    dist_input = mine.input_dist(ctx, features).wait().wait()
    by_hand = mine.compute_and_output_dist(ctx, dist_input).wait()
    assert torch.equal(by_hand.values(), mine(features).wait().values())


def test_the_sharded_module_has_torchrecs_parts_and_stages(pool_2: RankPool) -> None:
    pool_2.run(parts)


def planned() -> str:
    collection = hashed(torch.optim.SGD, lr=0.1)
    plan = planner().collective_plan(collection, [HybridHashEmbeddingBagCollectionSharder()], dist.GroupMember.WORLD)
    entry = plan.plan[""]
    assert type(entry) is EmbeddingModuleShardingPlan and sorted(entry) == ["item", "user", "word"]
    assert entry["item"].ranks == list(range(dist.get_world_size()))
    return str(entry)


def test_the_plan_prints_as_torchrecs(pool_2: RankPool) -> None:
    text, other = pool_2.run(planned)
    assert text == other
    header, rule, *rows = [line.split("|") for line in text.strip().splitlines() if "|" in line]
    assert [cell.strip() for cell in header] == ["param", "sharding type", "compute kernel", "ranks"]
    assert [cell.strip() for cell in rows[0]][:3] == ["user", "row_wise", "fused"]


# ---- narrowed by the sharder --------------------------------------------------------------------------------------


def narrowed(sharding_type: object, kernel_type: object) -> list[tuple[str, str]]:
    sharder = HybridHashEmbeddingBagCollectionSharder(sharding_type=sharding_type, kernel_type=kernel_type)
    plan = planner().collective_plan(hashed(torch.optim.SGD, lr=0.1), [sharder], dist.GroupMember.WORLD)
    return [(table.sharding_type, table.compute_kernel) for table in plan.plan[""].values()]


@pytest.mark.parametrize(
    ("sharding_type", "kernel_type", "kernel"),
    [
        (None, None, "fused"),
        ("row_wise", "fused_uvm_caching", "fused_uvm_caching"),
        (ShardingType.ROW_WISE, EmbeddingComputeKernel.FUSED_UVM, "fused_uvm"),
    ],
)
def test_the_sharder_narrows_what_plans_choose(
    pool_2: RankPool, sharding_type: object, kernel_type: object, kernel: str
) -> None:
    assert pool_2.run(narrowed, sharding_type, kernel_type)[0] == [("row_wise", kernel)] * 3


def refused_choice(**kwargs: object) -> str:
    with pytest.raises(ConfigError) as error:
        HybridHashEmbeddingBagCollectionSharder(**kwargs)  # type: ignore[arg-type]
    return str(error.value)


@pytest.mark.parametrize(
    ("kwargs", "text"),
    [
        ({"sharding_type": "data_parallel"}, "sharding_type='data_parallel' does not exist for hashed tables"),
        ({"kernel_type": "dense"}, "kernel_type='dense' does not exist for hashed tables. Pass one of 'fused',"),
    ],
)
def test_what_no_hashed_table_can_be_is_refused_by_the_sharder(
    pool_1: RankPool, kwargs: dict[str, object], text: str
) -> None:
    assert text in pool_1.run(refused_choice, **kwargs)[0]


# ---- from a plan, without a host group ------------------------------------------------------------------------------


def from_plan(how: str) -> None:
    collection = hashed(torch.optim.SGD, lr=0.1)
    sharder = HybridHashEmbeddingBagCollectionSharder()
    plan: ShardingPlan | EmbeddingModuleShardingPlan | None = None
    if how != "none":
        plan = planner().collective_plan(collection, [sharder], dist.GroupMember.WORLD)
        plan = plan if how == "whole" else plan.plan[""]
    sharded = ShardedHashEmbeddingBagCollection.from_plan(collection, sharder, "cpu", plan)
    features = batch(dist.get_rank())
    expected = dense()(numbered(features))
    torch.testing.assert_close(sharded(features).wait().values(), expected.values())


@pytest.mark.parametrize("how", ["none", "whole", "entry"])
def test_from_plan_shards_a_collection_by_itself(pool_2: RankPool, how: str) -> None:
    pool_2.run(from_plan, how)


def bad_from_plan(kind: str) -> str:
    collection: nn.Module = hashed(torch.optim.SGD, lr=0.1)
    sharder = HybridHashEmbeddingBagCollectionSharder()
    plan = planner().collective_plan(nn.Sequential(collection), [sharder], dist.GroupMember.WORLD)
    if kind == "class":
        collection = dense()
    with pytest.raises(ConfigError) as error:
        ShardedHashEmbeddingBagCollection.from_plan(collection, sharder, "cpu", plan)  # type: ignore[arg-type]
    return str(error.value)


@pytest.mark.parametrize(
    ("kind", "text"),
    [("class", "module is a EmbeddingBagCollection"), ("path", "has entries for ['0'] and none for ''")],
)
def test_from_plan_refuses_what_does_not_fit(pool_1: RankPool, kind: str, text: str) -> None:
    assert text in pool_1.run(bad_from_plan, kind)[0]


class Model(nn.Module):
    """What a pipeline takes."""

    def __init__(self) -> None:
        super().__init__()
        self.ebc = hashed(torch.optim.Adagrad, lr=0.1)

    def forward(self, batch: PipelineBatch) -> tuple[Tensor, Tensor]:
        output = self.ebc(batch.features).values()
        loss = ((output.sum(1) - batch.labels) ** 2).mean()
        return loss, loss.detach()


def without_a_host_group(given: bool) -> None:
    """One group for the model and for ids: another is made of its ranks, so that a pipeline can send ids ahead."""
    results = []
    for depth in (0, 4):
        model = Model()
        sharders = get_default_hybrid_sharders(world_env() if given else None)
        plan = planner().collective_plan(model, sharders, dist.GroupMember.WORLD)
        dmp = DistributedModelParallel(model, device=CPU, plan=plan, sharders=sharders)
        ebc = dmp.module.ebc
        assert ebc.host_group is not ebc.device_group and ebc.host_group.size() == ebc.device_group.size()
        batches = [PipelineBatch(batch(7 * s + dist.get_rank()), torch.linspace(0, 1, 6)) for s in range(12)]
        if depth == 0:
            losses = []
            for b in batches:
                loss, _ = dmp(b)
                loss.backward()
                losses.append(loss.item())
        else:
            pipeline = HybridTrainPipelineSparseDist(dmp, dmp.fused_optimizer, CPU, pipe_n_batch=depth)
            iterator = iter(batches)
            losses = [pipeline.progress(iterator).item() for _ in batches]
        results.append(losses)
    assert results[0] == results[1] and results[0][-1] < results[0][0] and not math.isnan(results[0][-1])


@pytest.mark.parametrize("given", [False, True])
@pytest.mark.parametrize("world_size", [1, 2])
def test_without_a_host_group_training_is_the_same_in_loop_and_pipeline(
    pools: RankPools, world_size: int, given: bool
) -> None:
    pools[world_size].run(without_a_host_group, given)


def test_without_a_process_group_the_error_says_what_to_call() -> None:
    with pytest.raises(ConfigError, match=r'no default process group .* dist\.init_process_group\("gloo"\)'):
        get_default_hybrid_sharders()


def module_plan(collection: nn.Module, how: dict[str, str]) -> EmbeddingModuleShardingPlan:
    """TorchRec's `construct_module_sharding_plan` takes our sharder too."""
    size = dist.get_world_size()
    make = {
        "row_wise": row_wise(),
        "by type": get_sharding_constructor_from_type(ShardingType.ROW_WISE)(),
        "table_wise": table_wise(rank=size - 1),
        "column_wise": column_wise(ranks=[0, size - 1]),
        "data_parallel": data_parallel(),
        "table_row_wise": table_row_wise(host_index=0),
        "grid_shard": grid_shard(host_indexes=[0]),
    }
    return construct_module_sharding_plan(
        collection,
        {table: make[kind] for table, kind in how.items()},
        sharder=HybridHashEmbeddingBagCollectionSharder(),
        local_size=size,
        world_size=size,
        device_type="cpu",
    )


def by_module_plan(how: dict[str, str]) -> None:
    collection = hashed(torch.optim.SGD, lr=0.1)
    plan = module_plan(collection, how)
    assert {table: shards.sharding_type for table, shards in plan.items()} == {
        table: "row_wise" if kind == "by type" else kind for table, kind in how.items()
    }
    sharded = HybridHashEmbeddingBagCollectionSharder().shard(collection, plan, world_env(), CPU)
    features = batch(dist.get_rank())
    torch.testing.assert_close(sharded(features).wait().values(), dense()(numbered(features)).values())


@pytest.mark.parametrize("kinds", ["row_wise table_wise column_wise", "table_wise column_wise by_type"])
def test_torchrecs_plan_constructors_work(pool_2: RankPool, kinds: str) -> None:
    names = ("user", "item", "word")
    how = dict(zip(names, (kind.replace("_type", " type") for kind in kinds.split()), strict=True))
    pool_2.run(by_module_plan, how)


def all_alike() -> None:
    collection, size = hashed(torch.optim.SGD, lr=0.1), dist.get_world_size()
    per_table = apply_to_all(collection, row_wise(), sharder=HybridHashEmbeddingBagCollectionSharder())
    assert sorted(per_table) == ["item", "user", "word"]
    plan = construct_module_sharding_plan(
        collection, per_table, HybridHashEmbeddingBagCollectionSharder(), size, size, "cpu"
    )
    assert {shards.sharding_type for shards in plan.values()} == {"row_wise"}


def test_apply_to_all_knows_hashed_tables(pool_2: RankPool) -> None:
    pool_2.run(all_alike)


def refused_module_plan(kind: str) -> str:
    collection = hashed(torch.optim.SGD, lr=0.1)
    with pytest.raises((ConfigError, AssertionError, ValueError, RuntimeError)) as error:
        plan = module_plan(collection, {"user": "row_wise", "item": kind, "word": "row_wise"})
        HybridHashEmbeddingBagCollectionSharder().shard(collection, plan, world_env(), CPU)
    return f"{type(error.value).__name__}: {error.value}"


@pytest.mark.parametrize("kind", ["data_parallel", "table_row_wise", "grid_shard"])
def test_constructors_of_other_types_are_refused_by_name(pool_2: RankPool, kind: str) -> None:
    for text in pool_2.run(refused_module_plan, kind):
        assert text.startswith(f"ConfigError: table 'item': the plan shards it {kind!r}, which is not available")


# ---- calls of a guide that TorchRec itself rejects ------------------------------------------------------------------


@pytest.mark.parametrize(
    ("call", "kwargs"),
    [
        (EmbeddingBagCollectionSharder, {"sharding_type": "row_wise", "kernel_type": "fused"}),
        (ShardedEmbeddingBagCollection, {"module": None, "sharder": None, "device": None, "plan": None}),
        (Topology, {"world_size": 1, "compute_device": "cpu", "batch_size": 8}),
    ],
)
def test_torchrec_rejects_what_the_guide_shows(call: type, kwargs: dict[str, object]) -> None:
    """docs/torchrec.md has the working forms; once TorchRec accepts these, the page changes."""
    with pytest.raises(TypeError, match="argument"):
        call(**kwargs)


def test_ids_of_the_batches_are_the_hostile_ones() -> None:
    assert {-(2**63), 2**63 - 1, -1, 0} <= set(IDS.tolist()) and batch(1).keys() == list(KEYS)
