"""Print the public interface: every name of `hybridrec.__all__` with its signature, one a line.

`python tools/public_api.py --update` writes it to tests/repo/public_api.txt, which a test compares, so that no change
of the interface goes unseen in a review.
"""

from __future__ import annotations

import dataclasses
import inspect
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import hybridrec

SNAPSHOT = Path(__file__).resolve().parent.parent / "tests" / "repo" / "public_api.txt"


def describe() -> str:
    """The interface as text."""
    lines = [line for name in hybridrec.__all__ if not name.startswith("__") for line in _describe_name(name)]
    return "\n".join(lines) + "\n"


def _describe_name(name: str) -> Iterator[str]:
    value = getattr(hybridrec, name)
    if not isinstance(value, type):
        yield f"def {name}{_signature(value)}"
        return
    bases = ", ".join(base.__name__ for base in value.__bases__ if base is not object)
    yield f"class {name}" + (f"({bases})" if bases else "") + _constructor(value)
    fields = {field.name for field in dataclasses.fields(value)} if dataclasses.is_dataclass(value) else set[str]()
    for member in sorted({m for c in _own_classes(value) for m in vars(c) if not m.startswith("_")} - fields):
        yield f"    {_describe_member(value, member)}"


def _constructor(value: type) -> str:
    """How it is constructed; parameters that a dataclass inherits are named by whose they are, not one by one."""
    if not any("__init__" in vars(c) or "__new__" in vars(c) for c in _own_classes(value)):
        return ""
    theirs = [c for c in value.__mro__ if c not in _own_classes(value) and dataclasses.is_dataclass(c)]
    inherited = {field.name for c in theirs for field in dataclasses.fields(c)}
    signature = inspect.signature(value)
    own = [p for p in signature.parameters.values() if p.name not in inherited]
    prefix = f" <fields of {theirs[0].__name__}>, then" if theirs else ""
    return f": __init__{prefix}{_text(signature.replace(parameters=own))}"


def _own_classes(value: type) -> list[type]:
    """The class and those of its bases that are ours: what it inherits from torch is not our interface."""
    return [c for c in value.__mro__ if c.__module__.partition(".")[0] == "hybridrec"]


def _describe_member(owner: type, name: str) -> str:
    member: Any = inspect.getattr_static(owner, name)
    if isinstance(member, property):
        return f"{name}: property"
    if isinstance(member, staticmethod | classmethod):
        return f"{type(member).__name__} {name}{_signature(member.__func__)}"
    return f"def {name}{_signature(member)}" if callable(member) else f"{name} = {member!r}"


def _signature(value: Any) -> str:
    return _text(inspect.signature(value))


def _text(signature: inspect.Signature) -> str:
    """Without the addresses that some defaults print."""
    return re.sub(r" at 0x[0-9a-f]+", "", str(signature))


def main() -> int:
    """Print the interface, or write it with ``--update``."""
    if sys.argv[1:] == ["--update"]:
        SNAPSHOT.write_text(describe())
    else:
        sys.stdout.write(describe())
    return 0


if __name__ == "__main__":
    sys.exit(main())
