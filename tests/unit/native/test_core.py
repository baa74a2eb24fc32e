"""Which core serves, what is said about it, and what each refuses alike."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest

from hybridrec.errors import BackendError, ConfigError
from hybridrec.native import ShardGroup, core, core_description, has_compiled_core
from tests.property.driver import make_specs


@pytest.fixture(autouse=True)
def undecided() -> Iterator[None]:
    """A process that has not chosen its core yet."""
    core.serving_core.cache_clear()
    yield
    core.serving_core.cache_clear()
    core.compiled_core.cache_clear()


@pytest.fixture
def nothing_built(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(core.ENVIRONMENT_VARIABLE, raising=False)
    monkeypatch.setattr(core, "compiled_core", lambda: None)


@pytest.mark.usefixtures("nothing_built")
def test_without_the_compiled_core_the_reference_serves_and_says_so_once(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "hybridrec"):
        assert core_description() == "numpy reference core"
        for _ in range(3):
            assert ShardGroup(make_specs()).counters(0).rows == 0
    [record] = [r for r in caplog.records if r.name == "hybridrec"]
    assert "slower" in record.getMessage() and "C++20 compiler" in record.getMessage()
    assert "reinstall" in record.getMessage()


@pytest.mark.usefixtures("nothing_built")
def test_the_compiled_core_cannot_be_forced_where_it_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not has_compiled_core()
    monkeypatch.setenv(core.ENVIRONMENT_VARIABLE, "compiled")
    with pytest.raises(BackendError, match="was not built. Install a C\\+\\+20 compiler"):
        core.serving_core()
    with pytest.raises(BackendError, match="was not built"):
        ShardGroup(make_specs(), core="compiled")


def test_the_reference_can_be_forced_and_needs_no_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv(core.ENVIRONMENT_VARIABLE, "reference")
    assert core.serving_core() == "reference"
    assert not caplog.records


def test_an_unknown_core_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(core.ENVIRONMENT_VARIABLE, "rust")
    with pytest.raises(
        ConfigError, match="HYBRIDREC_CORE='rust': there is no such core. Use 'compiled' or 'reference'"
    ):
        core.serving_core()


@pytest.mark.skipif(not has_compiled_core(), reason="the compiled core was not built")
def test_the_compiled_core_serves_where_it_was_built(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(core.ENVIRONMENT_VARIABLE, raising=False)
    assert core.serving_core() == "compiled"
    assert core_description() == "compiled core"


def test_a_core_that_cannot_be_loaded_is_not_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(name: str) -> None:
        raise ImportError("libstdc++.so.6: version `GLIBCXX_3.4.99' not found", name=name)

    core.compiled_core.cache_clear()
    monkeypatch.setattr(core.importlib, "import_module", fail)
    with pytest.raises(BackendError, match="was built but cannot be loaded: libstdc"):
        core.compiled_core()
