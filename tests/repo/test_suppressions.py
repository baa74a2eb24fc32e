"""What a checker is told to pass over says which rule, and why."""

from __future__ import annotations

import io
import re
import tokenize
from collections.abc import Iterator

import pytest

from tests.repo.sources import repository_files, where

SUPPRESSION = re.compile(r"#\s*(type:\s*ignore|noqa|pylint:|mypy:|pragma:)")
EXPLAINED = re.compile(r"# (type: ignore\[[a-z, -]+\]  # |noqa: [A-Z]+\d+(, [A-Z]+\d+)* - )\w.*")


def unexplained(source: str) -> Iterator[tuple[int, str]]:
    """(line, comment) of what suppresses a check without the rule's name or without a reason."""
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        is_comment = token.type == tokenize.COMMENT
        if is_comment and SUPPRESSION.search(token.string) and not EXPLAINED.fullmatch(token.string):
            yield token.start[0], token.string


def test_every_suppression_has_a_reason() -> None:
    files = repository_files("hybridrec", "device_backends", suffixes=(".py",))
    sources = {path: path.read_text() for path in files}
    assert any(SUPPRESSION.search(source) for source in sources.values())
    found = [f"{where(path, line)}: {text}" for path in files for line, text in unexplained(sources[path])]
    assert found == [], "Write `# type: ignore[code]  # why` or `# noqa: CODE - why`"


@pytest.mark.parametrize(
    ("comment", "is_found"),
    [
        ("# type: ignore", True),
        ("# type: ignore[misc]", True),
        ("# type: ignore  # a reason without a rule", True),
        ("# type: ignore[misc, valid-type]  # looked up by name", False),
        ("# noqa", True),
        ("# noqa: B036", True),
        ("# noqa: B036 - raised by whoever waits", False),
        ("# an ordinary comment", False),
    ],
)
def test_suppressions_would_be_found(comment: str, is_found: bool) -> None:
    assert bool(list(unexplained(f"x = 1  {comment}\n"))) == is_found
