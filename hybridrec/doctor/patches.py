"""What was replaced in a package after its files were read: functions, methods, classes, enum members, constants.

Every module of the package that is loaded is compared with its own source. What the source defines must still be what
the module holds; who put something else there is told by the file that its code comes from.
"""

from __future__ import annotations

import ast
import enum
import functools
import sys
import sysconfig
import types
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Function = ast.FunctionDef | ast.AsyncFunctionDef
_TRANSPARENT = {"property", "staticmethod", "classmethod", "abstractmethod", "setter", "override", "final"}
"""Decorators that leave the function what it is."""
_STDLIB = str(Path(sysconfig.get_paths()["stdlib"]).resolve())
_MISSING = object()


@dataclass(frozen=True, kw_only=True)
class Patch:
    """One name that is not what its module's source says."""

    name: str
    """Dotted, with its module."""
    now: str
    """What is there now: where its code comes from, or its value."""
    source: str = ""
    """The file of the code that is there now; empty if it has none."""


def find_patches(package: str) -> list[Patch]:
    """Compare all loaded modules of a package with their sources.

    A change within a function that some decorator hides without ``__wrapped__`` is not seen.
    """
    found: list[Patch] = []
    for name, module in sorted(sys.modules.items()):
        file = getattr(module, "__file__", None)
        if (name == package or name.startswith(package + ".")) and isinstance(file, str) and file.endswith(".py"):
            try:
                tree = ast.parse(Path(file).read_bytes(), filename=file)
            except (OSError, SyntaxError):  # whether files are whole is `integrity`'s question
                continue
            found += _Module(name, module, tree, package).patches()
    return found


class _Module:
    """One module against its source."""

    def __init__(self, name: str, module: types.ModuleType, tree: ast.Module, package: str) -> None:
        self._name, self._values, self._tree = name, vars(module), tree
        self._file = _resolved(str(module.__file__))
        imported = {a.name for node in ast.walk(tree) if isinstance(node, ast.Import) for a in node.names}
        imported |= {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.module}
        roots = {name.partition(".")[0] for name in imported} | {package}
        self._trusted = [_STDLIB, *(root for name in roots if (root := _root(name)))]
        self._rebound = _rebound(tree)

    def patches(self) -> Iterator[Patch]:
        for node in self._tree.body:
            if isinstance(node, Function | ast.ClassDef) and node.name in self._rebound:
                continue
            if isinstance(node, Function):
                yield from self._function(node, self._values.get(node.name, _MISSING), node.name)
            elif isinstance(node, ast.ClassDef):
                yield from self._class(node)
            elif isinstance(node, ast.ImportFrom):
                yield from self._imports(node)
            elif isinstance(node, ast.Assign | ast.AnnAssign):
                yield from self._constant(node)

    def _function(self, node: Function, value: Any, name: str) -> Iterator[Patch]:
        if value is _MISSING:
            yield self._patch(name, "deleted")
            return
        outermost = next(_functions(value), None)
        is_plain = all(_last_name(decorator) in _TRANSPARENT for decorator in node.decorator_list)
        if outermost is None:
            if is_plain:  # a built-in or any other object in place of a function
                yield self._patch(name, repr(value)[:80])
            return
        file = _resolved(outermost.__code__.co_filename)
        if file != self._file if is_plain else not self._is_trusted(file):
            yield self._patch(name, _where(outermost), file)

    def _class(self, node: ast.ClassDef) -> Iterator[Patch]:
        value = self._values.get(node.name, _MISSING)
        if not isinstance(value, type):
            if not node.decorator_list:
                yield self._patch(node.name, "deleted" if value is _MISSING else repr(value)[:80])
            return
        if value.__module__ != self._name:
            where = sys.modules.get(value.__module__)
            file = _resolved(getattr(where, "__file__", None) or "")
            if not node.decorator_list or not self._is_trusted(file):
                yield self._patch(node.name, f"{value.__module__}.{value.__qualname__}", file)
            return
        defined: dict[str, list[Function]] = {}
        for part in node.body:
            if isinstance(part, Function):
                defined.setdefault(part.name, []).append(part)
        assigned = _rebound(node)
        for name, versions in defined.items():
            if name not in assigned:
                # Of several definitions (overloads, a property and its setter) the last is what the class holds.
                held = vars(value).get(_mangled(name, node.name), _MISSING)
                yield from self._function(versions[-1], held, f"{node.name}.{name}")
        defined |= {_mangled(name, node.name): versions for name, versions in defined.items()}
        for name, member in vars(value).items():
            function = next(_functions(member), None)
            if name in defined or name in assigned or function is None:
                continue
            file = _resolved(function.__code__.co_filename)
            if Path(file).exists() and not self._is_trusted(file):
                yield self._patch(f"{node.name}.{name}", f"added, {_where(function)}", file)
        if isinstance(value, enum.EnumMeta):
            for name in set(value.__members__) - assigned:
                yield self._patch(f"{node.name}.{name}", f"added, {value.__members__[name]!r}")

    def _imports(self, node: ast.ImportFrom) -> Iterator[Patch]:
        """A name that was imported from the same package, and holds something foreign that its origin does not."""
        for alias in node.names:
            name = alias.asname or alias.name
            value = self._values.get(name, _MISSING)
            origin = vars(sys.modules[node.module]).get(alias.name) if node.module in sys.modules else None
            function = next(_functions(value), None) if name not in self._rebound else None
            if function is None or value is origin:
                continue
            file = _resolved(function.__code__.co_filename)
            if not self._is_trusted(file):
                yield self._patch(name, _where(function), file)

    def _constant(self, node: ast.Assign | ast.AnnAssign) -> Iterator[Patch]:
        target = node.targets[0] if isinstance(node, ast.Assign) else node.target
        if not isinstance(target, ast.Name) or node.value is None or _times_bound(self._tree, target.id) != 1:
            return
        try:
            written = ast.literal_eval(node.value)
        except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
            return
        value = self._values.get(target.id, _MISSING)
        if isinstance(written, bool | int | float | str) and value != written:
            yield self._patch(target.id, "deleted" if value is _MISSING else f"{value!r} instead of {written!r}"[:160])

    def _is_trusted(self, file: str) -> bool:
        return not Path(file).exists() or any(file == t or file.startswith(t + "/") for t in self._trusted)

    def _patch(self, name: str, now: str, source: str = "") -> Patch:
        return Patch(name=f"{self._name}.{name}", now=now, source=source)


def _functions(value: Any) -> Iterator[types.FunctionType]:
    """The Python functions that a value is or wraps, the outermost first."""
    for _ in range(32):
        if isinstance(value, types.FunctionType):
            yield value
            value = getattr(value, "__wrapped__", None)
        elif isinstance(value, staticmethod | classmethod | types.MethodType):
            value = value.__func__
        elif isinstance(value, property):
            value = value.fget
        elif isinstance(value, functools.partial | functools.cached_property):
            value = value.func
        else:
            value = getattr(value, "__wrapped__", None) if not isinstance(value, type) else None
        if value is None:
            return


def _rebound(scope: ast.AST) -> set[str]:
    """Names that a module or a class binds otherwise than by its own definitions; those it declares global too."""
    names = set()
    for node in _outside_functions(scope):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store | ast.Del):
            names.add(node.id)
        elif isinstance(node, ast.If | ast.Try | ast.With | ast.For | ast.While) and isinstance(scope, ast.Module):
            # Definitions and imports under a condition: which of them holds is not ours to say.
            for inner in ast.walk(node):
                if isinstance(inner, Function | ast.ClassDef):
                    names.add(inner.name)
                elif isinstance(inner, ast.ImportFrom | ast.Import):
                    names |= {(a.asname or a.name).partition(".")[0] for a in inner.names}
    for node in ast.walk(scope):
        if isinstance(node, ast.Global):
            names |= set(node.names)
    return names


def _outside_functions(scope: ast.AST) -> Iterator[ast.AST]:
    """All nodes of a scope that do not belong to a scope within it."""
    for child in ast.iter_child_nodes(scope):
        yield child
        if not isinstance(child, Function | ast.ClassDef | ast.Lambda):
            yield from _outside_functions(child)


@functools.lru_cache(maxsize=8)
def _bindings(tree: ast.Module) -> dict[str, int]:
    counts: dict[str, int] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Global):
            counts.update({name: counts.get(name, 0) + 2 for name in node.names})
    for node in _outside_functions(tree):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store | ast.Del):
            counts[node.id] = counts.get(node.id, 0) + 1
    return counts


def _times_bound(tree: ast.Module, name: str) -> int:
    return _bindings(tree).get(name, 0)


def _mangled(name: str, owner: str) -> str:
    """Under what name a class holds what its source calls ``name``."""
    return f"_{owner.lstrip('_')}{name}" if name.startswith("__") and not name.endswith("__") else name


def _last_name(decorator: ast.expr) -> str:
    """``abc.abstractmethod`` -> abstractmethod, ``x.setter`` -> setter; a call is no plain decorator."""
    if isinstance(decorator, ast.Attribute):
        return decorator.attr
    return decorator.id if isinstance(decorator, ast.Name) else ""


def _where(function: types.FunctionType) -> str:
    return f"{function.__qualname__} of {function.__code__.co_filename}:{function.__code__.co_firstlineno}"


def _root(package: str) -> str:
    """The folder or file of a loaded package; empty if it has none."""
    file = getattr(sys.modules.get(package), "__file__", None)
    if not isinstance(file, str):
        return ""
    path = Path(_resolved(file))
    return str(path.parent) if path.name.startswith("__init__.") else str(path)


@functools.cache
def _resolved(file: str) -> str:
    return str(Path(file).resolve()) if file and not file.startswith("<") else file
