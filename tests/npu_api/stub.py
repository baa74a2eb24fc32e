"""Libraries in CANN's place, made from what torch-npu's wheel asks for: enough to import it and to copy memory."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import torch

HERE = Path(__file__).parent
_LIBRARY = re.compile(r"^\s*(\S+) => not found", re.MULTILINE)
_SYMBOL = re.compile(r"^undefined symbol: (\w+)", re.MULTILINE)
# Looked up by name at run time; an answer of 0 serves.
_LOOKED_UP = (
    "aclSetCompileopt",
    "aclopCompileAndExecuteV2",
    "aclrtCtxSetSysParamOpt",
    "aclrtDestroyStreamForce",
    "aclrtSetDeviceSatMode",
    "aclrtSetOpExecuteTimeOut",
    "aclrtSetSysParamOpt",
    "aclrtSynchronizeDeviceWithTimeout",
    "aclrtSynchronizeStreamWithTimeout",
)


def build_stub(torch_npu: Path, folder: Path) -> None:
    """Put into ``folder`` all that ``torch_npu``, the package's folder, needs and does not find here.

    Raises:
        RuntimeError: There is no C compiler, or the loader's tool `ldd` is missing; says which.
    """
    folder.mkdir(parents=True, exist_ok=True)
    libraries, symbols = _missing(torch_npu)
    known = set(re.findall(r"^(?:int|const char \*)\s?\*?(\w+)\(", (HERE / "cann.c").read_text(), re.MULTILINE))
    rest = folder / "rest.c"
    rest.write_text("".join(f"long {name}(void) {{ return 0; }}\n" for name in sorted(symbols - known)))
    stub = folder / "libcann_stub.so"
    _run("cc", "-w", "-shared", "-fPIC", "-o", str(stub), str(HERE / "cann.c"), str(rest))
    for name in libraries:
        link = folder / name
        link.unlink(missing_ok=True)
        link.symlink_to(stub.name)
    _run("c++", "-shared", "-fPIC", "-o", str(folder / "libforget_keys.so"), str(HERE / "forget_keys.cpp"))


def _missing(torch_npu: Path) -> tuple[set[str], set[str]]:
    """Libraries and symbols that the loader does not find, those of Python left out."""
    found = os.pathsep.join([str(torch_npu / "lib"), str(Path(torch.__file__).parent / "lib")])
    libraries, symbols = set[str](), set(_LOOKED_UP)
    for path in [*torch_npu.glob("_C*.so"), torch_npu / "lib" / "libtorch_npu.so"]:
        text = _run("ldd", "-r", str(path), LD_LIBRARY_PATH=found)
        libraries.update(_LIBRARY.findall(text))
        symbols.update(name for name in _SYMBOL.findall(text) if not re.match("_?Py", name))
    return libraries, symbols


def _run(*command: str, **env: str) -> str:
    try:
        done = subprocess.run(command, env={**os.environ, **env}, capture_output=True, text=True, check=False)
    except FileNotFoundError as e:
        raise RuntimeError(f"{command[0]} is missing: a C and C++ compiler and ldd are needed to make the stub") from e
    if done.returncode != 0 and command[0] != "ldd":
        raise RuntimeError(f"{' '.join(command)} failed:\n{done.stderr}")
    return done.stdout + done.stderr
