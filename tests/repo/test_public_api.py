"""The public interface changes only on purpose."""

from __future__ import annotations

import hybridrec
from tools.public_api import SNAPSHOT, describe


def test_public_interface_is_the_recorded_one() -> None:
    """If the change is meant: `python tools/public_api.py --update`, and an entry in CHANGELOG.md."""
    assert describe().splitlines() == SNAPSHOT.read_text().splitlines()


def test_every_public_name_is_documented() -> None:
    undocumented = [
        name for name in hybridrec.__all__ if not name.startswith("__") and not getattr(hybridrec, name).__doc__
    ]
    assert undocumented == []


def test_all_is_sorted_and_agrees_with_the_lazy_table() -> None:
    assert list(hybridrec.__all__) == sorted(hybridrec.__all__)
    assert set(hybridrec._MODULE_OF_NAME) | {"__version__"} == set(hybridrec.__all__)
