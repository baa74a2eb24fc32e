"""The same script twice, with TorchRec's collection and with ours, on the same numbers; TorchRec's is the oracle.

Its tables hold rows 0 .. R - 1; ours hold raw ids, a fixed one for each of these, and begin with the same values.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torchrec.distributed import DistributedModelParallel
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.planner import EmbeddingShardingPlanner, ParameterConstraints, Topology
from torchrec.distributed.types import ShardingEnv
from torchrec.modules.embedding_configs import EmbeddingBagConfig, PoolingType
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizer, KeyedOptimizerWrapper
from torchrec.optim.optimizers import in_backward_optimizer_filter
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from hybridrec import HashEmbeddingBagCollection, HashEmbeddingBagConfig, HybridHashEmbeddingBagCollectionSharder
from tests.distributed.scenario import raise_together

ROWS, DIM, BATCH = 60, 8, 6
TABLES = {"a": ("fa", "fb"), "b": ("fc",), "c": ("fd",)}
"""Table -> its features; ``b`` is MEAN."""
RAW = torch.arange(ROWS) * 0x1E3779B97F4A7C15 - 2**60  # wraps around: from the whole int64 range
"""The raw id of each row number."""


@dataclass(frozen=True, kw_only=True)
class Script:
    """What a user writes around a collection. All functions must be importable by name."""

    fused_params: Mapping[str, Any] = field(default_factory=dict)
    attach: Callable[[nn.Module], None] | None = None
    """Calls `apply_optimizer_in_backward` on the unsharded collection."""
    wrap: Callable[[KeyedOptimizer], KeyedOptimizer] | None = None
    """What the fused optimizer is wrapped with."""
    schedule: Callable[[KeyedOptimizer, KeyedOptimizer], Any] | None = None
    """From (fused, combined) optimizer to a scheduler."""
    scale: float = 1.0
    """Of the loss, so that gradients may be large."""


class Model(nn.Module):
    def __init__(self, ebc: nn.Module) -> None:
        super().__init__()
        self.ebc = ebc
        torch.manual_seed(3)
        self.dense = nn.Linear(DIM * sum(map(len, TABLES.values())), 1)

    def forward(self, features: KeyedJaggedTensor) -> Tensor:
        pools = self.ebc(features).to_dict()  # the order of TorchRec's columns depends on the plan
        columns = torch.cat([pools[f] for of_table in TABLES.values() for f in of_table], 1)
        out: Tensor = self.dense(columns).tanh().square().sum()
        return out


def batch(step: int, *, raw: bool) -> KeyedJaggedTensor:
    """This rank's batch; bags of 0 to 3 with repetitions."""
    rng = random.Random(f"{step} {dist.get_rank()}")
    keys = [f for features in TABLES.values() for f in features]
    lengths = torch.tensor([rng.randrange(4) for _ in range(BATCH * len(keys))])
    rows = torch.tensor([rng.randrange(ROWS) for _ in range(int(lengths.sum()))], dtype=torch.int64)
    return KeyedJaggedTensor(keys=keys, values=RAW[rows] if raw else rows, lengths=lengths)


def configs(cls: type[EmbeddingBagConfig]) -> list[EmbeddingBagConfig]:
    return [
        cls(
            name=name,
            num_embeddings=ROWS,
            embedding_dim=DIM,
            feature_names=list(features),
            pooling=PoolingType.MEAN if name == "b" else PoolingType.SUM,
        )
        for name, features in TABLES.items()
    ]


def build_ours(script: Script) -> DistributedModelParallel:
    """Our collection, cached, with fewer slots than rows."""
    ours = configs(HashEmbeddingBagConfig)
    for config in ours:
        config.device_rows = ROWS * 3 // 4  # type: ignore[attr-defined]
    model = Model(HashEmbeddingBagCollection(ours))
    host_env = ShardingEnv(world_size=dist.get_world_size(), rank=dist.get_rank(), pg=dist.new_group(backend="gloo"))
    sharder = HybridHashEmbeddingBagCollectionSharder(host_env, fused_params=script.fused_params)
    return _shard(script, model, sharder, "fused_uvm_caching", "row_wise")


def build_torchrec(script: Script, initial: Mapping[str, Tensor] | None) -> DistributedModelParallel:
    """TorchRec's collection, with given rows."""
    collection = EmbeddingBagCollection(tables=configs(EmbeddingBagConfig))
    sharder = EmbeddingBagCollectionSharder(fused_params=dict(script.fused_params))
    dmp = _shard(script, Model(collection), sharder, "fused", "table_wise")
    with torch.no_grad():  # sharding has made values of its own; a rank has whole tables, the others' are empty
        for name, parameter in dmp.module.ebc.embedding_bags.named_parameters():
            if initial is not None and parameter.numel():
                parameter.copy_(initial[name.partition(".")[0]])
    return dmp


def _shard(script: Script, model: Model, sharder: Any, kernel: str, sharding: str) -> DistributedModelParallel:
    if script.attach is not None:
        script.attach(model.ebc)
    world_size = dist.get_world_size()
    planner = EmbeddingShardingPlanner(
        topology=Topology(world_size=world_size, local_world_size=world_size, compute_device="cpu"),
        constraints={
            name: ParameterConstraints(compute_kernels=[kernel], sharding_types=[sharding]) for name in TABLES
        },
    )
    plan = planner.collective_plan(model, [sharder], dist.GroupMember.WORLD)
    return DistributedModelParallel(model, device=torch.device("cpu"), plan=plan, sharders=[sharder])


def rows_of(dmp: DistributedModelParallel) -> dict[str, Tensor]:
    """Table -> float32 [ROWS, DIM], by lookups of one id a bag."""
    dmp.eval()
    lengths = torch.zeros((sum(map(len, TABLES.values())), ROWS), dtype=torch.int64)
    first = {name: sum(len(TABLES[n]) for n in list(TABLES)[:i]) for i, name in enumerate(TABLES)}
    for feature in first.values():
        lengths[feature] = 1
    keys = [f for features in TABLES.values() for f in features]
    with torch.no_grad():
        pools = dmp.module.ebc(KeyedJaggedTensor(keys=keys, values=RAW.repeat(3), lengths=lengths.flatten())).values()
    dmp.train()
    return {name: pools[:, f * DIM : (f + 1) * DIM].clone() for name, f in first.items()}


def optimizer_of(script: Script, dmp: DistributedModelParallel) -> tuple[KeyedOptimizer, CombinedOptimizer]:
    """(fused, combined with the dense part's)."""
    fused = dmp.fused_optimizer if script.wrap is None else script.wrap(dmp.fused_optimizer)
    dense = KeyedOptimizerWrapper(
        dict(in_backward_optimizer_filter(dmp.named_parameters())), lambda p: torch.optim.SGD(p, lr=0.05)
    )
    return fused, CombinedOptimizer([fused, dense])


def rates(optimizer: KeyedOptimizer) -> list[float]:
    return [group["lr"] for group in optimizer.param_groups]


def train_both(script: Script, steps: int = 30) -> dict[str, Any]:
    """Losses agree to 1e-6 at every step, and so do the learning rates.

    Returns:
        What a test asserts on besides: names, keys and prints of both.
    """
    ours = build_ours(script)
    theirs = build_torchrec(script, rows_of(ours))
    sides = []
    for dmp in (ours, theirs):
        fused, combined = optimizer_of(script, dmp)
        scheduler = None if script.schedule is None else script.schedule(fused, combined)
        sides.append((dmp, combined, scheduler))
    losses: list[list[float]] = []
    for step in range(steps):
        now, at = [], []
        for side, (dmp, combined, scheduler) in enumerate(sides):
            at.append(rates(combined))
            combined.zero_grad()
            loss = dmp(batch(step, raw=side == 0)) * script.scale
            loss.backward()
            combined.step()
            if scheduler is not None:
                scheduler.step()
            now.append(loss.item())
        losses.append(now)
        wrong = abs(now[0] - now[1]) > 2e-6 * max(abs(now[1]), 1e-2)
        # A rank has TorchRec's rates of the tables that it owns; FBGEMM keeps some as float32.
        same_rates = all(any(rate == pytest.approx(ours, rel=1e-7) for ours in at[0]) for rate in at[1])
        raise_together(f"losses {now}" if wrong else "" if same_rates else f"rates {at}", step)
    return {
        "losses": [ours for ours, _ in losses],
        "rates": rates(sides[0][1]),
        "parameters": [sorted(dict(dmp.named_parameters())) for dmp, _, _ in sides],
        "dense": [sorted(dict(in_backward_optimizer_filter(dmp.named_parameters()))) for dmp, _, _ in sides],
        "fused": [
            sorted(dict(in_backward_optimizer_filter(dmp.named_parameters(), include=True))) for dmp, _, _ in sides
        ],
        "keys": [sorted(combined.params) for _, combined, _ in sides],
        "state keys": [sorted(combined.state_dict()["state"]) for _, combined, _ in sides],
        "print": [repr(dmp.fused_optimizer) for dmp, _, _ in sides],
    }
