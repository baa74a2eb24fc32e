"""Write the table of reported defects and their tests into tests/README.md.

A test in tests/cases is named after the reports whose fault it looks for, then what should hold instead:
``test_tr1050_the_last_batches_are_trained``. The table is made of these names and of how many tests each collects.

`python -m tools.case_table --update` writes it; a test compares.
"""

from __future__ import annotations

import collections
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
README = ROOT / "tests" / "README.md"
BEGIN, END = "<!-- cases: begin -->", "<!-- cases: end -->"
PROJECTS = {
    "tr": "TR",
    "fb": "FB",
    "re": "RE",
    "hkv": "HKV",
    "hc": "HC",
    "ter": "TER",
    "tfra": "TFRA",
    "dr": "DR",
    "cai": "CAI",
    "recstore": "RecStore",
    "pytorch": "pytorch",
}


def table() -> str:
    """The table as text."""
    lines = ["| | report | what holds here | tests |", "|---|---|---|---|"]
    for (file, name), count in _collected().items():
        reports, claim = split_name(name)
        section = file.removeprefix("test_").partition("_")[0].upper()
        lines.append(f"| {section} | {', '.join(reports)} | `{file}.py`: {claim} | {count} |")
    return "\n".join(lines)


def split_name(name: str) -> tuple[list[str], str]:
    """``test_tr1_fb_23_4_that_holds`` -> (["TR#1", "FB 23.4"], "that holds").

    Raises:
        ValueError: The name begins with no report.
    """
    words = collections.deque(name.removeprefix("test_").split("_"))
    reports: list[str] = []
    while words and (found := re.fullmatch(rf"({'|'.join(PROJECTS)})(\d*)", words[0])):
        project, number = found.groups()
        words.popleft()
        if number:
            reports.append(f"{PROJECTS[project]}#{number}")
            continue
        version = []
        while words and words[0].isdigit():
            version.append(words.popleft())
        if not version:
            raise ValueError(f"{name}: {project!r} is followed by no number.")
        reports.append(
            f"{PROJECTS[project]}#{version[0]}" if len(version) == 1 else f"{PROJECTS[project]} {'.'.join(version)}"
        )
    if not reports:
        raise ValueError(f"{name} names no report. Begin with one, as in test_tr1050_what_holds.")
    return reports, " ".join(words)


def _collected() -> dict[tuple[str, str], int]:
    """(file, function) -> number of tests, in their order."""
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider", "tests/cases"]
    output = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    counts: collections.Counter[tuple[str, str]] = collections.Counter()
    for found in re.finditer(r"^tests/cases/(\w+)\.py::(\w+)", output, re.MULTILINE):
        counts[found.group(1), found.group(2)] += 1
    return dict(counts)


def parts(text: str) -> Iterator[str]:
    """What is before, in and after the marks of the table."""
    before, _, rest = text.partition(BEGIN)
    inside, _, after = rest.partition(END)
    yield from (before, inside.strip(), after)


def main() -> None:
    """Print the table, or put it in its place."""
    if sys.argv[1:] == ["--update"]:
        before, _, after = parts(README.read_text())
        README.write_text(f"{before}{BEGIN}\n{table()}\n{END}{after}")
    else:
        print(table())


if __name__ == "__main__":
    main()
