"""Which kernel serves a table, and which tables share one."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from hybridrec.backend import HOST, KernelRequest
from hybridrec.errors import BackendError, ConfigError
from hybridrec.kernels import factory
from hybridrec.kernels.factory import group_tables, kernel_choice, make_kernel
from hybridrec.kernels.optimizer import OptimizerKind, OptimizerSpec
from hybridrec.kernels.tbe_kernel import TbeKernel
from hybridrec.kernels.torch_kernel import TorchKernel
from tests.unit.kernels.kernel_cases import make_spec


@pytest.mark.parametrize(
    ("kind", "dim", "more", "expected"),
    [
        ("sgd", 8, {}, TbeKernel),
        ("adagrad", 64, {}, TbeKernel),
        ("rowwise_adagrad", 4, {}, TbeKernel),
        ("sgd", 6, {}, TorchKernel),
        ("adam", 8, {}, TorchKernel),
        ("adagrad", 8, {"weight_decay": 0.1}, TorchKernel),
    ],
)
@pytest.mark.parametrize("is_weighted", [False, True])
@pytest.mark.parametrize("num_slots", [1, 1000])
def test_class_of_a_kernel_on_the_host(
    kind: OptimizerKind,
    dim: int,
    more: dict[str, float],
    expected: type,
    is_weighted: bool,
    num_slots: int,
) -> None:
    spec = make_spec(kind, (dim, dim), is_weighted=is_weighted, num_slots=num_slots, more=more)
    assert type(make_kernel(spec)) is expected


@dataclass(frozen=True)
class Table:
    name: str
    dim: int
    optimizer: OptimizerSpec


def name_of(table: Table) -> str:
    return kernel_choice(table.optimizer, dim=table.dim, is_weighted=False, device=HOST).name


def groups_of(*tables: Table) -> list[str]:
    groups = group_tables(tables, dim=lambda t: t.dim, optimizer=lambda t: t.optimizer, name=name_of)
    return ["".join(t.name for t in group) for group in groups]


def test_tables_share_a_kernel_if_class_and_optimizer_are_equal() -> None:
    sgd, adam = OptimizerSpec(kind="sgd"), OptimizerSpec(kind="adam")
    other = OptimizerSpec(kind="sgd", learning_rate=0.5)
    tables = [Table("a", 8, sgd), Table("b", 8, other), Table("c", 64, sgd), Table("d", 6, sgd), Table("e", 8, adam)]
    assert groups_of(*tables) == ["ac", "b", "d", "e"]
    assert groups_of() == []


def test_torch_kernels_hold_one_dim() -> None:
    adam = OptimizerSpec(kind="adam")
    assert groups_of(Table("a", 8, adam), Table("b", 4, adam), Table("c", 8, adam)) == ["ac", "b"]


def test_every_group_makes_a_kernel() -> None:
    sgd = OptimizerSpec(kind="sgd")
    tables = [Table("a", 8, sgd), Table("b", 6, sgd), Table("c", 4, sgd)]
    groups = group_tables(tables, dim=lambda t: t.dim, optimizer=lambda t: t.optimizer, name=name_of)
    kernels = [make_kernel(make_spec("sgd", [t.dim for t in group], is_weighted=True)) for group in groups]
    assert [type(k) for k in kernels] == [TbeKernel, TorchKernel]


@pytest.mark.parametrize(
    ("kind", "dims", "feature_table", "more", "match"),
    [
        ("adam", (8,), (0,), {}, "table 't0': FBGEMM has no optimizer 'adam' on the host.*Use TorchKernel"),
        ("sgd", (8, 6), (0, 1), {}, "table 't1': dim=6 is no multiple of 4"),
        ("sgd", (8,), (0,), {"weight_decay": 0.5}, "weight_decay=0.5 would be ignored by FBGEMM"),
        ("sgd", (8, 8), (0, 1, 0), {}, r"feature_table=\(0, 1, 0\) is not ascending"),
    ],
)
def test_tbe_kernel_refuses_what_fbgemm_cannot_do(
    kind: OptimizerKind, dims: tuple[int, ...], feature_table: tuple[int, ...], more: dict[str, float], match: str
) -> None:
    with pytest.raises(ConfigError, match=match):
        TbeKernel(make_spec(kind, dims, feature_table=feature_table, more=more))


def test_a_backend_that_answers_something_else_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    class Backend:
        def tbe_placement(self, request: KernelRequest) -> str | None:
            return None

    monkeypatch.setattr(factory, "resolve_backend", lambda _: Backend())
    with pytest.raises(BackendError, match="its backend answers None for optimizer 'sgd', dim 8"):
        kernel_choice(OptimizerSpec(kind="sgd"), dim=8, is_weighted=False, device=HOST)
