"""Fixtures and profiles of the whole suite. Markers and warning filters are in pyproject.toml."""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
from collections.abc import Callable, Iterator
from typing import Any

import hypothesis
import pytest
import torch

from tests.jitter import delays
from tests.ranks import RankKind, RankPool, RankPools, end_old_pools
from tools.status_matrix import VERSIONS_OF

MAX_WORLD_SIZE = 4
MAX_NPU_WORLD_SIZE = 2

_UNTIMED: dict[str, Any] = {"deadline": None, "suppress_health_check": [hypothesis.HealthCheck.too_slow]}
hypothesis.settings.register_profile("dev", max_examples=25, **_UNTIMED)
hypothesis.settings.register_profile("ci", max_examples=100, derandomize=True, print_blob=True, **_UNTIMED)
hypothesis.settings.register_profile("deep", max_examples=2000, **_UNTIMED)
hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "dev"))


def pytest_addoption(parser: pytest.Parser) -> None:
    """An option of our own."""
    parser.addoption("--jitter", type=int, metavar="SEED", help="random delays in all processes; see tests/README.md")


def pytest_configure(config: pytest.Config) -> None:
    """Make this process, and those that it starts, unlucky if that is asked for."""
    seed = config.getoption("jitter")
    if seed is not None:
        os.environ.update(delays.environment(seed))
        delays.install()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip, with the reason, the tests of devices that this machine lacks."""
    missing = {
        marker: f"this machine has no {device}"
        for marker, device in {"cuda": "CUDA GPU", "npu": "Ascend NPU"}.items()
        if not _is_device_available(marker)
    }
    for item in items:
        for marker, reason in missing.items():
            if item.get_closest_marker(marker) is not None:
                item.add_marker(pytest.mark.skip(reason=reason))


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown() -> None:
    """After a test and its fixtures."""
    end_old_pools()


def _is_device_available(device_type: str) -> bool:
    try:
        return bool(torch.get_device_module(device_type).is_available())
    except RuntimeError:  # torch does not know the name: the device's extension is not installed
        return False


@pytest.fixture(scope="session", autouse=True)
def versions_in_the_report(record_testsuite_property: Callable[[str, object], None]) -> None:
    """What a file of results ran on; see tools/status_matrix.py."""
    for name in VERSIONS_OF:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            record_testsuite_property(name, importlib.metadata.version(name))


@pytest.fixture(scope="session")
def pools() -> Iterator[RankPools]:
    """World size 1..4 -> a pool of so many ranks; each starts with its first job and serves the whole session."""
    pools = RankPools(MAX_WORLD_SIZE)
    yield pools
    pools.close()


@pytest.fixture
def pool_1(pools: RankPools) -> RankPool:
    """One rank."""
    return pools[1]


@pytest.fixture
def pool_2(pools: RankPools) -> RankPool:
    """Two ranks."""
    return pools[2]


@pytest.fixture
def pool_3(pools: RankPools) -> RankPool:
    """Three ranks: the fewest at which gloo's own reduce-scatter does not add in rank order."""
    return pools[3]


@pytest.fixture
def pool_4(pools: RankPools) -> RankPool:
    """Four ranks."""
    return pools[4]


@pytest.fixture(scope="session")
def npu_pools() -> Iterator[RankPools]:
    """World size 1, 2 -> a pool whose ranks have the simulated NPU; a job that leaves a hazard behind fails."""
    kind = RankKind(
        backend="cpu:gloo,npu:hccl",
        prepare="tests.simnpu.install:install",
        check="tests.simnpu.memory:check_no_hazards",
    )
    pools = RankPools(MAX_NPU_WORLD_SIZE, kind)
    yield pools
    pools.close()
