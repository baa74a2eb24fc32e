"""The table of reported defects in tests/README.md is that of the tests that there are."""

from __future__ import annotations

import pytest

from tools.case_table import README, parts, split_name, table


def test_table_is_current() -> None:
    _, inside, _ = parts(README.read_text())
    assert inside.splitlines() == table().splitlines(), "run python -m tools.case_table --update"


def test_names_are_split() -> None:
    assert split_name("test_tr1_fb_23_12_re_4_that_holds") == (["TR#1", "FB 23.12", "RE#4"], "that holds")
    with pytest.raises(ValueError, match="names no report"):
        split_name("test_that_holds")
    with pytest.raises(ValueError, match="no number"):
        split_name("test_re_that_holds")
