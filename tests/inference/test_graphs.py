"""What is saved: traced, scripted and exported graphs give the bits of the module, also where there is torch alone."""

from __future__ import annotations

import io
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torchrec.fx import Tracer

from hybridrec.inference import freeze
from tests.inference.collections import batch, flat, hostile_batch, jagged, pooled, sequences

pytestmark = pytest.mark.filterwarnings(
    "ignore:.torch.jit:DeprecationWarning",  # all of it, in favour of torch.export
    "ignore:TorchScript will treat type annotations:UserWarning",  # of TorchRec's KeyedJaggedTensor
    "ignore:The TorchScript type system doesn't support instance-level annotations:UserWarning",  # the same
)
CASES = [("fp32", "initial", False), ("fp16", "zero", True), ("int8", "initial", True), ("int4", "zero", False)]
SERVE = Path(__file__).parent / "serve"
ALONE = """
import sys, torch
model, batch = torch.jit.load(sys.argv[1]), torch.jit.load(sys.argv[2])
pools = model(batch.values, batch.lengths, batch.weights)
wrong = [name for name in sys.modules if name.partition(".")[0] in ("hybridrec", "torchrec", "fbgemm_gpu", "torch_npu")]
assert not wrong, wrong
assert not [name for name in dir(torch.ops.fbgemm) if not name.startswith("_") and name != "name"]
open(sys.argv[3], "wb").write(pools.numpy().tobytes())
"""


class Batch(nn.Module):
    """A batch as a file that C++ reads."""

    def __init__(self, values: Tensor, lengths: Tensor, weights: Tensor | None) -> None:
        super().__init__()
        self.values, self.lengths = values, lengths
        self.weights = torch.empty(0) if weights is None else weights


def again(module: torch.jit.ScriptModule) -> torch.jit.ScriptModule:
    """Saved and loaded."""
    file = io.BytesIO()
    torch.jit.save(module, file)
    file.seek(0)
    return torch.jit.load(file)


@pytest.mark.parametrize(("dtype", "unknown_row", "is_weighted"), CASES)
def test_traced_and_scripted_collections_serve_the_same_bits(dtype: str, unknown_row: str, is_weighted: bool) -> None:
    frozen = freeze(pooled(is_weighted), dtype=dtype, unknown_row=unknown_row)
    traced = torch.fx.GraphModule(frozen, Tracer().trace(frozen))
    modules = [traced, torch.jit.script(frozen), torch.jit.script(traced), again(torch.jit.script(frozen))]
    for features in (
        hostile_batch(is_weighted=is_weighted),
        batch(3, is_weighted=is_weighted),
        hostile_batch(0, is_weighted),
    ):
        want = frozen(features)
        for module in modules:
            got = module(features)
            assert torch.equal(got.values(), want.values()) and got.keys() == want.keys()


@pytest.mark.parametrize("need_indices", [False, True])
def test_traced_and_scripted_sequences_serve_the_same_bits(need_indices: bool) -> None:
    frozen = freeze(sequences(need_indices), dtype="int8")
    features = hostile_batch()
    want = frozen(features)
    for module in (torch.fx.GraphModule(frozen, Tracer().trace(frozen)), again(torch.jit.script(frozen))):
        got = module(features)
        assert list(got) == list(want) and torch.equal(jagged(got), jagged(want))
        for name in want:
            assert torch.equal(got[name].lengths(), want[name].lengths())
            assert not need_indices or torch.equal(got[name].weights(), want[name].weights())


@pytest.mark.parametrize(("dtype", "unknown_row", "is_weighted"), [CASES[2], CASES[3]])
def test_exported_tables_serve_the_same_bits(dtype: str, unknown_row: str, is_weighted: bool) -> None:
    tables = freeze(pooled(is_weighted), dtype=dtype, unknown_row=unknown_row).tables
    exported = exported_tables(tables, is_weighted).module()
    for features in (hostile_batch(is_weighted=is_weighted), batch(3, 2, is_weighted)):
        inputs = [t for t in flat(features, tables.feature_names) if t is not None]
        assert torch.equal(exported(*inputs), tables(*inputs))


def exported_tables(tables: nn.Module, is_weighted: bool) -> torch.export.ExportedProgram:
    """For any number of ids, and two bags or more: torch.export takes a size of 1 for a constant."""
    inputs = [t for t in flat(hostile_batch(is_weighted=is_weighted), tables.feature_names) if t is not None]
    n, b = torch.export.Dim("n"), torch.export.Dim("b")
    shapes = [{0: n}, {0: tables.num_features * b}, {0: n}]
    return torch.export.export(tables, tuple(inputs), dynamic_shapes=tuple(shapes[: len(inputs)]))


def saved(tmp_path: Path, dtype: str, unknown_row: str, is_weighted: bool) -> tuple[list[str], np.ndarray]:
    """Paths of a model, a batch and an output, and what the output should be."""
    tables = freeze(pooled(is_weighted), dtype=dtype, unknown_row=unknown_row).tables
    inputs = flat(hostile_batch(is_weighted=is_weighted), tables.feature_names)
    paths = [str(tmp_path / name) for name in ("model.pt", "batch.pt", "out")]
    torch.jit.script(tables).save(paths[0])
    torch.jit.script(Batch(*inputs)).save(paths[1])
    return paths, tables(*inputs).numpy()


@pytest.mark.parametrize(("dtype", "unknown_row", "is_weighted"), CASES[1:3])
def test_a_process_with_torch_alone_serves_the_same_bits(
    tmp_path: Path, dtype: str, unknown_row: str, is_weighted: bool
) -> None:
    paths, want = saved(tmp_path, dtype, unknown_row, is_weighted)
    subprocess.run([sys.executable, "-c", ALONE, *paths], cwd=tmp_path, check=True)
    assert Path(paths[2]).read_bytes() == want.tobytes()


@pytest.fixture(scope="module")
def serve(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The C++ program, built with the torch of this environment."""
    build = tmp_path_factory.mktemp("serve")
    prefix = f"-DCMAKE_PREFIX_PATH={torch.utils.cmake_prefix_path}"
    subprocess.run(["cmake", "-S", SERVE, "-B", build, prefix, "-DCMAKE_BUILD_TYPE=Release"], check=True)
    subprocess.run(["cmake", "--build", build], check=True)
    return build / "serve"


@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "unknown_row", "is_weighted"), CASES)
def test_a_cpp_program_serves_the_same_bits(
    serve: Path, tmp_path: Path, dtype: str, unknown_row: str, is_weighted: bool
) -> None:
    paths, want = saved(tmp_path, dtype, unknown_row, is_weighted)
    told = subprocess.run([serve, *paths], check=True, capture_output=True, text=True, env={"PATH": os.environ["PATH"]})
    assert told.stdout == "6 x 16\n" and Path(paths[2]).read_bytes() == want.tobytes()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # the compiler's own, of its own calls
def test_an_ahead_of_time_compiled_model_serves_the_same_bits(tmp_path: Path) -> None:
    """Not for batches without bags: what AOTInductor of torch 2.13 compiles ends the process there."""
    tables = freeze(pooled(), dtype="int8").tables
    package = torch._inductor.aoti_compile_and_package(
        exported_tables(tables, False), package_path=str(tmp_path / "model.pt2")
    )
    compiled = torch._inductor.aoti_load_package(package)
    no_ids = (torch.empty(0, dtype=torch.int64), torch.zeros(8, dtype=torch.int64))
    for inputs in (
        flat(hostile_batch(), tables.feature_names)[:2],
        flat(batch(4, 1), tables.feature_names)[:2],
        no_ids,
    ):
        assert torch.equal(compiled(*inputs), tables(*inputs))
