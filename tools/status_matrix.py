"""Write README's status table, in both languages, from the results of test runs: features x devices.

    make test ARGS=--junitxml=results.xml
    python -m tools.status_matrix --update results.xml [MORE.xml ...]

Files may come from runs of parts and from other machines: of a test that is in several the last file's result counts,
unless that skipped it. Which tests show a feature is in `tools/status_features.py`. Cells count tests: "53 passed",
"52 passed, 1 failed", or "not run". Without `--update` the table is printed; `--check` compares what is in README with
the features, and the features with the files that there are.
"""

from __future__ import annotations

import argparse
import collections
import sys
import xml.etree.ElementTree as ET
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from tools.status_features import FEATURES, Feature

ROOT = Path(__file__).resolve().parent.parent
BEGIN, END = "<!-- status: begin -->", "<!-- status: end -->"
COLUMNS = ("cpu", "simulated", "cuda", "npu")
READMES = {"README.md": "title", "README.zh.md": "title_zh"}
HEADINGS = {
    "README.md": ("CPU", "simulated NPU", "CUDA", "NPU hardware"),
    "README.zh.md": ("CPU", "模拟 NPU", "CUDA", "NPU 硬件"),
}
WORDS = {
    "README.md": (
        "{} passed",
        "{} failed",
        "not run",
        ", ",
        "Tests of `tools/status_features.py`, on {}.",
    ),
    "README.zh.md": ("{} 通过", "{} 失败", "未运行", ",", "`tools/status_features.py` 所列测试的数目,运行于 {}。"),
}
VERSIONS_OF = ("torch", "torchrec", "fbgemm-gpu-cpu", "fbgemm-gpu", "torch-npu")
"""What a run notes of its environment (tests/conftest.py)."""
STAND_IN = "0+cpu"
"""The version of device_backends/fbgemm_cpu, which has fbgemm-gpu's name and none of its code."""

Results = dict[str, str]
"""Node id -> "passed", "failed" or "skipped"."""


def main() -> int:
    """Returns the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("results", nargs="*", type=Path, help="JUnit XML files, as pytest --junitxml writes them")
    parser.add_argument("--update", action="store_true", help="write the tables into both READMEs")
    parser.add_argument("--check", action="store_true", help="say what is out of date, and change nothing")
    arguments = parser.parse_args()
    if arguments.check:
        problems = list(find_problems())
        print("\n".join(problems), file=sys.stderr)
        return 1 if problems else 0
    results, versions = read_results(arguments.results)
    for readme in READMES:
        text = table(readme, results, versions)
        if arguments.update:
            before, _, after = parts((ROOT / readme).read_text())
            (ROOT / readme).write_text(f"{before}{BEGIN}\n{text}\n{END}{after}")
        else:
            print(text)
    return 0


def read_results(files: Iterable[Path]) -> tuple[Results, list[str]]:
    """Every test of the files, and the stacks that they ran on: "torch 2.13.0, torchrec 1.8.0"."""
    results: Results = {}
    stacks: dict[str, None] = {}
    for file in files:
        suites = ET.parse(file).getroot()
        noted = {p.get("name"): p.get("value") for p in suites.iter("property")}
        known = [f"{name} {noted[name]}" for name in VERSIONS_OF if name in noted and noted[name] != STAND_IN]
        stacks[", ".join(known)] = None
        for case in suites.iter("testcase"):
            node, outcome = node_id(case), outcome_of(case)
            if outcome != "skipped" or node not in results:
                results[node] = outcome
    return results, [stack for stack in stacks if stack]


def node_id(case: ET.Element) -> str:
    """``tests.a.test_b.TestC`` and ``test_d[1]`` -> ``tests/a/test_b.py::TestC::test_d[1]``."""
    names = case.get("classname", "").split(".")
    end = next((i + 1 for i, name in enumerate(names) if name.startswith("test_")), len(names))
    return "::".join(["/".join(names[:end]) + ".py", *names[end:], case.get("name", "")])


def outcome_of(case: ET.Element) -> str:
    """An error while a test was set up is a failure of it."""
    kinds = {child.tag for child in case}
    if kinds & {"failure", "error"}:
        return "failed"
    return "skipped" if "skipped" in kinds else "passed"


def counts(results: Results) -> dict[tuple[str, str], collections.Counter[str]]:
    """(feature's title, column) -> outcomes. A test counts where the longest prefix of its name is declared."""
    found: dict[tuple[str, str], collections.Counter[str]] = collections.defaultdict(collections.Counter)
    declared = list(_declared())
    for node, outcome in results.items():
        matching = [entry for entry in declared if node.startswith(entry[2])]
        longest = max((len(prefix) for _, _, prefix in matching), default=0)
        for feature, column, prefix in matching:
            if len(prefix) == longest:
                found[feature.title, column][outcome] += 1
    return found


def table(readme: str, results: Results, versions: Sequence[str]) -> str:
    """The table as text, in the language of ``readme``."""
    found = counts(results)
    lines = [f"| | {' | '.join(HEADINGS[readme])} |", "|---|" + "---|" * len(COLUMNS)]
    for feature in FEATURES:
        cells = [_cell(readme, found[feature.title, column]) for column in COLUMNS]
        lines.append(f"| {getattr(feature, READMES[readme])} | {' | '.join(cells)} |")
    return "\n".join([*lines, "", WORDS[readme][-1].format("; ".join(versions) or "-")])


def _cell(readme: str, outcomes: collections.Counter[str]) -> str:
    passed, failed, none, comma, _ = WORDS[readme]
    texts = [text.format(n) for text, n in ((passed, outcomes["passed"]), (failed, outcomes["failed"])) if n]
    return comma.join(texts) or none


def _declared() -> Iterator[tuple[Feature, str, str]]:
    for feature in FEATURES:
        for column in COLUMNS:
            for prefix in getattr(feature, column):
                yield feature, column, prefix


def find_problems() -> Iterator[str]:
    """Declared tests that do not exist, and rows of README that are not the features'."""
    for feature, _, prefix in _declared():
        file, _, name = prefix.partition("::")
        path = ROOT / file
        if not path.exists() or (name and f"def {name.partition('[')[0]}" not in path.read_text()):
            yield f"{prefix!r}, which shall show {feature.title[:40]!r}, is no test"
    for readme, title in READMES.items():
        rows = [line.split(" | ")[0].removeprefix("| ") for line in parts((ROOT / readme).read_text())[1].splitlines()]
        if rows[2 : 2 + len(FEATURES)] != [getattr(feature, title) for feature in FEATURES]:
            yield f"{readme}: the rows of its status table are not those of tools/status_features.py; use --update"


def parts(text: str) -> tuple[str, str, str]:
    """What is before, in and after the marks of the table."""
    before, _, rest = text.partition(BEGIN)
    inside, _, after = rest.partition(END)
    return before, inside.strip(), after


if __name__ == "__main__":
    sys.exit(main())
