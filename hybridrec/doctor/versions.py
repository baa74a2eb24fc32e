"""Which distributions are installed, and which stack of hybridrec's they make. Imports none of them."""

from __future__ import annotations

import importlib.metadata
import platform
import re
import sys
from collections.abc import Callable, Iterator, Mapping

from hybridrec.doctor.report import Finding, Status

SECTION = "Versions"
SHOWN = ("hybridrec", "torch", "torchrec", "tensordict", "numpy")
REQUIRED = ("torch", "torchrec")
BACKENDS = "hybridrec.device_backends"
"""The entry point group of `hybridrec.backend`, which cannot be imported without torch."""
_REQUIREMENT = re.compile(r"^([\w.-]+)\s*([=<>!~]=?)?\s*([\w.+-]*)\s*;\s*extra\s*==\s*['\"]([\w-]+)['\"]$")
_TORCH_PIN = re.compile(r"^torch\s*\(?==\s*([\w.+]+)\)?\s*(;(?!.*extra).*)?$")
_RELEASE_LABEL = re.compile(r"(cpu|cu\d+|rocm[\d.]+)(\..*)?")

Stacks = Mapping[str, Mapping[str, tuple[str, str]]]
"""Extra -> distribution -> (operator, version)."""


def version_of(name: str) -> str | None:
    """The installed version; None if it is not installed."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def stacks() -> Stacks:
    """The extras of hybridrec that pin a torch, from its own metadata."""
    found: dict[str, dict[str, tuple[str, str]]] = {}
    try:
        requirements = importlib.metadata.requires("hybridrec") or []
    except importlib.metadata.PackageNotFoundError:  # run from a checkout that was never installed
        return {}
    for text in requirements:
        match = _REQUIREMENT.match(text)
        if match is not None:
            found.setdefault(match[4], {})[match[1]] = (match[2] or "", match[3])
    return {extra: pins for extra, pins in found.items() if "torch" in pins}


def known_devices() -> list[str]:
    """Device types that an installed backend serves, usable here or not; none if hybridrec itself is not installed."""
    return sorted({entry.name for entry in importlib.metadata.entry_points(group=BACKENDS)})


def install_hint(rows: Stacks) -> str:
    """How to install a whole stack."""
    if not rows:
        return "Install hybridrec with one of its stacks: its README says how."
    return f"In a fresh environment: pip install 'hybridrec[STACK]' with STACK one of {', '.join(rows)}."


def requirements_of(name: str) -> list[str]:
    """What an installed distribution requires."""
    try:
        return importlib.metadata.requires(name) or []
    except importlib.metadata.PackageNotFoundError:
        return []


def findings(
    device: str | None,
    *,
    installed: Callable[[str], str | None] = version_of,
    rows: Stacks | None = None,
    requirements: Callable[[str], list[str]] = requirements_of,
) -> Iterator[Finding]:
    """Versions, and the stack that they make.

    Args:
        device: The device type that was asked for; None: any.
        installed: Distribution -> version.
        rows: The stacks; None: hybridrec's own.
        requirements: Distribution -> what it requires.
    """
    rows = stacks() if rows is None else rows
    python = f"{platform.python_version()} ({sys.implementation.name}, {platform.machine()})"
    yield Finding(section=SECTION, what="python", value=python)
    pinned = [name for pins in rows.values() for name in pins]
    for name in dict.fromkeys([*SHOWN, *pinned]):
        is_needed = name in rows.get(device or "", {})
        wrong = _wrong_torch(name, installed, requirements(name), rows, is_needed=is_needed)
        yield wrong or _version(name, installed(name), rows)
    yield _stack(device, installed, rows)


def _wrong_torch(
    name: str, installed: Callable[[str], str | None], requirements: list[str], rows: Stacks, *, is_needed: bool
) -> Finding | None:
    """A finding if the distribution was made for another torch than the one that is installed."""
    version, torch_version = installed(name), installed("torch")
    wanted = next((match[1] for text in requirements if (match := _TORCH_PIN.match(text))), None)
    if version is None or torch_version is None or wanted is None:
        return None
    if wanted.partition("+")[0] == torch_version.partition("+")[0]:
        return None
    stack = next((extra for extra, pins in rows.items() if name in pins), None)
    right = rows[stack][name] if stack else ("", "")
    which = f"of which {name} {right[1]} is a part " if right[0] == "==" else ""
    value = f"{version} works with torch {wanted} alone, and torch here is {torch_version}."
    remedy = f"Install the whole stack {which}in a fresh environment: pip install 'hybridrec[{stack or 'STACK'}]'."
    status = Status.FAIL if is_needed else Status.WARN
    return Finding(section=SECTION, what=name, value=value, status=status, remedy=remedy)


def _version(name: str, version: str | None, rows: Stacks) -> Finding:
    if version is None:
        if name in REQUIRED:
            return Finding(
                section=SECTION, what=name, value="not installed", status=Status.FAIL, remedy=install_hint(rows)
            )
        return Finding(section=SECTION, what=name, value="not installed", status=Status.OFF)
    label = version.partition("+")[2]
    if name == "torchrec" and label and not _RELEASE_LABEL.fullmatch(label):
        remedy = (
            "hybridrec works with TorchRec as it is released and was tested with nothing else: "
            f"pip install --force-reinstall --no-deps torchrec=={version.partition('+')[0]}"
        )
        return Finding(
            section=SECTION, what=name, value=f"{version}: a patched build", status=Status.WARN, remedy=remedy
        )
    return Finding(section=SECTION, what=name, value=version)


def _stack(device: str | None, installed: Callable[[str], str | None], rows: Stacks) -> Finding:
    differences = {
        extra: [text for name, pin in pins.items() if (text := _difference(name, pin, installed(name)))]
        for extra, pins in rows.items()
    }
    matching = [extra for extra, texts in differences.items() if not texts]
    if device in matching or (matching and device not in rows):
        return Finding(section=SECTION, what="stack", value=", ".join(matching))
    nearest = device if device in rows else min(differences, key=lambda e: len(differences[e]), default=None)
    if nearest is None:
        remedy = "Install hybridrec: without its metadata there are neither stacks nor devices."
        return Finding(section=SECTION, what="stack", value="unknown", status=Status.WARN, remedy=remedy)
    if matching:
        # An environment for another device: whether it can serve this one is what the next section finds out.
        value = f"{', '.join(matching)}; not {nearest} ({'; '.join(differences[nearest])})"
        return Finding(
            section=SECTION, what="stack", value=value, status=Status.WARN, remedy=install_hint({nearest: {}})
        )
    value = f"none that was tested. Nearest is {nearest}: {'; '.join(differences[nearest])}"
    return Finding(section=SECTION, what="stack", value=value, status=Status.WARN, remedy=install_hint(rows))


def _difference(name: str, pin: tuple[str, str], version: str | None) -> str:
    """What is wrong with an installed version, or an empty string."""
    operator, wanted = pin
    if version is None:
        return f"{name} is missing"
    public = version.partition("+")[0]
    is_right = {
        "": True,
        "==": public == wanted,
        "<": _numbers(public) < _numbers(wanted),
        ">=": _numbers(public) >= _numbers(wanted),
    }.get(operator, True)
    return "" if is_right else f"{name} is {version}, not {operator.replace('==', '')}{wanted}"


def _numbers(version: str) -> tuple[int, ...]:
    """``0.15.3rc1`` -> (0, 15, 3)."""
    return tuple(int(part) for part in re.findall(r"\d+", re.split(r"[a-z]", version)[0]))
