"""Patches are found in a package that the test writes, each kind by itself, and nothing else is."""

from __future__ import annotations

import base64
import hashlib
import importlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest

from hybridrec.doctor.integrity import check_files
from hybridrec.doctor.patches import find_patches

SOURCE = """
import abc, contextlib, enum, functools
from dataclasses import dataclass
from victim.helper import assist

LIMIT = 8
COUNT = 0
_cache = {}

def plain(x):
    global COUNT
    COUNT += 1
    return assist(x)

@functools.lru_cache
def cached(x):
    return x

@contextlib.contextmanager
def managed():
    yield 1

@functools.cache
def replaced_later():
    return 1

if LIMIT > 4:
    def conditional():
        return 1
else:
    def conditional():
        return 2

class Kind(enum.Enum):
    A = 1

@dataclass
class Record:
    x: int = 0

    def method(self):
        return self.x

    @property
    def double(self):
        return 2 * self.x

    @double.setter
    def double(self, value):
        self.x = value // 2

    @staticmethod
    def static():
        return 1

    @classmethod
    def make(cls):
        return cls()

    def __private(self):
        return 3

class Base(abc.ABC):
    @abc.abstractmethod
    def run(self): ...
    alias = run
"""


@pytest.fixture
def victim(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    package = tmp_path / "victim"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "helper.py").write_text("def assist(x):\n    return x\n")
    (package / "core.py").write_text(SOURCE)
    monkeypatch.syspath_prepend(tmp_path)
    yield importlib.import_module("victim.core")
    for name in [n for n in sys.modules if n.partition(".")[0] == "victim"]:
        del sys.modules[name]


def foreign(*args: object) -> int:
    return 0


def add_member(module: ModuleType) -> None:
    member = object.__new__(module.Kind)
    member._name_, member._value_ = "NEW", 3
    module.Kind._member_map_["NEW"] = member


def test_an_untouched_package_has_none(victim: ModuleType) -> None:
    victim.plain(1)  # changes COUNT, which the source declares global
    assert find_patches("victim") == []


@pytest.mark.parametrize(
    ("patch", "name"),
    [
        (lambda m: setattr(m, "plain", foreign), "plain"),
        (lambda m: setattr(m, "plain", len), "plain"),
        (lambda m: setattr(m, "plain", m.assist), "plain"),
        (lambda m: exec("def plain(x): return 1", vars(m)), "plain"),
        (lambda m: delattr(m, "plain"), "plain"),
        (lambda m: setattr(m, "managed", foreign), "managed"),
        (lambda m: setattr(m, "assist", foreign), "assist"),
        (lambda m: setattr(m, "LIMIT", 9), "LIMIT"),
        (lambda m: setattr(m, "Record", type("Record", (m.Record,), {})), "Record"),
        (lambda m: setattr(m.Record, "method", foreign), "Record.method"),
        (lambda m: setattr(m.Record, "static", staticmethod(foreign)), "Record.static"),
        (lambda m: setattr(m.Record, "make", classmethod(foreign)), "Record.make"),
        (lambda m: setattr(m.Record, "double", property(foreign)), "Record.double"),
        (lambda m: setattr(m.Record, "_Record__private", foreign), "Record.__private"),
        (lambda m: setattr(m.Record, "more", foreign), "Record.more"),
        (add_member, "Kind.NEW"),
    ],
)
def test_each_kind_is_found_and_named(victim: ModuleType, patch: Callable[[ModuleType], None], name: str) -> None:
    patch(victim)
    (found,) = find_patches("victim")
    assert found.name == f"victim.core.{name}"
    if Path(found.source).is_absolute() and "assist" not in found.now:
        assert found.source == str(Path(__file__).resolve())


def test_a_wrap_is_named_by_who_wrapped(victim: ModuleType) -> None:
    import functools

    inner = victim.plain

    @functools.wraps(inner)
    def wrapper(x: object) -> object:
        return inner(x)

    victim.plain = wrapper
    (found,) = find_patches("victim")
    assert found.source == str(Path(__file__).resolve()) and "wrapper" not in victim.plain.__qualname__


def install(folder: Path, files: dict[str, str]) -> None:
    """A distribution `Fake` 1.0 as an installer leaves it."""
    lines = []
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        digest = base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).decode().rstrip("=")
        lines.append(f"{name},sha256={digest},{len(text)}")
    info = folder / "fake-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: fake\nVersion: 1.0\n")
    (info / "RECORD").write_text("\n".join([*lines, "fake-1.0.dist-info/RECORD,,"]) + "\n")


def test_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(tmp_path, {"fakepkg/__init__.py": "", "fakepkg/a/b.py": "x = 1\n", "fakepkg/c.py": "y = 1\n"})
    monkeypatch.syspath_prepend(tmp_path)
    check = check_files("fake", "fakepkg")
    assert (check.num_files, check.changed, check.missing, check.shadowed_by) == (3, (), (), "")
    (tmp_path / "fakepkg/a/b.py").write_text("x = 2\n")
    (tmp_path / "fakepkg/c.py").unlink()
    check = check_files("fake", "fakepkg")
    assert (check.changed, check.missing) == (("fakepkg/a/b.py",), ("fakepkg/c.py",))


def test_a_copy_that_shadows_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(tmp_path, {"fakepkg/__init__.py": ""})
    (tmp_path / "other/fakepkg").mkdir(parents=True)
    (tmp_path / "other/fakepkg/__init__.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.syspath_prepend(tmp_path / "other")
    monkeypatch.delitem(sys.modules, "fakepkg", raising=False)
    importlib.import_module("fakepkg")
    monkeypatch.setitem(sys.modules, "fakepkg", sys.modules["fakepkg"])
    assert check_files("fake", "fakepkg").shadowed_by == str(tmp_path / "other/fakepkg")
    del sys.modules["fakepkg"]
