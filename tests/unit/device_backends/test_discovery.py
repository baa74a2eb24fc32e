"""Backends are found by entry point; the documented third-party one is installed and trains on the simulated NPU."""

from __future__ import annotations

import importlib.metadata
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import pytest
import torch

from hybridrec import backend as contract
from hybridrec._compat import planner_device
from hybridrec.backend import DeviceBackend, KernelRequest, known_backends, load_backend, parse_device, resolve_backend
from hybridrec.errors import BackendError, ConfigError
from tests.distributed.pipelines import run_pipeline_against_oracle
from tests.distributed.scenario import Scenario
from tests.ranks import RankPools
from tests.repo.sources import ROOT

DOCUMENT = ROOT / "docs" / "backends.md"


def documented(language: str) -> str:
    (block,) = re.findall(rf"^```{language}\n(.*?)^```", DOCUMENT.read_text(), re.MULTILINE | re.DOTALL)
    return str(block)


def install(folder: Path, *, module: str, code: str, entry: str) -> None:
    """What pip leaves of a package with one module."""
    (folder / f"{module}.py").write_text(code)
    info = folder / f"{module}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {module.replace('_', '-')}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[{contract.ENTRY_POINT_GROUP}]\n{entry}\n")


def forget() -> None:
    """Nothing that was found or loaded before counts."""
    for function in (known_backends, load_backend, resolve_backend, planner_device.planner_alias):
        function.cache_clear()


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder that packages are installed into."""
    monkeypatch.syspath_prepend(tmp_path)
    before = set(sys.modules)
    forget()
    yield tmp_path
    for name in set(sys.modules) - before:
        if str(tmp_path) in str(getattr(sys.modules[name], "__file__", "")):
            del sys.modules[name]
    forget()


def install_documented(folder: Path, device_type: str = "xpu") -> None:
    entries = documented("toml").splitlines()
    assert entries[0] == f'[project.entry-points."{contract.ENTRY_POINT_GROUP}"]'
    name, _, value = entries[1].partition(" = ")
    code = documented("python").replace('"xpu"', f'"{device_type}"').replace("xccl", "hccl")
    entry = f"{name.replace('xpu', device_type)} = {value.strip(chr(34))}"
    install(folder, module="hybridrec_xpu", code=code, entry=entry)


def test_the_documented_backend_is_found(site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install_documented(site)
    assert {"cpu", "cuda", "npu", "xpu"} <= set(known_backends())
    monkeypatch.setattr(torch.xpu, "is_available", lambda: False)
    with pytest.raises(BackendError, match="device 'xpu': torch finds no Intel GPU"):
        resolve_backend("xpu")
    monkeypatch.setattr(torch.xpu, "is_available", lambda: True)
    backend = resolve_backend("xpu")
    assert isinstance(backend, DeviceBackend)
    assert backend.tbe_placement(KernelRequest(optimizer="sgd", dim=8, is_weighted=True)) == (
        "FBGEMM has no tables on device 'xpu'"
    )
    assert planner_device.planner_alias("xpu") == "cuda"
    assert parse_device("xpu:1") == torch.device("xpu", 1)
    with pytest.raises(ConfigError, match="Known: 'cpu', 'cuda', 'npu', 'xpu'"):
        resolve_backend("tpu")


def test_an_unknown_device_lists_the_known_ones(site: Path) -> None:
    for ask in (load_backend, resolve_backend):
        with pytest.raises(ConfigError, match=r"device 'tpu': no backend of that name. Known: 'cpu', 'cuda', 'npu'\."):
            ask("tpu")
    with pytest.raises(ConfigError, match="device='tpu:0' is not a device.*Known device types: 'cpu', 'cuda', 'npu'"):
        parse_device("tpu:0")


def test_two_packages_for_one_device_are_refused(site: Path) -> None:
    install(site, module="other_cuda", code="backend = None", entry="cuda = other_cuda:backend")
    text = "device 'cuda': two backends are installed, .*'other_cuda:backend' of other-cuda.* Uninstall one"
    with pytest.raises(ConfigError, match=text):
        resolve_backend("cpu")


def test_one_package_seen_twice_is_one(site: Path) -> None:
    install(site, module="again", code="", entry="cuda = device_backends.cuda:backend")
    assert known_backends()["cuda"].value == "device_backends.cuda:backend"


def test_a_backend_that_does_not_import_is_named(site: Path) -> None:
    install(site, module="broken_xpu", code="raise OSError('libze.so')", entry="xpu = broken_xpu:backend")
    text = r"device 'xpu': its backend 'broken_xpu:backend' of broken-xpu cannot be imported \(OSError: libze.so\)"
    with pytest.raises(BackendError, match=text):
        resolve_backend("xpu")


def test_a_backend_that_lacks_a_part_is_named(site: Path) -> None:
    lacking = documented("python") + "\n\ndel XpuBackend.planner_alias\nAcceleratorBackend = None\n"
    install(site, module="old_xpu", code=lacking, entry="xpu = old_xpu:backend")
    with pytest.raises(BackendError, match=r"'old_xpu:backend' of old-xpu lacks planner_alias of .*DeviceBackend"):
        resolve_backend("xpu")


def train_with(folder: str) -> str:
    """The backend of a third party in place of ours for the simulated device; steps against the oracle."""
    sys.path.insert(0, folder)
    real = importlib.metadata.entry_points

    def without_ours(**params: str) -> list[importlib.metadata.EntryPoint]:
        return [entry for entry in real(**params) if entry.value != "device_backends.npu:backend"]

    forget()
    try:
        with mock.patch.object(importlib.metadata, "entry_points", without_ours):
            run_pipeline_against_oracle(Scenario(cache="tenth", steps=12, device="npu"), 3)
            return type(resolve_backend("npu")).__name__
    finally:
        sys.path.remove(folder)
        forget()


def test_the_documented_backend_trains(npu_pools: RankPools, tmp_path: Path) -> None:
    install_documented(tmp_path, "npu")
    assert npu_pools[1].run(train_with, str(tmp_path)) == ["XpuBackend"]
