"""What import-linter cannot say about imports. The layers themselves are its contracts, in pyproject.toml."""

from __future__ import annotations

import pytest

from tests.repo.sources import imports_of, module_name, repository_files, where

KNOW_TORCHREC_DISTRIBUTED = ("hybridrec.distributed", "hybridrec._compat")
KNOW_COMPAT = (
    "hybridrec.debug",
    "hybridrec.doctor",
    "hybridrec.distributed",
    "hybridrec.kernels",
    "hybridrec._compat",
    "hybridrec.config",
    "hybridrec.modules",
)
PUBLIC_MODULES = {
    "hybridrec",
    "hybridrec.checkpoint",
    "hybridrec.debug",
    "hybridrec.distributed.hybrid_train_pipeline",
    "hybridrec.distributed.sharding_plan",
    "hybridrec.errors",
    "hybridrec.inference",
    "hybridrec.metrics",
}
"""Deep paths that are part of the interface: scripts may import from them."""


def is_within(module: str, packages: tuple[str, ...]) -> bool:
    return any(module == package or module.startswith(package + ".") for package in packages)


def test_only_distributed_knows_torchrec_distributed() -> None:
    found = [
        where(path, line)
        for path in repository_files("hybridrec", suffixes=(".py",))
        for line, module, _ in imports_of(path)
        if is_within(module, ("torchrec.distributed",)) and not is_within(module_name(path), KNOW_TORCHREC_DISTRIBUTED)
    ]
    assert found == []


def test_private_modules_stay_private() -> None:
    """A module `_x` is imported only within its package; `_compat` only by the layers that extend TorchRec."""
    found = []
    for path in repository_files("hybridrec", "device_backends", suffixes=(".py",)):
        importer = module_name(path)
        for line, module, name in imports_of(path):
            full = f"{module}.{name}" if name else module
            parts = full.split(".")
            private = next((i for i, part in enumerate(parts) if part.startswith("_") and part[1:2] != "_"), None)
            if parts[0] not in ("hybridrec", "device_backends") or private is None:
                continue
            package = ".".join(parts[:private])
            is_compat = parts[:2] == ["hybridrec", "_compat"]
            is_allowed = is_within(importer, KNOW_COMPAT) if is_compat else is_within(importer, (package,))
            if not is_allowed:
                found.append(f"{where(path, line)}: {full}")
    assert found == []


def test_no_relative_imports() -> None:
    """One spelling of a module's name, so that a search finds every use."""
    found = [
        where(path, line)
        for path in repository_files("hybridrec", "device_backends", "examples", "tests", suffixes=(".py",))
        for line, module, _ in imports_of(path)
        if module.startswith(".")
    ]
    assert found == []


@pytest.mark.parametrize("folder", ["examples"])
def test_examples_use_public_names_only(folder: str) -> None:
    files = repository_files(folder, suffixes=(".py",))
    used = [(path, *entry) for path in files for entry in imports_of(path) if is_within(entry[1], ("hybridrec",))]
    assert used
    assert [f"{where(path, line)}: {module}" for path, line, module, _ in used if module not in PUBLIC_MODULES] == []
    private = [where(path, line) for path, line, _, name in used if name is not None and name.startswith("_")]
    assert private == []
