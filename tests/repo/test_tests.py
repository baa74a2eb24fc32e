"""Tests that can fail: every one of them checks something."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from tests.repo.sources import ROOT, imports_of, repository_files, tree_of

TEST_FILES = [path for path in repository_files("tests", suffixes=(".py",)) if path.name.startswith("test_")]
CHECKING_CALLS = ("raises", "warns", "fail", "assert_", "check_")
"""pytest's and torch's names, and ours: a function named `check_x` raises unless x holds."""


def functions_of(path: Path) -> dict[str, ast.AST]:
    """Name -> definition, of the file's functions and classes at any depth."""
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    return {node.name: node for node in ast.walk(tree_of(path)) if isinstance(node, kinds)}


def checks(path: Path, name: str, seen: set[tuple[Path, str]]) -> bool:
    """Whether a function asserts, or uses (calls, or hands to ranks) one of our test helpers that does."""
    node = functions_of(path).get(name)
    if node is None or (path, name) in seen:
        return False
    seen.add((path, name))
    imported = {
        imported_name: ROOT / (module.replace(".", "/") + ".py")
        for _, module, imported_name in imports_of(path)
        if imported_name is not None and module.startswith("tests.")
    }
    for part in ast.walk(node):
        if isinstance(part, ast.Assert | ast.Raise):
            return True
        used = part.attr if isinstance(part, ast.Attribute) else part.id if isinstance(part, ast.Name) else None
        if used is None:
            continue
        if used.startswith(CHECKING_CALLS):
            return True
        if used in functions_of(path) and used != name and checks(path, used, seen):
            return True
        if used in imported and imported[used].exists() and checks(imported[used], used, seen):
            return True
    return False


@pytest.mark.parametrize("path", TEST_FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_test_checks_something(path: Path) -> None:
    tests = [name for name in functions_of(path) if name.startswith("test_")]
    assert tests or "TestCase" in path.read_text(), "a test file without tests"
    assert [name for name in tests if not checks(path, name, set())] == []


def test_an_empty_test_would_be_found(tmp_path: Path) -> None:
    path = tmp_path / "test_x.py"
    path.write_text("def helper():\n    assert 1\n\ndef test_a():\n    print(1)\n\ndef test_b():\n    run(helper)\n")
    assert not checks(path, "test_a", set())
    assert checks(path, "test_b", set())
