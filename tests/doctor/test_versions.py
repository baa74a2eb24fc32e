"""Which stack the installed distributions make."""

from __future__ import annotations

import tomllib

import pytest

from hybridrec.backend import ENTRY_POINT_GROUP, known_backends
from hybridrec.doctor.report import Finding, Status
from hybridrec.doctor.versions import BACKENDS, findings, known_devices, stacks
from tests.repo.sources import ROOT

HOST = {
    "torch": "2.13.0+cpu",
    "torchrec": "1.8.0",
    "fbgemm-gpu-cpu": "1.8.0",
    "fbgemm-gpu": "0+cpu",
    "tensordict": "0.15.3",
}
ASCEND = {
    "torch": "2.10.0+cpu",
    "torchrec": "1.5.0",
    "fbgemm-gpu-cpu": "1.5.0",
    "fbgemm-ascend": "1.5.0",
    "torch-npu": "2.10.0.post7",
    "tensordict": "0.12.1",
    "pyyaml": "6.0",
}


def of(installed: dict[str, str], what: str, device: str | None = None) -> Finding:
    (found,) = [f for f in findings(device, installed=installed.get) if f.what == what]
    return found


def test_stacks_are_those_of_pyproject() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    rows = stacks()
    assert sorted(rows) == ["cpu", "cuda", "npu"]
    for name, pins in rows.items():
        assert sorted(n + operator + version for n, (operator, version) in pins.items()) == sorted(extras[name])


@pytest.mark.parametrize(("installed", "row"), [(HOST, "cpu"), (ASCEND, "npu")])
def test_a_whole_stack_is_recognised(installed: dict[str, str], row: str) -> None:
    assert of(installed, "stack") == Finding(section="Versions", what="stack", value=row)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"torch": "2.12.0+cpu"}, "torch is 2.12.0+cpu, not 2.13.0"),
        ({"tensordict": "0.16.0"}, "tensordict is 0.16.0, not <0.16"),
        ({"fbgemm-gpu-cpu": None}, "fbgemm-gpu-cpu is missing"),
    ],
)
def test_a_difference_is_named(change: dict[str, str], text: str) -> None:
    found = of({**HOST, **change}, "stack")
    assert found.status is Status.WARN and "Nearest is cpu" in found.value and text in found.value


def test_the_stack_of_another_device_is_warned_of() -> None:
    found = of(HOST, "stack", device="cuda")
    assert found.status is Status.WARN
    assert "not cuda (fbgemm-gpu is 0+cpu, not 1.8.0)" in found.value and "hybridrec[STACK]" in found.remedy


@pytest.mark.parametrize(
    ("version", "status"), [("1.5.0+npu", Status.WARN), ("1.8.0+cu128", Status.OK), ("1.8.0", Status.OK)]
)
def test_a_patched_build_tells_by_its_version(version: str, status: Status) -> None:
    assert of({**HOST, "torchrec": version}, "torchrec").status is status


def test_missing_torch_fails_and_says_how_to_install() -> None:
    found = of({}, "torch")
    assert found.status is Status.FAIL and "STACK one of cpu, cuda, npu" in found.remedy
    assert of({}, "fbgemm-ascend").status is Status.OFF


def test_devices_are_those_of_the_backends() -> None:
    assert BACKENDS == ENTRY_POINT_GROUP
    assert known_devices() == sorted(known_backends()) and {"cpu", "cuda", "npu"} <= set(known_devices())
