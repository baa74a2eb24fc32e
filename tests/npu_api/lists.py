"""Which operators the libraries of an NPU have, read from the dispatcher once their wheels are imported."""

from __future__ import annotations

import importlib.metadata
import re
from pathlib import Path
from typing import Any

import torch

from tests.simnpu.missing import ATEN_MISSING, FBGEMM_PRESENT, read_list

_MADE_OF_OTHERS = (
    "CompositeImplicitAutograd",
    "CompositeExplicitAutograd",
    "CompositeExplicitAutogradNonFunctional",
)
_has: Any = torch._C._dispatch_has_kernel_for_dispatch_key  # type: ignore[attr-defined]


def runs_on_npu(operator: str) -> bool:
    """By a kernel of its own, or as others that it is made of; else on the CPU, with copies."""
    return _has(operator, "PrivateUse1") or any(_has(operator, key) for key in _MADE_OF_OTHERS)


def names_of(library: str) -> list[str]:
    """Every operator of "aten" or "fbgemm" that torch knows now."""
    names: list[str] = torch._C._dispatch_get_all_op_names()  # type: ignore[attr-defined]
    return sorted(name for name in names if name.startswith(f"{library}::"))


def aten_missing() -> list[str]:
    """What the simulated NPU refuses of PyTorch's operators; see `tests.simnpu.missing`.

    An ``out`` form is not counted where torch-npu has the operator itself: only the simulation gets from one to the
    other, since PyTorch composes there what torch-npu has kernels of.
    """
    served = {name.partition(".")[0] for name in names_of("aten") if _has(name, "PrivateUse1")}
    return [
        name
        for name in names_of("aten")
        if _has(name, "CPU") and not runs_on_npu(name) and not (_is_out_form(name) and name.partition(".")[0] in served)
    ]


def _is_out_form(name: str) -> bool:
    base, _, overload = name.removeprefix("aten::").partition(".")
    operator = getattr(getattr(torch.ops.aten, base), overload or "default")
    return any(argument.is_out for argument in operator._schema.arguments)


def fbgemm_present() -> list[str]:
    """What it has of FBGEMM's. The library for A2 and A3 is one; the A3's binaries are fewer."""
    import fbgemm_ascend

    binaries = Path(fbgemm_ascend.__file__).parent / "opp"
    on_a2, on_a3 = ({path.name for path in (binaries / chip / "vendors").iterdir()} for chip in ("A2", "A3"))
    only_on_a2 = {f"fbgemm::{name}" for name in on_a2 - on_a3}
    return [name for name in names_of("fbgemm") if _has(name, "PrivateUse1") and name not in only_on_a2]


def operators_of_tables(optimizers: tuple[str, ...]) -> list[str]:
    """What FBGEMM's Python calls for its tables: one lookup an optimizer."""
    import fbgemm_gpu

    folder = Path(fbgemm_gpu.__file__).parent / "split_embedding_codegen_lookup_invokers"
    found = set[str]()
    for optimizer in optimizers:
        names = re.findall(r"torch\.ops\.fbgemm\.(\w+)", (folder / f"lookup_{optimizer}.py").read_text())
        if not names:
            raise AssertionError(f"{folder}/lookup_{optimizer}.py calls no operator: FBGEMM's sources changed")
        found.update(names)
    return sorted(f"fbgemm::{name}" for name in found)


def compare(path: Path, now: list[str], *, update: bool) -> str:
    """The list in the file is the one that the wheels give, or becomes so.

    Raises:
        AssertionError: They differ; says in what, and how to write the file anew.
    """
    if update:
        path.write_text("\n".join([_heading(path), *now]) + "\n")
        return f"{len(now)} written to {path.name}"
    listed = read_list(path)
    difference = sorted(listed.symmetric_difference(now))
    if difference:
        raise AssertionError(f"{path.name} differs in {', '.join(difference)}: make npu-api ARGS=--update")
    return f"{len(now)}, as in {path.name}"


def _heading(path: Path) -> str:
    what = {ATEN_MISSING: "Without a kernel for the NPU", FBGEMM_PRESENT: "With a kernel for the NPU"}[path]
    of = ("torch", "torch-npu") if path == ATEN_MISSING else ("fbgemm-gpu-cpu", "fbgemm-ascend")
    versions = ", ".join(f"{name} {importlib.metadata.version(name).partition('+')[0]}" for name in of)
    return f"# {what}: {versions}. Written by `make npu-api ARGS=--update`; see missing.py."
