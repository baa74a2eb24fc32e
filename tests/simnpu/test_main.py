"""``python -m tests.simnpu MODULE``: a program that knows nothing of the simulation."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]
PROGRAM = """
import importlib, importlib.util, os, sys
assert importlib.util.find_spec("torch_npu") is not None
importlib.import_module("torch_npu")
import torch
from device_backends.npu import backend

assert __name__ == "__main__"
assert backend.unavailable_reason() is None
tensor = torch.ones(3, device="npu:0")
side = torch.npu.Stream()
side.wait_stream(torch.npu.current_stream())
with torch.npu.stream(side):
    result = tensor + 1
if "wait" in sys.argv:
    torch.npu.current_stream().wait_stream(side)
del tensor
print(sys.argv[1:], os.environ["LOCAL_RANK"], *backend.memory_bytes(torch.device("npu")))
sys.exit(int(sys.argv[-1]))
"""


def start(folder: Path, *args: str) -> subprocess.CompletedProcess[str]:
    (folder / "program.py").write_text(PROGRAM)
    env = dict(os.environ, LOCAL_RANK="1", SIMNPU_MEMORY_BYTES="100000", PYTHONPATH=f"{REPOSITORY}:{folder}")
    command = [sys.executable, "-m", "tests.simnpu", "program", *args]
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=300, check=False)


def test_a_program_finds_an_npu_with_the_memory_that_it_was_given(tmp_path: Path) -> None:
    done = start(tmp_path, "wait", "0")
    assert done.returncode == 0, done.stderr
    assert done.stdout == "['wait', '0'] 0 99988 100000\n"  # 12 bytes are in use


def test_a_hazard_that_is_left_behind_fails_the_program(tmp_path: Path) -> None:
    done = start(tmp_path, "0")
    assert done.returncode == 1
    assert "SyncHazard: 1 hazards on the simulated device" in done.stderr


def test_the_program_s_own_status_is_kept(tmp_path: Path) -> None:
    assert start(tmp_path, "wait", "7").returncode == 7
