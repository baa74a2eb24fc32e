"""The forms in which one batch may come as a `KeyedJaggedTensor`, and training on them against the oracle."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torchrec.distributed import DistributedModelParallel
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor

from hybridrec import HybridTrainPipelineSparseDist
from hybridrec.kernels.factory import make_kernel
from hybridrec.kernels.optimizer import OptimizerSpec
from hybridrec.kernels.torch_kernel import TorchKernel
from tests.distributed.oracle import Batch, Oracle, Table
from tests.distributed.pipelines import PipelineBatch, PipelinedModel, delays, settle
from tests.distributed.scenario import (
    OPTIMIZERS,
    Model,
    Scenario,
    build,
    compare_state,
    device_rows,
    make_dense,
    raise_together,
    state_of,
)

INT32_IDS = (0, 1, -1, 2**31 - 1, -(2**31), *range(100, 125))
IDS = (*INT32_IDS, 2**63 - 1, -(2**63), 2**32, -(2**32), *range(2**62, 2**62 + 25))
"""Of every table."""
MIXED_TABLES = (
    Table(name="one", dim=8, features=("a", "d")),
    Table(name="two", dim=3, features=("b", "never", "e"), is_mean=True, seed=3),  # "never" has no ids
    Table(name="three", dim=5, features=("c", "a"), seed=1),  # "a" is looked up in two tables
)


class _Parts:
    """One batch, taken apart: what the forms are made of."""

    def __init__(self, batch: Batch, rng: random.Random) -> None:
        self.keys = list(batch.bags)
        rng.shuffle(self.keys)
        self.num_bags = batch.num_bags
        bags = [bag for key in self.keys for bag in batch.bags[key]]
        entries = [entry for bag in bags for entry in bag]
        self.values = torch.tensor([e[0] for e in entries], dtype=torch.int64)
        self.weights = torch.tensor([e[1] for e in entries], dtype=torch.float32)
        self.lengths = torch.tensor([len(bag) for bag in bags], dtype=torch.int64)
        self.offsets = torch.nn.functional.pad(self.lengths.cumsum(0), (1, 0))

    def kjt(self, **changes: object) -> KeyedJaggedTensor:
        fields: dict[str, object] = {
            "keys": self.keys,
            "values": self.values,
            "weights": self.weights,
            "lengths": self.lengths,
            "stride": self.num_bags,
        }
        return KeyedJaggedTensor(**(fields | changes))

    def with_one_more(self) -> KeyedJaggedTensor:
        """A key first that no table looks up."""
        return self.kjt(
            keys=["other", *self.keys],
            values=torch.cat([torch.full((self.num_bags,), 5), self.values]),
            weights=torch.cat([torch.full((self.num_bags,), torch.nan), self.weights]),
            lengths=torch.cat([torch.ones(self.num_bags, dtype=torch.int64), self.lengths]),
        )


def every_second(tensor: Tensor, filler: float) -> Tensor:
    """The same entries, with others between them in memory."""
    spaced = torch.full((2 * tensor.numel(),), filler, dtype=tensor.dtype)
    spaced[::2] = tensor
    return spaced[::2]


def column(tensor: Tensor, filler: float) -> Tensor:
    """The same entries as a column of a matrix."""
    matrix = torch.full((tensor.numel(), 3), filler, dtype=tensor.dtype)
    matrix[:, 1] = tensor
    return matrix.T[1]


def _stale(p: _Parts) -> KeyedJaggedTensor:
    """Everything that TorchRec keeps beside the tensors is wrong."""
    wrong = list(range(1, len(p.keys) + 1))
    return p.kjt(
        length_per_key=wrong,
        offset_per_key=[0, *wrong],
        index_per_key={key: 0 for key in p.keys},
        jt_dict={key: JaggedTensor(values=torch.tensor([13]), lengths=torch.tensor([1])) for key in p.keys},
        stride_per_key=wrong,
    )


def _synced(p: _Parts) -> KeyedJaggedTensor:
    """Both lengths and offsets, and everything else that TorchRec computes on the way."""
    kjt = p.kjt(lengths=None, offsets=p.offsets)
    if p.num_bags > 0:  # else TorchRec's own sync fails
        kjt.sync().to_dict()
    return kjt


def _put_together(p: _Parts) -> KeyedJaggedTensor:
    first, second = p.kjt().split([2, len(p.keys) - 2])
    return KeyedJaggedTensor.concat([second, first])


FORMS: dict[str, Callable[[_Parts], KeyedJaggedTensor]] = {
    "plain": lambda p: p.kjt(),
    "offsets": lambda p: p.kjt(lengths=None, offsets=p.offsets),
    "int32 lengths": lambda p: p.kjt(lengths=p.lengths.to(torch.int32)),
    "int32 offsets": lambda p: p.kjt(lengths=None, offsets=p.offsets.to(torch.int32)),
    "int32 ids": lambda p: p.kjt(values=p.values.to(torch.int32)),
    "int32 ids, lengths": lambda p: p.kjt(values=p.values.to(torch.int32), lengths=p.lengths.to(torch.int32)),
    "one key more": _Parts.with_one_more,
    "split": lambda p: p.with_one_more().split([1, len(p.keys)])[1],
    "permuted": lambda p: p.kjt().permute(list(range(len(p.keys)))[::-1]),
    "put together": _put_together,
    "every second": lambda p: p.kjt(
        values=every_second(p.values, 7), weights=every_second(p.weights, 9.0), lengths=every_second(p.lengths, 1)
    ),
    "columns": lambda p: p.kjt(
        values=column(p.values, 7), weights=column(p.weights, 9.0), lengths=column(p.lengths, 1)
    ),
    "stale": _stale,
    "synced": _synced,
    "unsynced": lambda p: p.kjt().sync().unsync(),
    "equal strides": lambda p: p.kjt(stride=None, stride_per_key_per_rank=[[p.num_bags]] * len(p.keys)),
    "own bags": lambda p: p.kjt(
        inverse_indices=(p.keys, torch.arange(p.num_bags).expand(len(p.keys), -1)),  # each example has its own bag
    ),
}


def form_of(step: int, rank: int) -> str:
    """Another one at every step, and not the same on the ranks."""
    return list(FORMS)[(step + 5 * rank) % len(FORMS)]


def make_mixed(scenario: Scenario, step: int, rank: int) -> Batch:
    """Random bags, now and then none; "never" has no ids."""
    rng = random.Random(f"{scenario.seed} {step} {rank}")
    num_bags = 0 if (step + rank) % 9 == 8 else rng.randrange(1, 7)
    ids = INT32_IDS if "int32 ids" in form_of(step, rank) else IDS
    bags: dict[str, list[list[tuple[int, float]]]] = {}
    for feature in dict.fromkeys(f for table in scenario.tables for f in table.features):
        longest = 0 if feature == "never" else 3
        bags[feature] = [
            [(rng.choice(ids), rng.uniform(-1, 1)) for _ in range(rng.randint(0, longest))] for _ in range(num_bags)
        ]
    labels = torch.tensor([float(rng.random() < 0.5) for _ in range(num_bags)])
    return Batch(bags=bags, labels=labels, num_bags=num_bags)


def train_mixed(scenario: Scenario, depth: int | None = None, only: str | None = None) -> None:
    """Batches in all forms, or in one, against the oracle, bit for bit."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    batches = [[make_mixed(scenario, s, r) for r in range(world_size)] for s in range(scenario.steps)]
    kjts = []
    for step, everyone in enumerate(batches):
        form = FORMS[only or form_of(step, rank)]
        kjts.append(form(_Parts(everyone[rank], random.Random(step))))
    train(scenario, batches, kjts, oracle_class=Oracle, universe={t.name: IDS for t in scenario.tables}, depth=depth)


def train(
    scenario: Scenario,
    batches: Sequence[Sequence[Batch]],
    kjts: Sequence[KeyedJaggedTensor],
    *,
    oracle_class: type[Oracle],
    universe: dict[str, Sequence[int]],
    depth: int | None,
) -> DistributedModelParallel:
    """Train this rank against its oracle: in a plain loop, or in a pipeline of some depth.

    Args:
        scenario: Tables and optimizer.
        batches: Step -> rank -> batch, as the oracle sees it.
        kjts: Step -> this rank's batch, as the model sees it.
        oracle_class: Of the oracle.
        universe: Table -> every id that will occur.
        depth: None: no pipeline.
    """
    rank, world_size = dist.get_rank(), dist.get_world_size()
    slots = {t.name: device_rows(scenario, t, batches, world_size) for t in scenario.tables}
    dmp, optimizer = build(scenario, slots, Model if depth is None else PipelinedModel)
    dense = DistributedDataParallel(  # with DMP's own settings: gloo's sum of gradients depends on how they lie
        make_dense(sum(t.dim * len(t.features) for t in scenario.tables)),
        gradient_as_bucket_view=True,
        broadcast_buffers=False,
        static_graph=True,
    )
    dense_optimizer = torch.optim.Adagrad(dense.parameters(), lr=0.1)
    optimizer_class, kwargs = OPTIMIZERS[scenario.optimizer]
    oracle = oracle_class(
        scenario.tables,
        universe,
        OptimizerSpec.from_class(optimizer_class, dict(kwargs), table="oracle"),
        dense,
        is_weighted=scenario.is_weighted,
        rank=rank,
        world_size=world_size,
        make=make_kernel if scenario.device == "cpu" else TorchKernel,
    )
    items = [PipelineBatch(kjt, everyone[rank].labels) for kjt, everyone in zip(kjts, batches, strict=True)]
    step_of: Callable[[PipelineBatch], Tensor]
    if depth is None:

        def step_of(item: PipelineBatch) -> Tensor:
            optimizer.zero_grad()
            loss: Tensor = dmp(item.features, item.labels.to(scenario.device))
            loss.backward()
            optimizer.step()
            return loss
    else:
        pipeline = HybridTrainPipelineSparseDist(dmp, optimizer, torch.device(scenario.device), pipe_n_batch=depth)
        iterator = iter(items)

        def step_of(item: PipelineBatch) -> Tensor:
            loss: Tensor = pipeline.progress(iterator)
            settle(pipeline)
            return loss

    with delays(seed=1) if depth is not None else contextlib.nullcontext():
        for step, (item, everyone) in enumerate(zip(items, batches, strict=True)):
            loss, expected = step_of(item).item(), oracle.step(everyone, dense_optimizer).item()
            difference = "" if loss == expected else f"loss {loss!r}, the oracle's is {expected!r}"
            raise_together(difference or compare_state(scenario, oracle, state_of(dmp)), step)
    if any(s.pins for s in dmp.module.ebc.stats()):
        raise AssertionError(f"pins after the last step: {dmp.module.ebc.stats()}")
    return dmp
