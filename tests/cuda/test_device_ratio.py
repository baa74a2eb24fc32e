"""The benchmark of a device's checklist, with small tables: it runs, skips by name and says what it compares."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

from tests.repo.sources import ROOT

SMALL = "--tables 2 --rows 500 --dim 8 --batch 32 --repeats 3 --steps 2 --warmup 1 --distinct-batches 3".split()


def run(*command: str) -> str:
    done = subprocess.run([sys.executable, "-m", *command, *SMALL], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def ratios(output: str) -> dict[str, float]:
    return {name.strip(): float(x) for name, x in re.findall(r"^(.+?) +[\d.]+ ms \[.*?\] +([\d.]+)x", output, re.M)}


def test_on_the_host() -> None:
    output = run("benchmarks.device_ratio", "--device", "cpu")
    found = ratios(output)
    assert list(found) == ["all device", "hybrid 10%", "hybrid 40%", "hybrid 100%"]
    assert found["all device"] == 1.0 and all(ratio > 0 for ratio in found.values())
    skipped = re.findall(r"^(.+): skipped: FBGEMM has unified memory on cuda alone$", output, re.M)
    assert skipped == ["fused_uvm_caching 10%", "fused_uvm_caching 40%", "fused_uvm"]
    assert "the hybrids' last losses are the same, bit for bit" in output


@pytest.mark.slow
def test_on_the_simulated_npu() -> None:
    output = run("tests.simnpu", "benchmarks.device_ratio", "--device", "npu")
    assert list(ratios(output)) == ["all device", "hybrid 10%", "hybrid 40%", "hybrid 100%"]
    assert "TorchRec's tables: skipped: it knows no 'npu'" in output
    assert "the hybrids' last losses are the same, bit for bit" in output


@pytest.mark.cuda
def test_on_a_gpu() -> None:
    found = ratios(run("benchmarks.device_ratio", "--device", "cuda"))
    assert {"all device", "hybrid 10%", "fused_uvm_caching 10%", "fused_uvm"} <= set(found)
