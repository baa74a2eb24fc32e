"""Training runs that the oracle tests compare: data, model, and one rank's side of the comparison."""

from __future__ import annotations

import dataclasses
import functools
import random
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torchrec.distributed import DistributedModelParallel
from torchrec.distributed.planner import EmbeddingShardingPlanner, ParameterConstraints, Topology
from torchrec.distributed.types import EnumerableShardingSpec, ParameterSharding, ShardingEnv, ShardMetadata
from torchrec.modules.embedding_configs import DataType, PoolingType
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper
from torchrec.optim.optimizers import in_backward_optimizer_filter
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from hybridrec import (
    HashEmbeddingBagCollection,
    HashEmbeddingBagConfig,
    HashEmbeddingCollection,
    HashEmbeddingConfig,
    HybridHashEmbeddingCollectionSharder,
    Uniform,
    get_default_hybrid_sharders,
)
from hybridrec.kernels.factory import make_kernel
from hybridrec.kernels.optimizer import OptimizerSpec
from hybridrec.kernels.torch_kernel import TorchKernel
from hybridrec.native import unmix64
from tests.distributed.oracle import Batch, Oracle, Table, parts_of, scenario_loss
from tests.distributed.sequence_oracle import SequenceOracle

OPTIMIZERS = {
    "sgd": (torch.optim.SGD, {"lr": 0.05}),
    "adagrad": (torch.optim.Adagrad, {"lr": 0.05, "eps": 1e-8}),
    "rowwise_adagrad": (RowWiseAdagrad, {"lr": 0.05, "eps": 1e-8}),
    "adam": (torch.optim.Adam, {"lr": 0.01}),
}
DATA_TYPES = {"float32": DataType.FP32, "bfloat16": DataType.BF16, "float16": DataType.FP16}
EXTREME_IDS = (0, 1, -1, 2**63 - 1, -(2**63), -(2**63) + 1, 2**32, -(2**32), 2**53 + 1)
TABLES = (
    Table(name="user", dim=8, features=("user",)),
    Table(name="item", dim=4, features=("clicked", "bought"), is_mean=True, seed=3),
    Table(name="word", dim=5, features=("word",)),  # not a multiple of 4: another kernel on the host
)


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """One run. The same on every rank, data differs by rank."""

    optimizer: str = "adagrad"
    cache: str = "minimum"
    """"all", "tenth", "minimum" (the largest batch's unique rows), "below" (four fifths of that: some batches do not
    fit), "one" (row), or "default": `device_rows` is not given."""
    transient_bytes: int | None = None
    """Of what batches that do not fit pass through; None: as users have it."""
    kernel: str = "fused_uvm_caching"
    is_weighted: bool = False
    steps: int = 200
    batch_size: int = 8
    ids_per_table: int = 1000
    tables: tuple[Table, ...] = TABLES
    seed: int = 1
    is_sequence: bool = False
    """Whether rows are not pooled."""
    dedups: bool = False
    """Of sequences: whether an id that a feature repeats travels once."""
    device: str = "cpu"
    """Of the model. On others than the host every table has a `TorchKernel`, and the oracle too then."""


@functools.lru_cache(maxsize=64)
def universe(scenario: Scenario, table: Table) -> list[int]:
    """Every id that a table will ever see: from the whole int64 range."""
    rng = random.Random(f"{scenario.seed} {table.name}")
    ids = set(EXTREME_IDS)
    while len(ids) < scenario.ids_per_table:
        ids.add(rng.randrange(-(2**63), 2**63))
    return sorted(ids)


def make_batch(scenario: Scenario, step: int, rank: int, world_size: int) -> Batch:
    """Lengths 0 to 3 with repeats; every seventh step one rank's batch is empty, sizes differ between ranks."""
    rng = random.Random(f"{scenario.seed} {step} {rank}")
    num_bags = scenario.batch_size - rank % 2
    if step % 7 == 3 and step % world_size == rank:
        num_bags = 0
    bags: dict[str, list[list[tuple[int, float]]]] = {}
    for table in scenario.tables:
        ids = universe(scenario, table)
        for feature in table.features:
            bags[feature] = []
            for _ in range(num_bags):
                bag = [(rng.choice(ids), round(rng.uniform(-1, 1), 3)) for _ in range(rng.randrange(4))]
                if bag and rng.random() < 0.2:
                    bag.append((bag[0][0], 0.5))  # the same id twice in one bag
                bags[feature].append(bag)
    labels = torch.tensor([float(rng.random() < 0.5) for _ in range(num_bags)])
    return Batch(bags=bags, labels=labels, num_bags=num_bags)


def to_kjt(scenario: Scenario, batch: Batch) -> KeyedJaggedTensor:
    bags = [bag for feature in batch.bags.values() for bag in feature]
    entries = [entry for bag in bags for entry in bag]
    return KeyedJaggedTensor(
        keys=list(batch.bags),
        values=torch.tensor([e[0] for e in entries], dtype=torch.int64),
        lengths=torch.tensor([len(bag) for bag in bags], dtype=torch.int64),
        weights=torch.tensor([e[1] for e in entries], dtype=torch.float32) if scenario.is_weighted else None,
        stride=batch.num_bags,
    )


def device_rows(scenario: Scenario, table: Table, batches: Sequence[Sequence[Batch]], world_size: int) -> int:
    """Slots of one rank."""
    if scenario.cache == "all":
        return scenario.ids_per_table
    if scenario.cache == "tenth":
        return max(1, scenario.ids_per_table // world_size // 10)
    if scenario.cache == "one":
        return 1
    largest, parts = 1, parts_of(table, world_size)
    for everyone in batches:
        ids = {id_ for b in everyone for f in table.features for bag in b.bags[f] for id_, _ in bag}
        shares = [sum(part.has(i, r, world_size) for i in ids) for part in parts for r in range(world_size)]
        largest = max(largest, *shares)
    return max(1, largest * 4 // 5) if scenario.cache == "below" else largest


class Model(nn.Module):
    """Embeddings and a small dense part."""

    def __init__(self, ebc: nn.Module, dense: nn.Module) -> None:
        super().__init__()
        self.ebc = ebc
        self.dense = dense

    def forward(self, features: KeyedJaggedTensor, labels: Tensor) -> Tensor:
        return scenario_loss(self.dense(self.ebc(features).values()), labels)


def make_dense(width: int) -> nn.Module:
    torch.manual_seed(11)
    return nn.Sequential(nn.Linear(width, 6), nn.Tanh(), nn.Linear(6, 1))


class SequenceModel(Model):
    """As `Model`, of rows that are not pooled."""

    def forward(self, features: KeyedJaggedTensor, labels: Tensor) -> Tensor:
        rows = self.ebc(features)
        parts = [(rows[name].values(), rows[name].lengths()) for name in self.dense.names]
        return scenario_loss(self.dense(parts), labels)


class SequenceHead(nn.Module):
    """A small dense part over rows: what an id gives depends on its place in the batch."""

    def __init__(self, tables: Sequence[Table]) -> None:
        super().__init__()
        self.names = [name for table in tables for name in table.features]
        self.layers = make_dense(tables[0].dim)

    def forward(self, parts: Sequence[tuple[Tensor, Tensor]]) -> Tensor:
        predictions = [sum_of_samples(self.layers(by_place(rows)), lengths) for rows, lengths in parts]
        return torch.stack(predictions).sum(0)


@torch.fx.wrap
def by_place(rows: Tensor) -> Tensor:
    return rows * (1 + 0.125 * torch.arange(len(rows), device=rows.device).unsqueeze(1))


@torch.fx.wrap
def sum_of_samples(values: Tensor, lengths: Tensor) -> Tensor:
    """[N, 1] -> [B, 1], added in order."""
    sample = torch.arange(len(lengths), device=values.device).repeat_interleave(lengths, output_size=len(values))
    return values.new_zeros((len(lengths), 1)).index_add(0, sample, values)


def dense_of(scenario: Scenario) -> nn.Module:
    """The dense part of a scenario's model."""
    if scenario.is_sequence:
        return SequenceHead(scenario.tables)
    return make_dense(sum(t.dim * len(t.features) for t in scenario.tables))


def _collection(scenario: Scenario, slots: dict[str, int]) -> nn.Module:
    configs = [
        (HashEmbeddingConfig if scenario.is_sequence else HashEmbeddingBagConfig)(
            name=t.name,
            num_embeddings=scenario.ids_per_table,
            embedding_dim=t.dim,
            feature_names=list(t.features),
            **({} if scenario.is_sequence else {"pooling": PoolingType.MEAN if t.is_mean else PoolingType.SUM}),
            seed=t.seed,
            data_type=DATA_TYPES[t.row_type],
            device_rows=slots[t.name] if scenario.cache != "default" and scenario.kernel != "fused" else None,
            initializer=Uniform(-0.1, 0.1),
        )
        for t in scenario.tables
    ]
    if scenario.is_sequence:
        return HashEmbeddingCollection(configs, device=scenario.device)
    return HashEmbeddingBagCollection(configs, is_weighted=scenario.is_weighted, device=scenario.device)


def build(
    scenario: Scenario, slots: dict[str, int], model_class: type[Model] | None = None
) -> tuple[DistributedModelParallel, CombinedOptimizer]:
    """The user's script: configs, optimizer in backward, planner, sharders, model."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    device = torch.device(scenario.device)
    model_class = model_class or (SequenceModel if scenario.is_sequence else Model)
    model = model_class(_collection(scenario, slots), dense_of(scenario).to(device))
    optimizer_class, kwargs = OPTIMIZERS[scenario.optimizer]
    apply_optimizer_in_backward(optimizer_class, model.ebc.parameters(), dict(kwargs))
    host_env = ShardingEnv(world_size=world_size, rank=rank, pg=dist.new_group(backend="gloo"))
    sharders = get_default_hybrid_sharders(host_env)
    if scenario.dedups:
        sharders = [HybridHashEmbeddingCollectionSharder(host_env, use_index_dedup=True)]
    planner = EmbeddingShardingPlanner(
        topology=Topology(world_size=world_size, local_world_size=world_size, compute_device=scenario.device),
        constraints={
            t.name: ParameterConstraints(sharding_types=["row_wise"], compute_kernels=[scenario.kernel])
            for t in scenario.tables
        },
    )
    plan = planner.collective_plan(model, sharders, dist.GroupMember.WORLD)
    for table in scenario.tables:
        if table.owners:
            plan.plan["ebc"][table.name] = give_to_owners(plan.plan["ebc"][table.name], table, world_size)
    dmp = DistributedModelParallel(model, device=device, plan=plan, sharders=sharders)
    dense = KeyedOptimizerWrapper(
        dict(in_backward_optimizer_filter(dmp.named_parameters())), lambda p: torch.optim.Adagrad(p, lr=0.1)
    )
    if scenario.transient_bytes is not None:
        dmp.module.ebc.lookup._passes.transient_bytes = scenario.transient_bytes
    return dmp, CombinedOptimizer([dmp.fused_optimizer, dense])


def give_to_owners(planned: ParameterSharding, table: Table, world_size: int) -> ParameterSharding:
    """The same table with all rows of its columns on single ranks."""
    parts = parts_of(table, world_size)
    rows = planned.sharding_spec.shards[0].shard_sizes[0]
    shards = [ShardMetadata([0, p.first], [rows, p.dim], f"rank:{p.owner}/cpu") for p in parts]
    return dataclasses.replace(
        planned,
        sharding_type="table_wise" if len(parts) == 1 else "column_wise",
        ranks=[part.owner for part in parts],
        sharding_spec=EnumerableShardingSpec(shards),
    )


def state_of(dmp: DistributedModelParallel) -> list[dict[int, np.ndarray]]:
    """For each table, or part of one, that is here id -> float32 [weights, row states, row-wise states], wherever the
    row is now.

    Reads slots and store without moving anything: a flush would hide a write-back that is missing.
    """
    ebc = dmp.module.ebc
    lookup = ebc._lookups[0]
    synchronize = torch.get_device_module(dmp.device).synchronize
    synchronize()  # rows may still be on their way in
    group = lookup.log.group
    found = []
    for t in range(len(lookup.tables)):
        arrays = lookup.table_kernels.slot_arrays(t)
        columns = [arrays.weights, *arrays.row_states, *(a.unsqueeze(1) for a in arrays.row_wise_states)]
        in_slots = torch.cat(columns, 1).cpu().numpy()
        keys, rows, _, slots, _ = group.entries(t)
        ids = unmix64(torch.from_numpy(np.ascontiguousarray(keys))).tolist()
        slots = np.asarray(slots)
        records = np.empty((len(ids), in_slots.shape[1]), np.float32)
        records[slots >= 0] = in_slots[slots[slots >= 0]]
        records[slots < 0] = group.read_records(t, np.asarray(rows)[slots < 0])
        found.append(dict(zip(ids, records, strict=True)))
    synchronize()  # a pipeline's own thread does not know that this one has read the slots
    order = [config.name for config in ebc.table_configs]
    places = [(order.index(part.table.name), part.first_column) for part in ebc.parts]
    return [rows for _, rows in sorted(zip(places, found, strict=True), key=lambda entry: entry[0])]


def make_oracle(scenario: Scenario, dense: nn.Module) -> Oracle:
    """This rank's oracle, with a dense part of its own."""
    optimizer_class, kwargs = OPTIMIZERS[scenario.optimizer]
    return (SequenceOracle if scenario.is_sequence else Oracle)(
        scenario.tables,
        {t.name: universe(scenario, t) for t in scenario.tables},
        OptimizerSpec.from_class(optimizer_class, dict(kwargs), table="oracle"),
        dense,
        is_weighted=scenario.is_weighted,
        rank=dist.get_rank(),
        world_size=dist.get_world_size(),
        make=make_kernel if scenario.device == "cpu" else TorchKernel,
    )


def run_against_oracle(scenario: Scenario) -> dict[str, object]:
    """Train both, step by step, on this rank; every bit of losses, rows and states must be equal.

    Returns:
        What a test asserts on besides: the table statistics and the losses.
    """
    rank, world_size = dist.get_rank(), dist.get_world_size()
    batches = [[make_batch(scenario, s, r, world_size) for r in range(world_size)] for s in range(scenario.steps)]
    slots = {t.name: device_rows(scenario, t, batches, world_size) for t in scenario.tables}
    dmp, optimizer = build(scenario, slots)
    dense = DistributedDataParallel(
        dense_of(scenario), gradient_as_bucket_view=True, broadcast_buffers=False, static_graph=True
    )
    dense_optimizer = torch.optim.Adagrad(dense.parameters(), lr=0.1)
    oracle = make_oracle(scenario, dense)
    losses, steps_without_victims, victims = [], [], 0
    for step, everyone in enumerate(batches):
        mine = everyone[rank]
        optimizer.zero_grad()
        loss = dmp(to_kjt(scenario, mine), mine.labels.to(scenario.device))
        loss.backward()
        optimizer.step()
        expected = oracle.step(everyone, dense_optimizer)
        losses.append(loss.item())
        difference = (
            f"loss {loss.item()!r}, the oracle's is {expected.item()!r}" if loss.item() != expected.item() else ""
        )
        difference = difference or compare_state(scenario, oracle, state_of(dmp))
        raise_together(difference, step)
        so_far = sum(s.victims for s in dmp.module.ebc.stats())
        # Caches are full after a while; at a single rank an empty batch asks for nothing.
        if step >= scenario.steps // 4 and so_far == victims and any(b.num_bags for b in everyone):
            steps_without_victims.append(step)
        victims = so_far
    stats = dmp.module.ebc.stats()
    if any(s.pins for s in stats):
        raise AssertionError(f"pins after the last step: {stats}")
    return {"stats": stats, "losses": losses, "steps without victims": steps_without_victims}


def raise_together(difference: str, step: int) -> None:
    """Raise on every rank if a rank found a difference, so that none waits for one that stopped."""
    flag = torch.tensor([float(bool(difference))])
    dist.all_reduce(flag)
    if flag.item():
        raise AssertionError(f"step {step}: {difference or 'another rank differs from its oracle'}")


def compare_state(scenario: Scenario, oracle: Oracle, tables: list[dict[int, np.ndarray]]) -> str:
    """Every row that lives equals the oracle's, bit for bit: what differs, or an empty string."""
    for t, part in enumerate(oracle.mine):
        table, expected = part.table, oracle.state_of(t)
        unknown = set(tables[t]) - set(expected)
        if unknown:
            return f"table {table.name}: ids {sorted(unknown)[:3]} do not belong here"
        for id_, record in tables[t].items():
            if record.tobytes() != np.ascontiguousarray(expected[id_]).tobytes():
                return f"table {table.name}, columns from {part.first}, id {id_}: {record} is not {expected[id_]}"
    return ""
