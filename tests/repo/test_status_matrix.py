"""README's status table has the features' rows, its tests exist, and it is made from results alone."""

from __future__ import annotations

from pathlib import Path

import pytest

from tools import status_matrix
from tools.status_features import Feature
from tools.status_matrix import counts, find_problems, read_results, table

FEATURES = (
    Feature(title="rows", title_zh="行", cpu=("tests/a/test_x.py",), simulated=("tests/a/test_x.py::test_npu",)),
    Feature(title="pools", title_zh="池", cpu=("tests/b/",)),
)
FIRST = """<testsuites><testsuite><properties><property name="torch" value="2.13.0"/></properties>
<testcase classname="tests.a.test_x" name="test_1[1-a]"/>
<testcase classname="tests.a.test_x" name="test_2"><failure message="m">t</failure></testcase>
<testcase classname="tests.a.test_x" name="test_npu[2]"/>
<testcase classname="tests.b.test_y.Machine" name="runTest"><error message="m">t</error></testcase>
</testsuite></testsuites>"""
SECOND = """<testsuites><testsuite><properties><property name="torch" value="2.10.0"/></properties>
<testcase classname="tests.a.test_x" name="test_2"/>
<testcase classname="tests.a.test_x" name="test_1[1-a]"><skipped message="m"/></testcase>
<testcase classname="tests.a.test_x" name="test_3"><skipped message="m"/></testcase>
</testsuite></testsuites>"""


def test_readme_has_the_features_rows_and_their_tests_exist() -> None:
    assert list(find_problems()) == []


def test_what_is_not_there_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(status_matrix, "FEATURES", FEATURES)
    problems = list(find_problems())
    assert len(problems) == 5 and "'tests/a/test_x.py::test_npu'" in problems[1]
    assert problems[3].startswith("README.md: ") and problems[4].startswith("README.zh.md: ")


def test_cells_count_results(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(status_matrix, "FEATURES", FEATURES)
    files = [tmp_path / "first.xml", tmp_path / "second.xml"]
    for file, text in zip(files, (FIRST, SECOND), strict=True):
        file.write_text(text)
    results, versions = read_results(files[:1])
    assert counts(results)["rows", "cpu"] == {"passed": 1, "failed": 1}
    assert "| rows | 1 passed, 1 failed | 1 passed | not run | not run |" in table("README.md", results, versions)
    assert "| pools | 1 failed | not run |" in table("README.md", results, versions)
    results, versions = read_results(files)
    assert results["tests/b/test_y.py::Machine::runTest"] == "failed"
    assert versions == ["torch 2.13.0", "torch 2.10.0"]
    assert "| 行 | 2 通过 | 1 通过 | 未运行 | 未运行 |" in table("README.zh.md", results, versions)
    assert counts(results)["rows", "cpu"] == {"passed": 2, "skipped": 1}
