"""What the doctor reads from the operating system, shown machines that are not this one."""

from __future__ import annotations

import resource
from pathlib import Path

import pytest

from hybridrec.doctor import machine, network
from hybridrec.doctor.report import Status

MEMINFO = """MemTotal:       33554432 kB
MemAvailable:   16777216 kB
HugePages_Total:    4096
HugePages_Free:     {free}
Hugepagesize:       2048 kB
"""


def write(root: Path, **files: str) -> Path:
    """Files under a root; in a name, a double underscore is a slash."""
    for name, text in files.items():
        path = root / name.replace("__", "/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def test_this_machine_is_readable() -> None:
    found = list(machine.findings())
    assert [f.what for f in found][:2] == ["host memory", "memory cgroup"]
    assert all(f.value for f in found)
    fields = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    total = int(fields["MemTotal"].split()[0]) * 1024
    assert found[0].value.startswith(machine.gib(total))


def test_memory(tmp_path: Path) -> None:
    root = write(tmp_path, proc__meminfo=MEMINFO.format(free=0))
    found = machine.memory(root)
    assert (found.status, found.value) == (Status.OK, "32.0 GiB in all, 16.0 GiB available")
    write(root, proc__meminfo="MemTotal: 1048576 kB\nMemAvailable: 524288 kB\n")
    assert machine.memory(root).status is Status.WARN
    write(root, proc__meminfo="nothing")
    assert machine.memory(root).status is Status.FAIL


def test_lowest_cgroup_limit_is_named_wherever_it_is(tmp_path: Path) -> None:
    root = write(tmp_path, proc__self__cgroup="0::/jobs/7\n")
    assert machine.cgroup_limits(root) == {} and machine.cgroup(root).value == "no limit"
    for folder, limit in (("", "max"), ("jobs", str(8 << 30)), ("jobs/7", str(16 << 30))):
        path = root / "sys/fs/cgroup" / folder
        path.mkdir(parents=True, exist_ok=True)
        (path / "memory.max").write_text(limit + "\n")
    assert machine.cgroup(root).value == "limit 8.0 GiB, from /sys/fs/cgroup/jobs/memory.max"


def test_cgroup_v1(tmp_path: Path) -> None:
    root = write(tmp_path, proc__self__cgroup="5:cpu:/x\n4:memory,hugetlb:/box\n")
    for folder, limit in (("", 9223372036854771712), ("box", 3 << 30)):
        path = root / "sys/fs/cgroup/memory" / folder
        path.mkdir(parents=True, exist_ok=True)
        (path / "memory.limit_in_bytes").write_text(f"{limit}\n")
    assert machine.cgroup_limits(root) == {"/sys/fs/cgroup/memory/box/memory.limit_in_bytes": 3 << 30}


@pytest.mark.parametrize(
    ("text", "status"),
    [
        ("[always] madvise never", Status.OK),
        ("always [madvise] never", Status.OK),
        ("always madvise [never]", Status.WARN),
    ],
)
def test_transparent_huge_pages(tmp_path: Path, text: str, status: Status) -> None:
    root = write(tmp_path, sys__kernel__mm__transparent_hugepage__enabled=text)
    assert machine.transparent_huge_pages(root).status is status
    assert machine.transparent_huge_pages(tmp_path / "elsewhere").status is Status.OFF


def test_unused_reserved_pages_are_warned_of(tmp_path: Path) -> None:
    root = write(tmp_path, proc__meminfo=MEMINFO.format(free=4096))
    found = machine.reserved_huge_pages(root)
    assert found.status is Status.WARN and found.value == "vm.nr_hugepages 4096, 8.0 GiB unused"
    write(root, proc__meminfo=MEMINFO.format(free=0))
    assert machine.reserved_huge_pages(root).status is Status.OK


def test_strict_overcommit_is_warned_of(tmp_path: Path) -> None:
    assert machine.overcommit(write(tmp_path, proc__sys__vm__overcommit_memory="2\n")).status is Status.WARN
    assert machine.overcommit(write(tmp_path, proc__sys__vm__overcommit_memory="1\n")).status is Status.OK


def test_shared_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "missing" in machine.shared_memory(tmp_path).value
    (tmp_path / "dev/shm").mkdir(parents=True)
    monkeypatch.setattr(machine, "SHM_WARN_BYTES", 1 << 62)
    found = machine.shared_memory(tmp_path)
    assert found.status is Status.WARN and "--shm-size" in found.remedy
    monkeypatch.setattr(machine, "SHM_WARN_BYTES", 1)
    assert machine.shared_memory(tmp_path).status is Status.OK


@pytest.mark.parametrize(
    ("soft", "status"), [(256, Status.WARN), (65536, Status.OK), (resource.RLIM_INFINITY, Status.OK)]
)
def test_open_files(monkeypatch: pytest.MonkeyPatch, soft: int, status: Status) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda what: (soft, resource.RLIM_INFINITY))
    assert machine.open_files().status is status


def test_cores_follow_the_quota(tmp_path: Path) -> None:
    root, path = tmp_path, tmp_path / "sys/fs/cgroup"
    path.mkdir(parents=True)
    (path / "cpu.max").write_text("50000 100000\n")
    node = root / "sys/devices/system/node"
    node.mkdir(parents=True)
    (node / "online").write_text("0-2,5\n")
    assert machine.usable_cores(root) == 0.5
    assert "NUMA nodes: 4" in machine.cores(root).value
    (path / "cpu.max").write_text("max 100000\n")
    assert machine.usable_cores(root) >= 1


def test_interface_variables() -> None:
    first, *_ = network.interfaces()
    variable = network.HOST_VARIABLE
    assert network.interface_variable(variable, {}).status is Status.OFF
    assert network.interface_variable(variable, {variable: first}).status is Status.OK
    wrong = network.interface_variable(variable, {variable: "nonesuch0"})
    assert wrong.status is Status.WARN and first in wrong.remedy
    for value, status in (("^docker", Status.OK), (first[:1], Status.OK), ("=none,nonesuch", Status.WARN)):
        assert network.interface_variable("X_SOCKET_IFNAME", {"X_SOCKET_IFNAME": value}).status is status


def test_a_host_name_without_address(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(name: str) -> str:
        raise OSError("Name or service not known")

    monkeypatch.setattr(network.socket, "gethostbyname", fail)
    found = network.host_name({})
    assert found.status is Status.WARN and f"{network.HOST_VARIABLE}={network.loopback()}" in found.remedy
    assert network.host_name({network.HOST_VARIABLE: "lo"}).status is Status.OK
