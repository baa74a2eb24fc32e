"""``python -m tests.npu_api``: do torch-npu and fbgemm-ascend, as pinned, have all that hybridrec calls?

Needs no NPU and no CANN.

Started by `make npu-api` in the environment `.venv-npu-stack`, where torch-npu's wheel lies unpacked beside the
packages. The real wheel is imported over libraries that stand in for CANN (stub.py): device memory is host memory, and
no kernel computes anything. What is found out is that names exist and are called rightly, that copies, streams and
events work through torch-npu's own code, that each operator which training runs on the device has a kernel there, and
that tables in host memory train as they should once fbgemm-ascend is imported.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

from tests.npu_api.operators import used_operators
from tests.npu_api.stub import build_stub

WHEELS = Path(sys.prefix) / "device_wheels"


def main() -> int:
    """Returns the exit status."""
    versions = {d.name: d.version for d in importlib.metadata.distributions(path=[str(WHEELS)])}
    if "torch-npu" not in {name.replace("_", "-") for name in versions}:
        print(f"{WHEELS} holds no torch-npu: run `make npu-api`, which makes that environment", file=sys.stderr)
        return 2
    build = f"CUDA {torch.version.cuda}" if torch.version.cuda else "CPU"
    print(f"{versions} with torch {torch.__version__} ({build} build)", flush=True)
    with tempfile.TemporaryDirectory() as name:
        stub = Path(name)
        build_stub(WHEELS / "torch_npu", stub)
        (stub / "operators.json").write_text(json.dumps(used_operators()))
        env = {
            **os.environ,
            "LD_LIBRARY_PATH": str(stub),
            "PYTHONPATH": os.pathsep.join([str(WHEELS), str(Path.cwd())]),
            "TORCH_DEVICE_BACKEND_AUTOLOAD": "0",
            "GLOO_SOCKET_IFNAME": "lo",
            "FBGEMM_ASCEND_FORCE_BUILD_VER": "A2",  # of the stub's chip, for which there is no npu-smi to ask
        }
        command = [sys.executable, "-m", "tests.npu_api.checks", str(stub), str(stub / "operators.json")]
        command += sys.argv[1:]
        return subprocess.run(command, env=env, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
