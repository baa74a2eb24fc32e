"""Make the virtual environment `.venv` of this checkout, or bring it up to date; does nothing if it is.

Standard library only, from any working directory:

    python3 tools/setup_env.py [--stack cpu|cuda|npu|npu-stack]

`npu-stack` makes another one, `.venv-npu-stack`: the versions of the NPU stack on a machine without an NPU. What cannot
be imported without CANN lies beside its packages, in `.venv-npu-stack/device_wheels`.

What is installed, and in which version, is in pyproject.toml alone. `.venv` is refreshed when pyproject.toml changes,
and hybridrec alone is installed anew when its C++ sources change or modules come and go; a stamp in `.venv` holds the
hashes. The build runs without isolation, in a folder that stays, so that a rebuild compiles only what was edited.

With the environment variable HYBRIDREC_PYTHON set to an interpreter nothing is made or installed: that environment is
used as it is, after a check that hybridrec is installed in it.
"""

from __future__ import annotations

import argparse
import fcntl
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import NoReturn

ROOT = Path(__file__).resolve().parent.parent
NATIVE = ROOT / "hybridrec" / "native"
PACKAGES = ("hybridrec", "device_backends")
STAND_IN = ROOT / "device_backends" / "fbgemm_cpu"
MIN_PYTHON = (3, 11)
EXTRAS = "demo,test,dev"
NPU_STACK = "npu-stack"
NEED_CANN = ("torch-npu", "fbgemm-ascend")


def main() -> int:
    """Entry point; returns the exit status."""
    check_python()
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument(
        "--stack", choices=("cpu", "cuda", "npu", NPU_STACK), default="cpu", help="for what (default: cpu)"
    )
    stack = parser.parse_args().stack
    brought = os.environ.get("HYBRIDREC_PYTHON")
    if brought:
        check_brought_environment(brought)
        return 0
    with only_one_at_a_time():
        refresh(stack)
    return 0


def check_python() -> None:
    """End with a readable text if this interpreter cannot make the environment."""
    if sys.version_info < MIN_PYTHON:
        version = ".".join(str(n) for n in sys.version_info[:3])
        fail(
            f"hybridrec needs Python {MIN_PYTHON[0]}.{MIN_PYTHON[1]} or later; {sys.executable} is {version}.\n"
            "Name a newer one, as in: make PYTHON=python3.11 demo"
        )
    try:
        import ensurepip  # noqa: F401
        import venv  # noqa: F401
    except ImportError as error:
        fail(
            f"{sys.executable} cannot make virtual environments ({error}).\n"
            "On Debian and Ubuntu: apt install python3-venv. Or bring an environment: HYBRIDREC_PYTHON=/path/to/python"
        )


def check_brought_environment(python: str) -> None:
    """End with a readable text unless hybridrec is installed for the interpreter that the user brings."""
    probe = "import sys, importlib.metadata as m; m.version('hybridrec'); sys.exit(sys.version_info < (3, 11))"
    try:
        done = subprocess.run([python, "-c", probe], cwd=ROOT, capture_output=True, text=True, check=False)
    except OSError as error:
        fail(f"HYBRIDREC_PYTHON={python} cannot be started: {error}")
    if done.returncode != 0:
        fail(
            f"HYBRIDREC_PYTHON={python}: it must be Python 3.11 or later with hybridrec installed.\n"
            f"Install it there once: {python} -m pip install {STAND_IN} -e '{ROOT}[cpu,{EXTRAS}]'\n"
            "(with an NPU: npu in place of cpu; with a CUDA GPU: cuda in place of cpu, and without the first path)\n"
            + done.stderr.strip().rpartition("\n")[2]
        )


def refresh(stack: str) -> None:
    """Do what the stamp says is due: everything, a new build of the core alone, or nothing."""
    wanted = {"environment": environment_hash(stack), "core": core_hash()}
    found = read_stamp(stack)
    if found == wanted:
        return
    started = time.monotonic()
    if found.get("environment") != wanted["environment"]:
        make_environment(stack)
    else:
        say("C++ sources or modules were added or changed: installing hybridrec anew")
        install_hybridrec(stack, dependencies=False, extras="")
    check_core(stack)
    stamp_of(stack).write_text(json.dumps(wanted))
    say(f"ready in {time.monotonic() - started:.0f} s")


def make_environment(stack: str) -> None:
    """Create the environment unless a fitting one is there, and install everything."""
    stamp_of(stack).unlink(missing_ok=True)
    folder = venv_of(stack)
    if not has_same_python(stack):
        say(f"making {folder.name} with Python {sys.version.split()[0]} and the {stack} stack: about a minute, once")
        subprocess.run([sys.executable, "-m", "venv", "--clear", str(folder)], check=True)
    else:
        say(f"pyproject.toml changed: bringing {folder.name} up to date ({stack} stack)")
    import tomllib  # Python 3.11 has it, and check_python has passed

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    # TorchRec 1.5 needs iopath, which comes as source and is built without isolation, too.
    for_iopath = ["setuptools", "wheel"] if stack in ("npu", NPU_STACK) else []
    pip(stack, "install", *project["build-system"]["requires"], *for_iopath)
    say("installing torch, torchrec, fbgemm, the tools of demo and tests, building hybridrec")
    if stack == NPU_STACK:
        make_npu_stack(project["project"]["optional-dependencies"]["npu"])
    else:
        beside = [] if stack == "cuda" else [str(STAND_IN)]
        install_hybridrec(stack, dependencies=True, extras=f"{stack},{EXTRAS}", beside=beside)


def make_npu_stack(pins: list[str]) -> None:
    """The extra `npu` for a machine without CANN, where importing torch would import torch-npu, and fail."""
    need_cann = [pin for pin in pins if re.split(r"[=<>!~ ]", pin)[0] in NEED_CANN]
    rest = [pin for pin in pins if pin not in need_cann]
    install_hybridrec(NPU_STACK, dependencies=True, extras=EXTRAS, beside=[str(STAND_IN), *rest])
    wheels = venv_of(NPU_STACK) / "device_wheels"
    shutil.rmtree(wheels, ignore_errors=True)
    # Without dependencies: torch-npu for x86-64 asks for torch's CPU build by a version that not every index has.
    pip(NPU_STACK, "install", "--no-deps", "--target", str(wheels), *need_cann)
    probe = "import torch; print(torch.__version__ if torch.version.cuda else '')"
    command = [str(python_of(NPU_STACK)), "-c", probe]
    done = subprocess.run(command, cwd=venv_of(NPU_STACK), capture_output=True, text=True, check=True)
    if done.stdout.strip():
        say(
            f"pip's index has no CPU build of torch for this machine: torch {done.stdout.strip()} is a CUDA build. It\n"
            "serves the tests, which use no GPU. With an NPU it will not do: give pip PyTorch's own index of CPU builds"
        )


def install_hybridrec(stack: str, *, dependencies: bool, extras: str, beside: list[str] | None = None) -> None:
    """Editable, without build isolation."""
    target = f"{ROOT}[{extras}]" if extras else str(ROOT)
    options = [] if dependencies else ["--no-deps"]
    if stack == NPU_STACK:  # CMake's cache holds paths of one environment
        options.append(f"--config-settings=build-dir=build/{NPU_STACK}-{{wheel_tag}}")
    pip(stack, "install", "--no-build-isolation", *options, *(beside or []), "-e", target)


def check_core(stack: str) -> None:
    """Say it if the C++ core is missing; end if there is a compiler, since then its build has failed."""
    probe = "import importlib.util, sys; sys.exit(importlib.util.find_spec('hybridrec._native') is None)"
    python = str(python_of(stack))
    if subprocess.run([python, "-c", probe], cwd=venv_of(stack), check=False).returncode == 0:
        return
    if find_compiler() is None:
        say("no C++ compiler found: the numpy core serves, slower. With one (apt install build-essential), run again")
        return
    command = [python, "-m", "pip", "install", "-v", "--no-build-isolation", "--no-deps", "-e", str(ROOT)]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    sys.stderr.write(done.stdout)
    fail(f"the C++ core did not build although there is a compiler ({find_compiler()}): see above")


def venv_of(stack: str) -> Path:
    """The environment's folder. One for all devices that a machine may have; `npu-stack` does not replace it."""
    return ROOT / (f".venv-{stack}" if stack == NPU_STACK else ".venv")


def python_of(stack: str) -> Path:
    """The environment's interpreter."""
    return venv_of(stack) / "bin" / "python"


def stamp_of(stack: str) -> Path:
    """The file that says what the environment was made from."""
    return venv_of(stack) / "hybridrec_stamp.json"


def environment_hash(stack: str) -> str:
    """Of all that decides what is installed. The path is part of it: an environment cannot be moved."""
    stand_in = STAND_IN / "pyproject.toml"
    parts = [sys.version.encode(), stack.encode(), bytes(ROOT), (ROOT / "pyproject.toml").read_bytes()]
    return hash_of([*parts, stand_in.read_bytes()])


def core_hash() -> str:
    """Of the C++ sources, of whether there is a compiler, and of which Python files there are.

    The names of these, not their content: an editable installation finds modules by a table made when it is installed.
    """
    files = [NATIVE / "CMakeLists.txt", NATIVE / "bind.cpp"]
    files += [p for folder in ("include", "src") for p in (NATIVE / folder).rglob("*") if p.is_file()]
    modules = sorted(p.relative_to(ROOT) for folder in PACKAGES for p in (ROOT / folder).rglob("*.py"))
    parts = [str(find_compiler()).encode(), "\n".join(str(p) for p in modules).encode()]
    for path in sorted(p for p in files if p.exists()):
        parts += [bytes(path.relative_to(ROOT)), path.read_bytes()]
    return hash_of(parts)


def hash_of(parts: list[bytes]) -> str:
    """SHA-256 of the parts; each is preceded by its length, so that no two lists look alike."""
    digest = hashlib.sha256()
    for part in parts:
        digest.update(len(part).to_bytes(8, "little") + part)
    return digest.hexdigest()


def find_compiler() -> str | None:
    """The C++ compiler that CMake would take."""
    names = [os.environ.get("CXX", ""), "c++", "g++", "clang++"]
    return next((path for path in (shutil.which(name) for name in names if name) if path), None)


def has_same_python(stack: str) -> bool:
    """Whether the environment works and has this interpreter's version."""
    if not python_of(stack).exists():
        return False
    probe = [str(python_of(stack)), "-c", "import pip, sys; print(sys.version)"]
    done = subprocess.run(probe, capture_output=True, text=True, check=False)
    return done.returncode == 0 and done.stdout.strip() == sys.version.strip()


def read_stamp(stack: str) -> dict[str, str]:
    """What the last complete run left; nothing if there was none, or if the interpreter is gone."""
    if not (stamp_of(stack).exists() and python_of(stack).exists()):
        return {}
    try:
        stamp: dict[str, str] = json.loads(stamp_of(stack).read_text())
    except ValueError:  # half written
        return {}
    return stamp


def pip(stack: str, *arguments: str) -> None:
    """Run the environment's own pip; end, with its messages above, if it fails."""
    command = [str(python_of(stack)), "-m", "pip", "--disable-pip-version-check", "-q", *arguments]
    if subprocess.run(command, cwd=ROOT, check=False).returncode != 0:
        fail("pip failed, see above. Nothing else was changed; the next run tries again:\n  " + " ".join(command))


def only_one_at_a_time() -> Lock:
    """A lock that holds between processes: two `make` at once must not install into each other."""
    return Lock(ROOT / ".stamps" / "setup.lock")


class Lock:
    """An advisory file lock, released also when the process is killed."""

    def __init__(self, path: Path) -> None:
        """The file is made; nothing is locked yet."""
        path.parent.mkdir(exist_ok=True)
        self._file = path.open("w")

    def __enter__(self) -> None:
        """Wait for the lock."""
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say("waiting for another set-up of this checkout")
            fcntl.flock(self._file, fcntl.LOCK_EX)

    def __exit__(self, *_: object) -> None:
        """Release it."""
        self._file.close()


def say(text: str) -> None:
    """One line on standard error, so that standard output stays the command's own."""
    print(f"[setup] {text}", file=sys.stderr, flush=True)


def fail(text: str) -> NoReturn:
    """End with status 1 and the reason."""
    say(text)
    sys.exit(1)


if __name__ == "__main__":
    sys.exit(main())
