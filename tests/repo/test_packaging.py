"""What users install: an isolated build, and an installation on a machine that has no compiler."""

from __future__ import annotations

import os
import shutil
import site
import subprocess
import sys
import zipfile
from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.repo.sources import ROOT

pytestmark = pytest.mark.slow

COMPILER_FREE_TOOLS = ("sh", "bash", "env", "uname", "cmake", "ninja", "make")
SMOKE = (Path(__file__).parent / "smoke.py").read_text()


def run(*command: str | Path, env: Mapping[str, str] | None = None, cwd: Path = ROOT) -> str:
    done = subprocess.run([str(c) for c in command], env=env, cwd=cwd, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def environment(**changes: str) -> dict[str, str]:
    """This process's environment, without what would point a new interpreter or a build to this one's."""
    dropped = ("PYTHONPATH", "VIRTUAL_ENV", "CC", "CXX", "CMAKE_GENERATOR", "SKBUILD_CMAKE_ARGS")
    return {name: value for name, value in os.environ.items() if name not in dropped} | changes


@pytest.fixture
def sources(tmp_path: Path) -> Path:
    """A copy of what is built, so that no build product of this checkout can help, and none is left in it."""
    copy = tmp_path / "sources"
    ignore = shutil.ignore_patterns("__pycache__", "*.so", "build", "*.egg-info")
    for name in ("hybridrec", "device_backends"):
        shutil.copytree(ROOT / name, copy / name, ignore=ignore)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, copy / name)
    return copy


@pytest.fixture
def empty_python(tmp_path: Path) -> Path:
    """The interpreter of a new virtual environment that holds pip alone."""
    run(sys.executable, "-m", "venv", tmp_path / "venv")
    return tmp_path / "venv" / "bin" / "python"


def smoke(python: Path, *, is_compiled: bool, cwd: Path) -> None:
    """Use the installed package; torch, which is no base dependency, is lent from this environment."""
    lent = os.pathsep.join(site.getsitepackages())
    run(python, "-c", SMOKE, "compiled" if is_compiled else "reference", env=environment(PYTHONPATH=lent), cwd=cwd)


def test_wheel_of_an_isolated_build(sources: Path, empty_python: Path, tmp_path: Path) -> None:
    env = environment()
    wheels = tmp_path / "wheels"
    run(empty_python, "-m", "pip", "wheel", "--no-deps", "-w", wheels, sources, env=env)
    (wheel,) = wheels.glob("hybridrec-*.whl")
    names = zipfile.ZipFile(wheel).namelist()

    assert {"hybridrec/__init__.py", "hybridrec/py.typed", "device_backends/cpu.py"} <= set(names)
    assert "linux" in wheel.name and sum(name.endswith(".so") for name in names) == 1
    folders = {name.split("/")[0] for name in names if ".dist-info/" not in name}
    assert folders == {"hybridrec", "device_backends"}
    suffixes = {Path(name).suffix for name in names if ".dist-info/" not in name}
    assert suffixes <= {".py", ".typed", ".so"}
    assert not any("fbgemm_cpu" in name for name in names)

    run(empty_python, "-m", "pip", "install", wheel, env=env)
    assert "No broken requirements" in run(empty_python, "-m", "pip", "check", env=env)
    smoke(empty_python, is_compiled=True, cwd=tmp_path)


def test_installs_without_a_compiler(sources: Path, empty_python: Path, tmp_path: Path) -> None:
    tools = tmp_path / "tools"
    tools.mkdir()
    for name in COMPILER_FREE_TOOLS:
        if (found := shutil.which(name)) is not None:
            (tools / name).symlink_to(found)
    env = environment(PATH=f"{empty_python.parent}{os.pathsep}{tools}")
    assert shutil.which("c++", path=env["PATH"]) is None and shutil.which("cc", path=env["PATH"]) is None

    run(empty_python, "-m", "pip", "install", sources, env=env)
    assert "No broken requirements" in run(empty_python, "-m", "pip", "check", env=env)
    installed = next((tmp_path / "venv" / "lib").glob("python*/site-packages/hybridrec"))
    assert list(installed.rglob("*.so")) == []
    smoke(empty_python, is_compiled=False, cwd=tmp_path)


def test_this_environment_is_consistent() -> None:
    assert "No broken requirements" in run(sys.executable, "-m", "pip", "check")
