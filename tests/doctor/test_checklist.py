"""The checklist of a device: on the simulated NPU, without a device, and each step's way to end."""

from __future__ import annotations

import importlib.metadata
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from hybridrec.doctor import checklist, checklist_report, kernel_sizes, steps
from hybridrec.doctor.checklist_report import Report, Result, Verdict
from hybridrec.doctor.examination import Examination
from hybridrec.doctor.report import Finding, Status
from hybridrec.doctor.steps import Ended, run_command
from tests.repo.sources import ROOT

SIMULATED_TORCH_NPU = """
from tests.simnpu.install import install
install()
"""


def run_checklist(device: str, report: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "hybridrec.doctor", f"--{device}-checklist", "--report", str(report), *arguments]
    env = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", **environment}
    return subprocess.run(command, env=env, cwd=ROOT, capture_output=True, text=True, check=False, timeout=1800)


def on_simulated_npu(folder: Path, *arguments: str) -> tuple[subprocess.CompletedProcess[str], dict[str, Any]]:
    """With a torch_npu whose import puts the simulated device in place."""
    package = folder / "torch_npu"
    package.mkdir()
    (package / "__init__.py").write_text(SIMULATED_TORCH_NPU)
    if torch.version.cuda is not None:  # torch_npu is refused beside it before it is imported: be the CPU build
        (folder / "sitecustomize.py").write_text("import torch\ntorch.version.cuda = None\n")
    path = os.pathsep.join([str(folder), str(ROOT)])
    done = run_checklist("npu", folder / "out" / "report", *arguments, PYTHONPATH=path)
    assert (folder / "out" / "report.json").exists(), done.stdout + done.stderr
    return done, json.loads((folder / "out" / "report.json").read_text())


def test_on_the_simulated_npu(tmp_path: Path) -> None:
    done, report = on_simulated_npu(tmp_path, "--step", "collectives")
    assert done.returncode == 0, done.stdout + done.stderr
    found = {step["step"]: (step["verdict"], step["reason"]) for step in report["steps"]}
    assert tuple(found) == checklist.STEPS
    assert found["doctor"][0] == found["collectives"][0] == "passed"
    assert found["collectives"][1].startswith("exact: hccl between 1 rank; gloo between 2 ranks; one device")
    assert all(found[step] == ("skipped", f"not asked for: --step {step}") for step in checklist.STEPS[2:])
    assert (report["device"], report["complete"], report["exit_status"]) == ("npu", True, 0)
    assert report["versions"]["torch"] == importlib.metadata.version("torch")
    text = (tmp_path / "out" / "report.txt").read_text()
    assert text.rstrip().endswith("device 'npu': 2 passed, 0 failed, 4 skipped")
    assert "all_to_all of 1048576 elements" in text
    assert sorted(os.listdir(tmp_path / "out")) == ["report.json", "report.txt"]


@pytest.mark.slow
def test_everything_on_the_simulated_npu(tmp_path: Path) -> None:
    done, report = on_simulated_npu(
        tmp_path, "--step", "collectives", "--step", "kernels", "--step", "demo", "--seconds", "600"
    )
    assert done.returncode == 0, done.stdout + done.stderr
    verdicts = {step["step"]: step["verdict"] for step in report["steps"]}
    assert [verdicts[step] for step in ("doctor", "collectives", "kernels", "demo")] == ["passed"] * 4
    assert any("AUC" in line for step in report["steps"] if step["step"] == "demo" for line in step["details"])


def test_without_the_device_one_sentence_says_why_and_what_to_do(tmp_path: Path) -> None:
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    done = run_checklist("cuda", tmp_path / "report")
    assert done.returncode == checklist.NO_DEVICE
    last = done.stdout.splitlines()[-1]
    remedy = "; install hybridrec[cuda]" if torch.version.cuda is None else "finds no usable GPU; check that nvidia-smi"
    assert last.startswith("device 'cuda' cannot be verified here: torch ") and remedy in last
    assert list(tmp_path.iterdir()) == []


def test_options_that_do_not_go_together(tmp_path: Path) -> None:
    for arguments in (["--step", "demo"], ["--npu-checklist", "--device", "cpu"], ["--npu-checklist", "--strict"]):
        command = [sys.executable, "-m", "hybridrec.doctor", *arguments]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=300)
        assert done.returncode == 2 and "checklist" in done.stderr


def examination(*findings: Finding, **fields: Any) -> Examination:
    given = {"device": "npu", "host": "cpu", "count": 2, "collective": "hccl", "environment": {}, **fields}
    return Examination(findings=findings, **given)


def test_the_sentence_is_about_the_device_before_anything_else() -> None:
    stack = Finding(section="Versions", what="torch", value="not installed", status=Status.FAIL, remedy="Install it.")
    npu = Finding(section="Devices", what="npu", value="not usable: hidden", status=Status.FAIL, remedy="CANN first.")
    said = [checklist.no_device(examination(*found)) for found in ((stack,), (stack, npu), ())]
    assert said == [
        "device 'npu' cannot be verified here: not installed; install it.",
        "device 'npu' cannot be verified here: hidden; CANN first.",
        "device 'npu' cannot be verified here: its backend gives no reason.",
    ]


def test_a_failure_of_the_doctor_fails_its_step() -> None:
    warn = Finding(section="S", what="stack", value="none", status=Status.WARN, remedy="do that")
    fail = Finding(section="S", what="core", value="gone", status=Status.FAIL, remedy="do this")
    passed, failed = steps.doctor(examination(warn), 1.0), steps.doctor(examination(warn, fail), 1.0)
    assert (passed.verdict, passed.reason) == (Verdict.PASSED, "1 checks, 0 failures, 1 warning")
    assert (failed.verdict, failed.details[1]) == (Verdict.FAILED, "fail core: gone -> do this")


@pytest.mark.parametrize(
    ("exit_code", "lines", "verdict", "reason"),
    [
        (0, ["3 passed, 1 skipped in 2s"], Verdict.PASSED, "3 passed, 1 skipped in 2s"),
        (0, ["4 skipped in 2s"], Verdict.SKIPPED, "no test ran: 4 skipped in 2s"),
        (5, ["9 deselected"], Verdict.SKIPPED, "no test is marked 'npu'"),
        (1, ["FAILED tests/x.py", "1 failed"], Verdict.FAILED, "exit status 1: 1 failed"),
        (None, [], Verdict.FAILED, "no end within 3600 s: "),
    ],
)
def test_how_the_step_of_tests_ends(
    monkeypatch: pytest.MonkeyPatch, exit_code: int | None, lines: Sequence[str], verdict: Verdict, reason: str
) -> None:
    def ended(command: Sequence[str], **kwargs: Any) -> Ended:
        assert command[1:5] == ["-m", "pytest", "-m", "npu"] and kwargs["folder"] == ROOT
        how = "no end within 3600 s" if exit_code is None else f"exit status {exit_code}"
        return Ended(exit_code=exit_code, how=how, lines=tuple(lines))

    monkeypatch.setattr(steps, "run_command", ended)
    result = steps.run("tests", examination(), seconds=1.0)
    assert (result.verdict, result.reason) == (verdict, reason)


def test_a_demo_or_benchmark_that_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    ended = Ended(exit_code=1, how="exit status 1", lines=("loss 0.1", "AUC too low"))
    monkeypatch.setattr(steps, "run_command", lambda *args, **kwargs: ended)
    result = steps.run("demo", examination(), seconds=1.0)
    assert (result.verdict, result.reason) == (Verdict.FAILED, "exit status 1: AUC too low")
    assert result.details == ended.lines


@pytest.mark.parametrize("step", ["tests", "demo", "benchmarks"])
def test_outside_of_a_checkout_what_needs_one_is_skipped(monkeypatch: pytest.MonkeyPatch, step: str) -> None:
    monkeypatch.setattr(steps, "checkout", lambda: None)
    result = steps.run(step, examination(), seconds=1.0)
    assert result.verdict is Verdict.SKIPPED and "run the checklist in a checkout" in result.reason


def test_collectives_that_fail_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(steps, "UNITS", (16,))
    result = steps.run("collectives", examination(collective="nonesuch", device="cpu", is_host=True), seconds=60)
    assert result.verdict is Verdict.FAILED and "nonesuch, 2 ranks: rank" in result.reason


def test_a_command_ends_with_all_that_it_started(tmp_path: Path) -> None:
    file = tmp_path / "pid"
    script = f"echo begun; sleep 300 & echo $! > {file}; sleep 300"
    started = time.monotonic()
    ended = run_command(["bash", "-c", script], folder=tmp_path, seconds=4.0, environment=os.environ)
    assert time.monotonic() - started < 200
    assert (ended.exit_code, ended.how, ended.lines) == (None, "no end within 4 s", ("begun",))
    child = Path(f"/proc/{int(file.read_text())}/stat")
    while not has_ended(child):  # it was killed; the system may be slow to say so
        assert time.monotonic() - started < 200
        time.sleep(0.05)


def has_ended(stat: Path) -> bool:
    try:
        return stat.read_text().rpartition(")")[2].split()[0] == "Z"
    except (FileNotFoundError, ProcessLookupError):
        return True


def run_kernel_sizes(out: Path, monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    arguments = ["--out", str(out), "--device", "cpu", "--rows", "500", "--bags", "64"]
    monkeypatch.setattr(sys, "argv", ["kernel_sizes", *arguments])
    monkeypatch.setattr(kernel_sizes, "DIMS", (6, 64))
    kernel_sizes.main()
    return [json.loads(line) for line in out.read_text().splitlines()]


def test_kernels_at_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    records = run_kernel_sizes(tmp_path / "out", monkeypatch)
    assert [r["error"] for r in records if "error" in r] == []
    assert sum("kernel" in record for record in records) == 16 and records[-1] == {"done": True}


def test_a_kernel_that_forgets_an_occurrence_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from hybridrec.kernels.torch_kernel import TorchKernel

    forward = TorchKernel.forward

    def without_the_last(self: Any, slots: torch.Tensor, offsets: torch.Tensor, weights: Any) -> Any:
        slots[-1] = slots[0]
        return forward(self, slots, offsets, weights)

    monkeypatch.setattr(TorchKernel, "forward", without_the_last)
    errors = [record["error"] for record in run_kernel_sizes(tmp_path / "out", monkeypatch) if "error" in record]
    assert errors and all("torch kernel: BackendError" in text and "off by" in text for text in errors)


def test_a_report_is_replaced_as_a_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    result = Result(step="doctor", verdict=Verdict.FAILED, reason="one " * 40, details=("a detail",))
    report = Report(device="npu", started="2026-01-01T00:00:00Z", is_complete=False, results=(result,))
    path = tmp_path / "report"
    checklist_report.write(path, report)
    before = path.with_suffix(".json").read_text()
    assert json.loads(before)["exit_status"] == 1 and not json.loads(before)["complete"]
    assert "1 failed, 0 skipped; not complete" in path.with_suffix(".txt").read_text()

    def fail(*args: object) -> None:
        raise OSError("no space left")

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(OSError, match="no space"):
        checklist_report.write(path, Report(device="npu", started="", is_complete=True, results=()))
    assert path.with_suffix(".json").read_text() == before
    assert sorted(os.listdir(tmp_path)) == ["report.json", "report.txt"]
