"""What one schedule is about: tables, caches, batches. All of it from a tape, so that a seed says everything."""

from __future__ import annotations

from dataclasses import dataclass, field

from hybridrec.kernels.optimizer import OptimizerSpec
from tests.distributed.oracle import Table
from tests.model_check.scheduler import Tape

OPTIMIZERS = ("sgd", "adagrad", "rowwise_adagrad", "adam")
EXTREME_IDS = (0, -1, -(2**63), 2**63 - 1)


@dataclass(frozen=True, kw_only=True)
class CheckedBatch:
    """One batch of one rank."""

    number: int
    bags: tuple[tuple[tuple[tuple[int, float], ...], ...], ...]
    """[F][B] -> (id, weight)s."""
    is_trained: bool
    """False: its forward is never followed by a backward."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """One collection on one rank, and what happens to it."""

    tables: tuple[Table, ...]
    optimizers: tuple[OptimizerSpec, ...]
    """[T]"""
    is_weighted: bool
    spare_slots: tuple[int, ...]
    """[T], beyond what the largest batch needs; -1: one too few, so that it goes in passes."""
    grows: bool
    """Slots start at 1 and grow with the batches in flight (placement "host only")."""
    quota: int
    """`max_rows` with ``full_policy="evict"``; 0 = rows are never dropped."""
    depth: int
    """Most batches in flight."""
    universe: tuple[int, ...]
    """Ids of every table."""
    batches: tuple[CheckedBatch, ...]
    withdrawals: int
    """How often batches in flight may be taken back, and so on."""
    reads: int
    flushes: int
    demands: int
    """How often a batch is waited for while others hold pins."""
    slots: tuple[int, ...] = field(default=(), init=False)
    """[T] at the start."""

    def __post_init__(self) -> None:
        first, needed = 0, []
        for table, spare in zip(self.tables, self.spare_slots, strict=True):
            features = range(first, first + len(table.features))
            first += len(table.features)
            uniques = [len({i for f in features for bag in b.bags[f] for i, _ in bag}) for b in self.batches]
            needed.append(1 if self.grows else max(1, max(uniques) + spare))
        object.__setattr__(self, "slots", tuple(needed))


def draw_case(tape: Tape) -> Case:
    """Every field from a tape."""
    evicts = tape.choose(10) == 9
    tables, optimizers = [], []
    for t in range(1 + tape.choose(3)):
        features = tuple(f"f{t}_{i}" for i in range(1 + tape.choose(2)))
        tables.append(Table(name=f"t{t}", dim=(4, 3, 8, 1)[tape.choose(4)], features=features, seed=t))
        optimizers.append(_draw_optimizer(tape))
    num_ids = 60 if evicts else 4 + tape.choose(9)
    universe = tuple((EXTREME_IDS + tuple(7919 * i for i in range(1, 60)))[:num_ids])
    num_batches = 26 if evicts else 8 + tape.choose(8)
    num_features = sum(len(t.features) for t in tables)
    return Case(
        tables=tuple(tables),
        optimizers=tuple(optimizers),
        is_weighted=tape.choose(3) == 2,
        spare_slots=tuple((0, 1, 0, 2, -1)[tape.choose(5)] for _ in tables),
        grows=not evicts and tape.choose(6) == 5,
        quota=20 + tape.choose(16) if evicts else 0,
        depth=1 + tape.choose(4 if not evicts else 6),
        universe=universe,
        batches=tuple(
            _draw_batch(tape, number, num_features, universe, evicts=evicts) for number in range(num_batches)
        ),
        withdrawals=tape.choose(3),
        reads=tape.choose(3),
        flushes=tape.choose(2),
        demands=tape.choose(3),
    )


def _draw_optimizer(tape: Tape) -> OptimizerSpec:
    kind = OPTIMIZERS[tape.choose(4)]
    initial = 0.25 if kind.endswith("adagrad") and tape.choose(2) else 0.0
    decay = 0.01 if tape.choose(5) == 4 else 0.0
    return OptimizerSpec(kind=kind, learning_rate=0.05, initial_accumulator_value=initial, weight_decay=decay)


def _draw_batch(tape: Tape, number: int, num_features: int, universe: tuple[int, ...], *, evicts: bool) -> CheckedBatch:
    """Zero to three ids a bag, with repetitions. With evictions ids drift, so that old ones fall out of use."""
    num_bags = (1, 1, 2, 1, 0)[tape.choose(5)] if not evicts else 1
    first = number * 2 % len(universe) if evicts else 0
    span = 8 if evicts else len(universe)
    bags = []
    for _ in range(num_features):
        of_feature = []
        for _ in range(num_bags):
            length = tape.choose(3) if not evicts else 1 + tape.choose(2)
            ids = [universe[(first + tape.choose(span)) % len(universe)] for _ in range(length)]
            of_feature.append(tuple((i, (tape.choose(9) - 4) / 4) for i in ids))
        bags.append(tuple(of_feature))
    return CheckedBatch(number=number, bags=tuple(bags), is_trained=tape.choose(6) != 5)
