"""The C++ unit tests: a short run under address checks, and long ones.

They hold a shard group against a dictionary under random calls (`harness.h`), the parts by themselves, and reads beside
training; what they print says how many random calls that were.
"""

from __future__ import annotations

import os
import pathlib
import re
import shutil
import subprocess

import pytest

SCRIPT = pathlib.Path(__file__).with_name("run_sanitizers.sh")
pytestmark = pytest.mark.skipif(
    shutil.which(os.environ.get("CXX", "g++")) is None, reason="this machine has no C++ compiler"
)


def run(sanitizer: str, optimize: str, steps: int) -> int:
    """Random calls that were made."""
    environment = {**os.environ, "OPTIMIZE": optimize, "STEPS": str(steps)}
    done = subprocess.run([str(SCRIPT), sanitizer], capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    passed = re.search(r"native tests passed, (\d+) random calls", done.stdout)
    assert passed is not None, done.stdout
    return int(passed[1])


def test_hkv_the_core_against_a_dictionary() -> None:
    assert run("address,undefined", "-O0", 300) > 10_000


@pytest.mark.slow
def test_hkv_a_million_random_calls() -> None:
    assert run("none", "-O2", 25_000) > 1_000_000


@pytest.mark.slow
@pytest.mark.parametrize("sanitizer", ["address,undefined", "thread"])
def test_the_core_is_clean(sanitizer: str) -> None:
    assert run(sanitizer, "-O1", 3000) > 100_000
