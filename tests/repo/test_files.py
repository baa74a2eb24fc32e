"""Files that a reader can read whole, and that say nothing about the machine they were written on."""

from __future__ import annotations

import re
import sys

import pytest

from tests.repo.sources import CODE_SUFFIXES, ROOT, TEXT_SUFFIXES, repository_files

SOFT_LINES = 400
HARD_LINES = 600

# Written in pieces, so that this file does not contain what it looks for: folders of a machine, package indexes.
FOLDERS = ("wo" + "rk", "ro" + "ot", "ho" + "me", "op" + "t", "Us" + "ers")  # codespell:ignore
MACHINE_PATH = re.compile(rf"(?<![\w.\-/])/(?:{'|'.join(FOLDERS)})/|file:/{'//'}|index-url[\s=]+http")


def test_no_file_is_too_long() -> None:
    lengths = {path: len(path.read_bytes().splitlines()) for path in repository_files(suffixes=CODE_SUFFIXES)}
    assert len(lengths) > 30
    for path, length in lengths.items():
        if SOFT_LINES < length <= HARD_LINES:
            sys.stderr.write(f"{path.relative_to(ROOT)}: {length} lines, more than {SOFT_LINES}\n")
    assert {str(path.relative_to(ROOT)): n for path, n in lengths.items() if n > HARD_LINES} == {}


def test_no_machine_paths() -> None:
    found = [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()}"
        for path in repository_files(suffixes=TEXT_SUFFIXES)
        for number, line in enumerate(path.read_text(errors="replace").splitlines(), 1)
        if MACHINE_PATH.search(line)
    ]
    assert found == []


@pytest.mark.parametrize(("text", "is_found"), [("cd /{}/x", True), ("'/{}/a'", True), ("examples/{}/x", False)])
def test_machine_paths_would_be_found(text: str, is_found: bool) -> None:
    assert (MACHINE_PATH.search(text.format("ho" + "me")) is not None) == is_found
