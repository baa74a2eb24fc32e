"""hybridrec names no device: what depends on one asks its backend. Only device_backends/ may name a device type."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

import pytest

from tests.repo.sources import ROOT, TEXT_SUFFIXES, repository_files, tree_of, where

DEVICE_NAME = re.compile(r"(cpu|cuda|npu|xpu|mtia|hccl|nccl)(:\d+)?")
DEVICE_ATTRIBUTES = {"cuda", "npu", "is_cuda", "is_npu", "is_cpu"}
"""``x.cpu()`` is not among them: a copy to host memory, in torch's words, from whatever device."""
DEVICE_MODULES = re.compile(r"(torch_npu|fbgemm_ascend|torch\.(cuda|npu|xpu|mtia))(\..+)?")
DEVICE_WORDS = re.compile(r"\b(cuda|npu|xpu|mtia|hccl|nccl|torch_npu|fbgemm_ascend)\b", re.IGNORECASE)
"""Nowhere in hybridrec, not even in comments. Of "cpu", which also runs the host's code, only strings count."""
HOST_MODULE = ROOT / "hybridrec" / "backend.py"
"""Defines HOST, host memory in torch's words: the one place that says ``torch.device("cpu")``."""


def device_names(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """(line, text) of strings that name devices or process groups, attributes such as ``torch.cuda``, and imports."""
    for node in ast.walk(tree):
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            base = f"{node.module}." if isinstance(node, ast.ImportFrom) else ""
            for alias in node.names:
                if DEVICE_MODULES.fullmatch(base + alias.name):
                    yield node.lineno, base + alias.name
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            # "cpu:gloo,npu:hccl" is how torch spells a pair of backends
            if any(DEVICE_NAME.fullmatch(part) for part in re.split(r"[,:]", node.value)):
                yield node.lineno, repr(node.value)
        elif isinstance(node, ast.Attribute) and node.attr in DEVICE_ATTRIBUTES:
            yield node.lineno, f".{node.attr}"


def test_no_device_is_named() -> None:
    files = repository_files("hybridrec", suffixes=(".py",))
    assert HOST_MODULE in files
    found = [f"{where(path, line)}: {text}" for path in files for line, text in device_names(tree_of(path))]
    allowed = [entry for entry in found if entry.startswith("hybridrec/backend.py") and entry.endswith(": 'cpu'")]
    assert len(allowed) == 1
    assert [entry for entry in found if entry not in allowed] == []


def test_no_device_is_spoken_of() -> None:
    files = repository_files("hybridrec", suffixes=TEXT_SUFFIXES)
    assert {".py", ".cpp", ".h", ".txt"} <= {path.suffix for path in files}
    found = [
        f"{where(path, number)}: {line.strip()}"
        for path in files
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if DEVICE_WORDS.search(line)
    ]
    assert found == []


@pytest.mark.parametrize(
    ("source", "is_found"),
    [
        ('torch.device("cuda:0")', True),
        ('init("cpu:gloo,npu:hccl")', True),
        ("x = torch.cuda.Stream()", True),
        ("rows.is_cuda", True),
        ("import torch_npu", True),
        ("from torch.cuda import Stream", True),
        ("from torch import npu", True),
        ("from torch import nn", False),
        ('f"{kind}:cuda"', True),
        ('"""Works on cpu and cuda."""', False),
        ("rows.to(HOST)", False),
        ("rows.cpu()", False),
    ],
)
def test_names_would_be_found(source: str, is_found: bool) -> None:
    assert bool(list(device_names(ast.parse(source)))) == is_found
