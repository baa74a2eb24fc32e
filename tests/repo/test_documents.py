"""The texts name commands, files and code that exist."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

from tests.repo.sources import ROOT, repository_files

DOCUMENTS = [path for path in repository_files(suffixes=(".md",)) if "data" not in path.parts]
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\(([^)#\s]+)(?:#[^)]*)?\)")
MAKE_TARGET = re.compile(r"^([a-z]+):", re.MULTILINE)


def blocks(path: Path, language: str) -> list[str]:
    """The fenced code blocks of one language."""
    return [text for name, text in BLOCK.findall(path.read_text()) if name == language]


def make_targets() -> set[str]:
    """What `make` can be asked for."""
    return set(MAKE_TARGET.findall((ROOT / "Makefile").read_text()))


def test_first_block_of_the_readme_is_the_two_commands() -> None:
    first = BLOCK.search((ROOT / "README.md").read_text())
    assert first is not None and first[1] == "bash"
    commands = [line.partition("#")[0].strip() for line in first[2].splitlines()]
    assert commands == ["make demo", "make test"]


def test_the_table_of_stacks_has_the_pins_of_pyproject() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    text = (ROOT / "README.md").read_text()
    for stack in ("cpu", "cuda", "npu"):
        (row,) = re.findall(rf"^\| `{stack}` \|.*$", text, re.MULTILINE)
        versions = {pin.partition("==")[2] for pin in extras[stack] if "==" in pin}
        assert set(re.findall(r"\d+\.\d+\.[\w.]+", row)) == versions


def test_every_make_command_in_the_documents_exists() -> None:
    targets = make_targets()
    assert {"demo", "test", "slow", "lint", "bench", "clean", "help"} <= targets
    named = {
        (path.name, target)
        for path in DOCUMENTS
        for text in [path.read_text()]
        for target in re.findall(r"(?:^|`)make ([a-z]+)\b", text, re.MULTILINE)
    }
    assert ("README.md", "demo") in named
    assert {entry for entry in named if entry[1] not in targets} == set()


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_somewhere(path: Path) -> None:
    local = [target for target in LINK.findall(path.read_text()) if "://" not in target]
    assert [target for target in local if not (path.parent / target).exists()] == []


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_python_blocks_compile_and_import_what_exists(path: Path) -> None:
    for block in blocks(path, "python"):
        compile(block, str(path), "exec")
        imports = re.findall(r"^from hybridrec[\w.]* import .*$", block, re.MULTILINE)
        names: dict[str, object] = {}
        exec("\n".join(line for line in imports if "(" not in line), names)
        assert all(value is not None for value in names.values())
