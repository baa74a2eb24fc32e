"""What is asked of the real torch-npu. Runs in a process of its own, with the stub in CANN's place."""

from __future__ import annotations

import ast
import ctypes
import json
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from tests.npu_api.lists import aten_missing, compare, fbgemm_present, operators_of_tables, runs_on_npu
from tests.simnpu.missing import ATEN_MISSING, FBGEMM_PRESENT

ROOT = Path(__file__).resolve().parents[2]
PRODUCT = ("device_backends", "hybridrec", "examples")
OF_STREAMS = ("wait_event", "wait_stream", "record_event", "synchronize", "query")
OF_EVENTS = ("record", "wait", "synchronize", "query")
OF_TABLES = ("sgd", "adagrad", "rowwise_adagrad", "adam")
"""Optimizers that both libraries have for tables."""


def names_of_device_module() -> set[str]:
    """Every ``x`` of ``torch.get_device_module(...).x`` in the product, methods and variables followed one step."""
    found = set[str]()
    for path in (p for folder in PRODUCT for p in (ROOT / folder).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Call):
                function = node.value.func
                if isinstance(function, ast.Attribute) and function.attr in ("_module", "get_device_module"):
                    found.add(node.attr)
    return found


def import_torch_npu(stub: Path) -> None:
    """Through the product's own backend, after what a CUDA build of torch needs."""
    if torch.version.cuda is not None:
        ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libc10.so"), mode=ctypes.RTLD_GLOBAL)
        ctypes.CDLL(str(stub / "libforget_keys.so")).forget_keys()
    import torch_npu  # noqa: F401


def check_names() -> str:
    names = names_of_device_module()
    assert {"Stream", "current_stream", "mem_get_info"} <= names, f"the product is not read right: {sorted(names)}"
    module = torch.get_device_module("npu")
    missing = sorted(n for n in names if not hasattr(module, n))
    missing += [f"Stream.{n}" for n in OF_STREAMS if not hasattr(module.Stream, n)]
    missing += [f"Event.{n}" for n in OF_EVENTS if not hasattr(module.Event, n)]
    assert not missing, f"torch.npu lacks {', '.join(missing)}"
    return ", ".join(sorted(names))


def check_backend() -> str:
    """Every method of the product's backend, on the real module."""
    from device_backends.npu import backend

    assert backend.unavailable_reason() is None, backend.unavailable_reason()
    device = backend.indexed(torch.device("npu"))
    assert device == torch.device("npu", 0)
    backend.use_device(device)
    stream, current = backend.make_stream(device), backend.current_stream(device)
    staging = backend.empty_staging(4)
    assert staging.is_pinned() and staging.dtype == torch.float32
    staging.copy_(torch.arange(4.0))
    with backend.use_stream(stream):
        assert backend.current_stream(device) == stream != current
        copied = staging.to(device, non_blocking=True)
        event = backend.record_event(stream)
    current.wait_event(event)
    current.wait_stream(stream)
    backend.record_stream(copied, current)
    back = backend.empty_staging(4)
    back.copy_(copied, non_blocking=True)
    backend.record_event(current).synchronize()
    assert back.tolist() == [0.0, 1.0, 2.0, 3.0]
    backend.synchronize(device)
    free, total = backend.memory_bytes(device)
    assert 0 < free <= total
    return f"{type(stream).__module__}.{type(stream).__name__}, pinned memory, copies, events"


def check_collectives() -> str:
    import torch.distributed as dist

    name = dist.Backend.default_device_backend_map.get("npu")
    assert name == "hccl" and "npu" in dist.Backend.backend_capability["hccl"], f"npu has collectives {name!r}"
    return "hccl serves npu"


def check_operators(operators: list[str]) -> str:
    """A kernel of torch-npu's own, or one that is made of others; the rest would run on the CPU, with copies."""
    import fbgemm_gpu  # noqa: F401 - its operators are among them

    assert len(operators) > 20, operators
    lacking = [name for name in operators if not runs_on_npu(name)]
    assert not lacking, f"would fall back to the CPU: {', '.join(lacking)}"
    return f"{len(operators)} operators, none missing"


def check_fbgemm_ascend() -> str:
    """Every operator that FBGEMM's tables call is registered, for the chip that the environment names."""
    import fbgemm_ascend  # noqa: F401

    names = operators_of_tables(OF_TABLES)
    lacking = [name for name in names if not runs_on_npu(name)]
    assert not lacking, f"fbgemm-ascend lacks {', '.join(lacking)}"
    return f"tables find {', '.join(name.removeprefix('fbgemm::') for name in names)}"


def check_host_tables() -> str:
    """After the import of fbgemm_ascend tables in host memory train what an unlimited table does, bit for bit."""
    import torch.distributed as dist

    from tests.distributed.pipelines import run_pipeline_against_oracle
    from tests.distributed.scenario import OPTIMIZERS, Scenario, run_against_oracle

    assert "fbgemm_ascend" in sys.modules
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        for name in OPTIMIZERS:
            run_against_oracle(Scenario(optimizer=name, steps=10))
        run_pipeline_against_oracle(Scenario(cache="tenth", steps=10), 3)
    finally:
        dist.destroy_process_group()
    return f"{', '.join(OPTIMIZERS)}, the pipeline"


def main(stub: Path, operators: list[str], *, update: bool) -> int:
    """Print a line a check; the exit status says whether all held."""
    failed = 0
    for name, check in _all(stub, operators, update=update):
        try:
            print(f"ok      {name}: {check() or 'done'}", flush=True)
        except Exception as e:
            failed += 1
            print(f"FAILED  {name}: {type(e).__name__}: {e}", flush=True)
    return 1 if failed else 0


def _all(stub: Path, operators: list[str], *, update: bool) -> Iterator[tuple[str, Callable[[], Any]]]:
    yield "import", lambda: import_torch_npu(stub)
    yield "names", check_names
    yield "backend", check_backend
    yield "collectives", check_collectives
    yield "operators", lambda: check_operators(operators)
    yield "torch-npu lacks", lambda: compare(ATEN_MISSING, aten_missing(), update=update)
    yield "fbgemm-ascend", check_fbgemm_ascend  # from here on FBGEMM is changed in this process
    yield "fbgemm-ascend has", lambda: compare(FBGEMM_PRESENT, fbgemm_present(), update=update)
    yield "host tables", check_host_tables


if __name__ == "__main__":
    status = main(Path(sys.argv[1]), json.loads(Path(sys.argv[2]).read_text()), update="--update" in sys.argv[3:])
    sys.stdout.flush()
    os._exit(status)  # torch-npu's own end asks CANN for more than the stub has
