"""The image files and the recipe for machines without a network, as far as they can be checked without an engine."""

from __future__ import annotations

import json
import re
import subprocess
import tomllib
from pathlib import Path

import pytest

from tests.repo.sources import ROOT

DOCKER = ROOT / "docker"
FILES = sorted(DOCKER.glob("*.Dockerfile"))
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = PROJECT["optional-dependencies"]
STACKS = {extra for extra, pins in EXTRAS.items() if any(pin.startswith("torch==") for pin in pins)}
KNOWN = {"ARG", "CMD", "COPY", "ENTRYPOINT", "ENV", "FROM", "RUN", "USER", "WORKDIR"}
"""Of the instructions that Docker knows, those that are used and checked here."""
every_file = pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.name))


def instructions(path: Path) -> list[tuple[str, str]]:
    """(name, arguments), with lines joined that end in a backslash and without comments."""
    lines = [line for line in path.read_text().splitlines() if not line.lstrip().startswith("#")]
    joined = re.sub(r"\\\n\s*", "", "\n".join(lines)).splitlines()
    return [(name, rest.strip()) for name, _, rest in (line.partition(" ") for line in joined if line.strip())]


def stack_of(path: Path) -> str:
    return path.name.partition(".")[0]


def test_every_stack_has_an_image() -> None:
    assert {stack_of(path) for path in FILES} == STACKS == {"cpu", "cuda", "npu"}


@every_file
def test_instructions_are_known_and_well_formed(path: Path) -> None:
    found = instructions(path)
    assert {name for name, _ in found} <= KNOWN
    first = next(name for name, _ in found if name != "ARG")
    assert first == "FROM" and found[-1][0] == "CMD"
    for name, rest in found:
        if name in ("CMD", "ENTRYPOINT"):  # the form without a shell, so that signals reach the program
            assert all(isinstance(word, str) for word in json.loads(rest))
        if name == "RUN":
            subprocess.run(["bash", "-n", "-c", rest], check=True)
        if name == "ENV":
            assert all("=" in word for word in rest.split())


@every_file
def test_what_is_copied_exists_and_is_not_ignored(path: Path) -> None:
    ignored = {line.rstrip("/") for line in (ROOT / ".dockerignore").read_text().splitlines()}
    stages = {rest.rpartition(" AS ")[2] for name, rest in instructions(path) if name == "FROM" and " AS " in rest}
    sources: list[str] = []
    for rest in (rest for name, rest in instructions(path) if name == "COPY"):
        words = rest.split()
        if words[0].startswith("--from="):
            assert words[0].removeprefix("--from=") in stages
        else:
            sources += words[:-1]
    assert [source for source in sources if not (ROOT / source).exists() or source in ignored] == []
    # What a build reads: the project's own files, and the folders that go into the wheel.
    readme, licences = PROJECT["readme"], PROJECT["license-files"]
    assert {"pyproject.toml", readme, *licences, "hybridrec", "device_backends"} <= set(sources)


@every_file
def test_the_stack_is_the_extra_of_pyproject(path: Path) -> None:
    stack, text = stack_of(path), path.read_text()
    (install,) = [rest for name, rest in instructions(path) if name == "RUN" and "pip install" in rest]
    assert re.findall(r"hybridrec-\*\.whl\)\[(\w+)\]", install) == [stack]
    # Without its wheel by name, pip would take the CUDA build of fbgemm-gpu from the index: its version is higher.
    assert ("/wheels/fbgemm_gpu-*.whl" in install) == (stack != "cuda") == ("device_backends/fbgemm_cpu" in text)
    pins = dict(pin.split("==") for pin in EXTRAS[stack] if "==" in pin)
    assert all(pins[name] == version for name, version in re.findall(r"([\w-]+)==([\d.]+\d)", text))
    (command,) = [json.loads(rest) for name, rest in instructions(path) if name == "CMD"]
    assert command[1:] == ["-m", "hybridrec.doctor", "--device", stack]


@every_file
def test_python_is_new_enough(path: Path) -> None:
    least = tuple(int(part) for part in re.findall(r"\d+", PROJECT["requires-python"]))
    found = re.findall(r"\bpython:?(3\.\d+)", path.read_text())
    assert found and all(tuple(map(int, version.split("."))) >= least for version in found)


def test_the_readme_names_every_file_and_the_versions() -> None:
    text = (DOCKER / "README.md").read_text()
    assert all(path.name in text for path in DOCKER.iterdir() if path.name != "README.md")
    assert all(f"docker build -f docker/{path.name} " in text for path in FILES)


@pytest.mark.parametrize("arguments", [[], ["fetch", "cpu"], ["fetch", "abacus", "x"], ["build", "cpu", "x"]])
def test_the_recipe_explains_itself(arguments: list[str], tmp_path: Path) -> None:
    script = DOCKER / "offline_wheels.sh"
    done = subprocess.run([script, *arguments], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 2 and "fetch   cpu|cuda|npu FOLDER" in done.stderr
    assert list(tmp_path.iterdir()) == []


def pip_calls(folder: Path, *arguments: str) -> str:
    """What the recipe asks pip for, of an interpreter that only writes it down and makes the wheels it is asked for."""
    fake = folder / "python"
    fake.write_text(
        '#!/usr/bin/env bash\necho "$@" >> calls\n'
        'case "$*" in *"pip wheel"*fbgemm_cpu) touch wheels/fbgemm_gpu-0-py3-none-any.whl ;;\n'
        '*"pip wheel"*) touch wheels/hybridrec-1-cp311.whl ;; esac\n'
    )
    fake.chmod(0o755)
    environment = {"PYTHON": str(fake), "PATH": "/usr/bin:/bin"}
    subprocess.run([DOCKER / "offline_wheels.sh", *arguments], cwd=folder, env=environment, check=True)
    return (folder / "calls").read_text()


@pytest.mark.parametrize("stack", sorted(STACKS))
def test_the_recipe_fetches_our_wheels_by_name(tmp_path: Path, stack: str) -> None:
    *_, download = pip_calls(tmp_path, "fetch", stack, "wheels").splitlines()
    wheels = tmp_path / "wheels"
    assert download.startswith("-m pip download --only-binary=:all:")
    assert f"{wheels}/hybridrec-1-cp311.whl[{stack}]" in download
    assert (f"{wheels}/fbgemm_gpu-0-py3-none-any.whl" in download) == (stack != "cuda")
