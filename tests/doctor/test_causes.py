"""Environments in which an import fails: no CANN, another torch_npu, no GPU; one sentence each, and what to do."""

from __future__ import annotations

import importlib.metadata
import os
from pathlib import Path

import pytest

from hybridrec.doctor import versions
from hybridrec.doctor.causes import AUTOLOAD_VARIABLE, Cause, cause_of
from hybridrec.doctor.child import run_children
from hybridrec.doctor.report import Finding, Status
from tests.doctor.test_doctor import distribution, doctor, findings_of
from tests.repo.sources import ROOT

NO_CANN = "libhccl.so: cannot open shared object file: No such file or directory"
AUTOLOAD = (
    "Failed to load the backend extension: torch_npu. You can disable extension auto-loading with "
    "TORCH_DEVICE_BACKEND_AUTOLOAD=0."
)
STACK = "Install 'hybridrec[npu]' in a fresh environment."


def failed(text: str, cause: str | None = None) -> RuntimeError:
    """As torch raises it: the extension's own error behind it."""
    error = RuntimeError(text)
    error.__cause__ = None if cause is None else ImportError(cause)
    return error


def known(error: Exception) -> Cause:
    cause = cause_of(error, install_hint=STACK)
    assert cause is not None
    return cause


def test_a_missing_cann() -> None:
    cause = known(failed(AUTOLOAD, NO_CANN))
    assert cause.problem == "torch_npu needs libhccl.so of CANN, which is not found in this shell."
    assert cause.remedy == (
        "Source set_env.sh of the CANN toolkit in this shell (install CANN 9.1 if there is none), or export "
        "TORCH_DEVICE_BACKEND_AUTOLOAD=0 to train without torch_npu."
    )
    assert cause.is_autoload and not known(failed(NO_CANN)).is_autoload


def test_a_torch_npu_made_for_another_torch() -> None:
    cause = known(failed(AUTOLOAD, "libtorch_npu.so: undefined symbol: _ZN3c1013MessageLoggerC1EPKcii"))
    assert cause.problem == "torch_npu was compiled for another version of torch than the one that is installed."
    assert cause.remedy.startswith("Install 'hybridrec[npu]' in a fresh environment, or export TORCH_DEVICE")


def test_a_missing_driver_and_what_is_not_known() -> None:
    missing = "Could not load this library: libcuda.so.1: cannot open shared object file: No such file or directory"
    cause = known(OSError(missing))
    assert "libcuda.so.1 of the driver of the GPU" in cause.problem and "nvidia-smi" in cause.remedy
    other = known(failed(AUTOLOAD, "no idea"))
    assert other.problem == "torch_npu cannot be imported: no idea" and AUTOLOAD_VARIABLE in other.remedy
    assert cause_of(ImportError("No module named 'x'"), install_hint=STACK) is None


def plant_torch_npu(folder: Path, source: str) -> dict[str, str]:
    """A torch_npu that torch loads by itself, made for no torch of a stack. Returns the environment that sees it."""
    (folder / "torch_npu").mkdir()
    (folder / "torch_npu" / "__init__.py").write_text(source)
    distribution(folder, "torch-npu", "2.7.1.post4", "torch==2.7.1")
    entry = "[torch.backends]\ntorch_npu = torch_npu:_autoload\n"
    (folder / "torch_npu-2.7.1.post4.dist-info" / "entry_points.txt").write_text(entry)
    return {"PYTHONPATH": os.pathsep.join([str(folder), str(ROOT)])}


def test_without_cann_the_doctor_says_so_and_goes_on_without_the_extension(tmp_path: Path) -> None:
    environment = plant_torch_npu(tmp_path, f"raise ImportError({NO_CANN!r})")
    done = doctor("--json", "--device", "cpu", "--seconds", "300", **environment)
    found = findings_of(done)
    assert done.returncode == 1
    (torch_import,) = found["import torch"]
    assert torch_import["status"] == "fail" and torch_import["value"].startswith("torch_npu needs libhccl.so of CANN")
    assert "export TORCH_DEVICE_BACKEND_AUTOLOAD=0 to train without torch_npu" in torch_import["remedy"]
    assert found["without the extension"][0]["status"] == "off"
    assert found["cpu"][0]["value"].startswith("usable")
    assert found["gloo, 2 ranks"][0]["status"] == found["adam"][0]["status"] == "ok"
    # The planted torch_npu wants another torch, which is worth a warning to who does not train on it.
    torch_version = importlib.metadata.version("torch")
    (npu,) = found["torch-npu"]
    assert npu["status"] == "warn"
    assert npu["value"] == f"2.7.1.post4 works with torch 2.7.1 alone, and torch here is {torch_version}."


@pytest.mark.parametrize(
    ("device", "torch_version", "status"),
    [("npu", "2.13.0+cpu", Status.FAIL), (None, "2.13.0+cpu", Status.WARN), ("npu", "2.10.0+cpu", Status.OK)],
)
def test_a_wrong_version_of_torch_npu(device: str | None, torch_version: str, status: Status) -> None:
    installed = {"torch": torch_version, "torchrec": "1.5.0", "torch-npu": "2.10.0.post7"}
    requirements = {"torch-npu": ["numpy", "pyyaml", "torch==2.10.0+cpu ; platform_machine == 'x86_64'"]}
    found = versions.findings(device, installed=installed.get, requirements=lambda name: requirements.get(name, []))
    (finding,) = [f for f in found if f.what == "torch-npu"]
    assert finding.status is status
    if status is not Status.OK:
        assert finding.value == "2.10.0.post7 works with torch 2.10.0+cpu alone, and torch here is 2.13.0+cpu."
        assert finding.remedy.endswith("in a fresh environment: pip install 'hybridrec[npu]'.")


def devices_after_import(folder: Path, device: str, source: str) -> Finding:
    """What the doctor finds of a device after a module that changes torch was imported."""
    (folder / "planted.py").write_text(source)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(folder), str(ROOT)])}
    arguments = ["--device", device, "--import", "planted"]
    (outcome,) = run_children("hybridrec.doctor.stack", [arguments], seconds=300, environment=environment)
    (finding,) = [finding for finding in outcome.findings if finding.what == device]
    return finding


def test_a_missing_gpu(tmp_path: Path) -> None:
    source = "import torch\ntorch.version.cuda = '13.0'\ntorch.cuda.is_available = lambda: False\n"
    found = devices_after_import(tmp_path, "cuda", source)
    assert found.status is Status.FAIL
    assert found.value.startswith("not usable: torch ") and "finds no usable GPU" in found.value
    assert found.value.count(". ") == 0 and "nvidia-smi" in found.remedy
