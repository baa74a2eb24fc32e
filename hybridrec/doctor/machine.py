"""What the operating system says: memory, huge pages, shared memory, open files, cores. Standard library alone.

Every reader takes the root of the file system, so that tests can show it another machine. Source: proc(5), cgroups(7),
the kernel's admin-guide/mm/transhuge.
"""

from __future__ import annotations

import os
import re
import resource
from collections.abc import Iterator
from pathlib import Path

from hybridrec.doctor.report import Finding, Status

SECTION = "Machine"
SHM_WARN_BYTES = 1 << 30
"""Batches of DataLoader workers travel through /dev/shm; containers often have 64 MiB."""
OPEN_FILES_WARN = 1024
MEMORY_WARN_BYTES = 2 << 30
ROOT = Path("/")
_UNLIMITED = 1 << 60  # cgroup v1 writes a number of this size for "no limit"


def findings(root: Path = ROOT) -> Iterator[Finding]:
    """All of this module, in the order of the report."""
    yield memory(root)
    yield cgroup(root)
    yield transparent_huge_pages(root)
    yield reserved_huge_pages(root)
    yield overcommit(root)
    yield shared_memory(root)
    yield open_files()
    yield cores(root)


def memory(root: Path = ROOT) -> Finding:
    """Total and available host memory, where all rows live."""
    fields = _meminfo(root)
    if "MemTotal" not in fields or "MemAvailable" not in fields:
        return _finding(
            "host memory", "unknown", Status.FAIL, "/proc/meminfo does not say how much there is. Run on Linux."
        )
    value = f"{gib(fields['MemTotal'])} in all, {gib(fields['MemAvailable'])} available"
    if fields["MemAvailable"] < MEMORY_WARN_BYTES:
        remedy = f"Less than {gib(MEMORY_WARN_BYTES)} is left for rows: end what else takes memory on this machine."
        return _finding("host memory", value, Status.WARN, remedy)
    return _finding("host memory", value)


def cgroup(root: Path = ROOT) -> Finding:
    """The lowest memory limit of this process's cgroup and of those above it."""
    limits = cgroup_limits(root)
    if not limits:
        return _finding("memory cgroup", "no limit")
    limit, path = min((limit, path) for path, limit in limits.items())
    return _finding("memory cgroup", f"limit {gib(limit)}, from {path}")


def cgroup_limits(root: Path = ROOT) -> dict[str, int]:
    """File -> bytes, of every memory limit that binds this process."""
    base = root / "sys/fs/cgroup"
    found: dict[str, int] = {}
    for line in read(root / "proc/self/cgroup").splitlines() or ["0::/"]:
        _, controllers, path = [*line.split(":", 2), "", ""][:3]
        if controllers == "":
            folder, name = base, "memory.max"
        elif "memory" in controllers.split(","):
            folder, name = base / "memory", "memory.limit_in_bytes"
        else:
            continue
        parts = [part for part in path.split("/") if part not in ("", "..")]
        for depth in range(len(parts) + 1):
            file = folder.joinpath(*parts[:depth], name)
            text = read(file).strip()
            if text.isdigit() and int(text) < _UNLIMITED:
                found["/" + str(file.relative_to(root))] = int(text)
    return found


def transparent_huge_pages(root: Path = ROOT) -> Finding:
    """Whether the kernel gives huge pages to a store that asks for them."""
    what = "transparent huge pages"
    text = read(root / "sys/kernel/mm/transparent_hugepage/enabled")
    chosen = re.search(r"\[(\w+)\]", text)
    if chosen is None:
        return _finding(what, "the kernel does not offer them", Status.OFF)
    if chosen[1] == "never":
        remedy = (
            "Lookups of rows in host memory miss the TLB more often. As root: "
            "echo madvise > /sys/kernel/mm/transparent_hugepage/enabled"
        )
        return _finding(what, "never", Status.WARN, remedy)
    return _finding(what, chosen[1])


def reserved_huge_pages(root: Path = ROOT) -> Finding:
    """Pages of vm.nr_hugepages: memory set aside, which hybridrec does not use."""
    fields = _meminfo(root)
    pages, free = fields.get("HugePages_Total", 0), fields.get("HugePages_Free", 0)
    unused_bytes = free * fields.get("Hugepagesize", 0)
    value = f"vm.nr_hugepages {pages}"
    if unused_bytes > fields.get("MemTotal", 0) // 10 > 0:
        remedy = (
            "They are kept from everything else, and hybridrec uses transparent huge pages. If nothing needs them, as "
            "root: sysctl vm.nr_hugepages=0"
        )
        return _finding("reserved huge pages", f"{value}, {gib(unused_bytes)} unused", Status.WARN, remedy)
    return _finding("reserved huge pages", value)


def overcommit(root: Path = ROOT) -> Finding:
    """vm.overcommit_memory: 2 counts what is reserved, not what is used."""
    text = read(root / "proc/sys/vm/overcommit_memory").strip()
    meaning = {"0": "0 (heuristic)", "1": "1 (always)", "2": "2 (strict)"}.get(text, "unknown")
    if text == "2":
        remedy = (
            "Allocations count before they are used, and forked DataLoader workers count twice: large tables are "
            "refused early. As root: sysctl vm.overcommit_memory=0"
        )
        return _finding("vm.overcommit_memory", meaning, Status.WARN, remedy)
    return _finding("vm.overcommit_memory", meaning)


def shared_memory(root: Path = ROOT) -> Finding:
    """Size of /dev/shm, through which DataLoader workers hand over batches."""
    try:
        stat = os.statvfs(root / "dev/shm")
    except OSError as error:
        remedy = "DataLoader workers hand batches over through it: mount a tmpfs there, or use num_workers=0."
        return _finding("/dev/shm", f"missing ({error.strerror})", Status.WARN, remedy)
    total, free = stat.f_frsize * stat.f_blocks, stat.f_frsize * stat.f_bavail
    value = f"{gib(total)} in all, {gib(free)} free"
    if free < SHM_WARN_BYTES:
        remedy = (
            "DataLoader workers hand batches over through it and die with a bus error when it is full. Start the "
            "container with --shm-size=8g, delete what is left in it, or use num_workers=0."
        )
        return _finding("/dev/shm", value, Status.WARN, remedy)
    return _finding("/dev/shm", value)


def open_files() -> Finding:
    """How many files this process may have open; each tensor of a worker's batch is one."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    value = f"{_limit(soft)}, can be raised to {_limit(hard)}"
    if soft != resource.RLIM_INFINITY and soft < OPEN_FILES_WARN:
        remedy = (
            f"Every tensor that a DataLoader worker hands over is an open file: ulimit -n {OPEN_FILES_WARN} or more"
        )
        return _finding("open files", value, Status.WARN, remedy)
    return _finding("open files", value)


def cores(root: Path = ROOT) -> Finding:
    """Cores that this process may use, and how many NUMA nodes they are on."""
    count, nodes = usable_cores(root), _count_ranges(read(root / "sys/devices/system/node/online"))
    value = f"{count:g} usable of {os.cpu_count()}, NUMA nodes: {nodes or 1}"
    if nodes > 1:
        value += " (bind each rank to the node of its device, as with numactl --cpunodebind=N --membind=N)"
    return _finding("cores", value)


def usable_cores(root: Path = ROOT) -> float:
    """The process's affinity, and no more than its cgroup's CPU quota."""
    count = float(len(os.sched_getaffinity(0)))
    quota, _, period = read(root / "sys/fs/cgroup/cpu.max").strip().partition(" ")
    if quota.isdigit() and period.isdigit() and int(period) > 0:
        count = min(count, int(quota) / int(period))
    return count


def read(path: Path) -> str:
    """The text of a file, empty if there is none or it may not be read."""
    try:
        return path.read_text(encoding="ascii", errors="replace")
    except OSError:
        return ""


def gib(num_bytes: int) -> str:
    """In GiB, in MiB below one."""
    return f"{num_bytes / 2**30:.1f} GiB" if num_bytes >= 1 << 30 else f"{num_bytes / 2**20:.0f} MiB"


def _finding(what: str, value: str, status: Status = Status.OK, remedy: str = "") -> Finding:
    return Finding(section=SECTION, what=what, value=value, status=status, remedy=remedy)


def _meminfo(root: Path) -> dict[str, int]:
    """Field -> bytes, or a plain count where the kernel gives no unit."""
    fields = {}
    for line in read(root / "proc/meminfo").splitlines():
        name, _, rest = line.partition(":")
        number, _, unit = rest.strip().partition(" ")
        if number.isdigit():
            fields[name] = int(number) * (1024 if unit == "kB" else 1)
    return fields


def _limit(value: int) -> str:
    return "no limit" if value == resource.RLIM_INFINITY else f"{value:,}"


def _count_ranges(text: str) -> int:
    """``0-3,6`` -> 5."""
    count = 0
    for part in text.strip().split(","):
        first, _, last = part.partition("-")
        if first.isdigit():
            count += int(last or first) - int(first) + 1
    return count
