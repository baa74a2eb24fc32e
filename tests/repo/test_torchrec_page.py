"""docs/torchrec.md says of every public name of TorchRec that touches embeddings what becomes of it."""

from __future__ import annotations

import importlib
import importlib.metadata
import inspect
import re

import pytest

from tests.repo.sources import ROOT

PAGE = "docs/torchrec.md"
VERDICTS = {"works", "differs", "refused", "untried", "TorchRec's own"}
MODULES = """
    torchrec.modules.embedding_configs torchrec.modules.embedding_modules torchrec.modules.embedding_tower
    torchrec.modules.fused_embedding_modules torchrec.modules.mc_embedding_modules torchrec.modules.fp_embedding_modules
    torchrec.distributed.embedding torchrec.distributed.embeddingbag torchrec.distributed.fused_embedding
    torchrec.distributed.fused_embeddingbag torchrec.distributed.quant_embedding
    torchrec.distributed.quant_embeddingbag torchrec.distributed.embedding_tower_sharding
    torchrec.distributed.mc_embedding torchrec.distributed.mc_embeddingbag torchrec.distributed.fp_embeddingbag
    torchrec.distributed.sharding_plan torchrec.distributed.shard torchrec.distributed.model_parallel
    torchrec.distributed.train_pipeline torchrec.distributed.planner torchrec.optim
    torchrec.optim.apply_optimizer_in_backward torchrec.optim.keyed torchrec.optim.fused torchrec.optim.optimizers
    torchrec.optim.warmup torchrec.optim.clipping torchrec.optim.rowwise_adagrad torchrec.optim.semi_sync
    torchrec.sparse.jagged_tensor torchrec.sparse.jagged_tensor_validator torchrec.sparse.tensor_dict
    torchrec.quant.embedding_modules torchrec.quant.utils torchrec.inference.modules
    torchrec.models.dlrm torchrec.models.deepfm
""".split()
REEXPORTS = {"torchrec.distributed.train_pipeline", "torchrec.distributed.planner", "torchrec.optim"}


def public_names(module_name: str) -> set[str]:
    """Classes and functions that the module defines, or, for a package, those of TorchRec that it shows."""
    module = importlib.import_module(module_name)
    values = {n: v for n, v in vars(module).items() if not n.startswith("_")}
    kinds = {n: v for n, v in values.items() if inspect.isclass(v) or inspect.isfunction(v)}
    where = "torchrec." if module_name in REEXPORTS else module_name
    return {n for n, v in kinds.items() if v.__module__.startswith(where)}


def rows() -> list[tuple[str, list[str], str, str]]:
    """(module, names, verdict, rest of the row) of the page."""
    found = []
    for section in re.split(r"^### ", (ROOT / PAGE).read_text(), flags=re.MULTILINE)[1:]:
        module = section.partition("\n")[0].strip().strip("`")
        for line in section.splitlines():
            cells = [cell.strip() for cell in line.strip("|").split(" | ")]
            if line.startswith("| `"):
                found.append((module, re.findall(r"`([^`]+)`", cells[0]), cells[1], " ".join(cells[2:])))
    return found


@pytest.mark.skipif(
    importlib.metadata.version("torchrec") != "1.8.0", reason="the page lists the names of TorchRec 1.8.0"
)
@pytest.mark.parametrize("module", MODULES)
def test_every_public_name_has_one_row(module: str) -> None:
    listed = [name for where, names, _, _ in rows() if where == module for name in names]
    assert sorted(listed) == sorted(public_names(module))


def test_verdicts_name_tests_that_exist() -> None:
    checked = 0
    for module, names, verdict, rest in rows():
        where = f"{module}: {names[0]}"
        assert verdict in VERDICTS, where
        tests = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", rest)
        if verdict in ("works", "refused"):
            assert tests, f"{where} is said to be {verdict!r} and names no test"
        for path, test in tests:
            checked += 1
            assert re.search(rf"^def {test}\(", (ROOT / path).read_text(), re.MULTILINE), f"{where}: {path}::{test}"
    assert checked > 40
