"""The C++ unit tests under the address, undefined-behaviour and thread sanitizers."""

from __future__ import annotations

import os
import pathlib
import shutil
import subprocess

import pytest

SCRIPT = pathlib.Path(__file__).with_name("run_sanitizers.sh")


@pytest.mark.slow
@pytest.mark.skipif(shutil.which(os.environ.get("CXX", "g++")) is None, reason="this machine has no C++ compiler")
@pytest.mark.parametrize("sanitizer", ["address,undefined", "thread"])
def test_the_core_is_clean(sanitizer: str) -> None:
    done = subprocess.run([str(SCRIPT), sanitizer], capture_output=True, text=True, check=False)

    assert done.returncode == 0, done.stdout + done.stderr
    assert "native tests passed" in done.stdout
