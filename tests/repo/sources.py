"""What the repository's own tests look at: files, and small facts read from their syntax trees."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TOP_FOLDERS = ("hybridrec", "device_backends", "examples", "benchmarks", "tests", "tools", "docs", "docker", ".ci")
CODE_SUFFIXES = (".py", ".pyi", ".h", ".hpp", ".cpp", ".cu", ".sh")
TEXT_SUFFIXES = (*CODE_SUFFIXES, ".md", ".toml", ".txt", ".yaml", ".yml", ".cfg", "")
BUILT = {"__pycache__", "build", "dist"}


def repository_files(*folders: str, suffixes: tuple[str, ...]) -> list[Path]:
    """Files below the folders, or of the whole repository, in a fixed order; build products left out."""
    found = [path for folder in folders or TOP_FOLDERS for path in (ROOT / folder).rglob("*")]
    if not folders:
        found += ROOT.glob("*")
    return sorted(
        path
        for path in found
        if path.is_file()
        and path.suffix in suffixes
        and not BUILT.intersection(path.relative_to(ROOT).parts)
        and not any(part.endswith(".egg-info") for part in path.parts)
    )


def tree_of(path: Path) -> ast.Module:
    """The file's syntax tree."""
    return ast.parse(path.read_text(), filename=str(path))


def module_name(path: Path) -> str:
    """`hybridrec/kernels/base.py` -> `hybridrec.kernels.base`."""
    parts = list(path.relative_to(ROOT).with_suffix("").parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports_of(path: Path) -> Iterator[tuple[int, str, str | None]]:
    """(line, module, name or None) of every import statement, also of those within functions."""
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name, None
        elif isinstance(node, ast.ImportFrom):
            base = ("." * node.level) + (node.module or "")
            for alias in node.names:
                yield node.lineno, base, alias.name


def where(path: Path, line: int) -> str:
    """`hybridrec/backend.py:20`, as editors understand it."""
    return f"{path.relative_to(ROOT)}:{line}"
