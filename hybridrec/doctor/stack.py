"""What needs torch: imports, the core, devices, kernels, patches, operators. Run as a process of its own.

``python -m hybridrec.doctor.stack --out FILE --device auto``. Each step reports before the next begins.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.metadata
import math
import os
import warnings
from collections.abc import Callable, Generator, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import hybridrec
from hybridrec.doctor import integrity, machine, patches
from hybridrec.doctor.causes import cause_of
from hybridrec.doctor.child import Channel
from hybridrec.doctor.examination import LIBRARIES
from hybridrec.doctor.report import Finding, Status
from hybridrec.doctor.versions import install_hint, stacks
from hybridrec.errors import HybridRecError

DEVICES = "Devices"
UNMODIFIED = "Unmodified libraries"
HOST_MEMORY = "Host memory for rows"
_SHOWN = 6
"""Of a list of names; JSON has no more."""
_PACKAGES = {"torchrec": ("torchrec",), "fbgemm_gpu": ("fbgemm-gpu-cpu", "fbgemm-gpu")}
"""Package -> distributions that may hold it."""


def main() -> None:
    """Run all steps; a step that raises is a finding, and the next ones go on where they can."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", required=True)
    parser.add_argument("--device", required=True)
    parser.add_argument("--import", dest="imports", action="append", default=[])
    args = parser.parse_args()
    warnings.simplefilter("ignore")  # what libraries say of each other is not this report's
    channel = Channel(args.out)
    if not _report(channel, "import torch", LIBRARIES, torch_build):
        return
    for name in ("torchrec", "fbgemm_gpu"):
        _report(channel, f"import {name}", LIBRARIES, partial(import_library, name))
    _report(channel, "hybridrec on these libraries", LIBRARIES, hybridrec_imports)
    for name in args.imports:
        _report(channel, f"import {name}", LIBRARIES, partial(import_users, name))
    _report(channel, "core", LIBRARIES, core)
    _report(channel, "torch threads", LIBRARIES, torch_threads)
    device = _report(channel, "devices", DEVICES, lambda: devices(args.device, channel))
    if device is not None and device is not True:
        from hybridrec.doctor import kernels

        _report(channel, "kernels", kernels.SECTION, lambda: kernels.findings(device))
    for package in _PACKAGES:
        _report(channel, f"files of {package}", UNMODIFIED, partial(files, package))
        _report(channel, f"code of {package}", UNMODIFIED, partial(code, package))
    _report(channel, "fbgemm operators", UNMODIFIED, operators)
    _report(channel, "host memory budget", HOST_MEMORY, host_budget)


def _report(channel: Channel, what: str, section: str, step: Callable[[], Iterator[Finding]]) -> Any:
    """Run one step. Returns what its generator returns, True if that is nothing, None if it raised."""
    channel.begin(what)
    iterator = iter(step())
    try:
        while True:
            channel.finding(next(iterator))
    except StopIteration as stop:
        return True if stop.value is None else stop.value
    except Exception as error:  # an import may raise anything
        value, remedy = _failure(error, channel)
        channel.finding(Finding(section=section, what=what, value=value, status=Status.FAIL, remedy=remedy))
        return None


def _failure(error: Exception, channel: Channel) -> tuple[str, str]:
    """What went wrong, and what to do; tells the doctor if torch would work without an extension that it loads."""
    if isinstance(error, HybridRecError):
        problem, remedy = split_reason(str(error))
        return f"{type(error).__name__}: {problem}", remedy or "See above."
    cause = cause_of(error, install_hint=install_hint(stacks()))
    if cause is None:
        return f"{type(error).__name__}: {error or repr(error)}", install_hint(stacks())
    if cause.is_autoload:
        channel.send(autoload_failed=True)
    return cause.problem, cause.remedy


def split_reason(reason: str) -> tuple[str, str]:
    """What is wrong, in its first sentence; what to do, in the others."""
    problem, stop, remedy = reason.partition(". ")
    return problem + stop.strip(), remedy


def torch_build() -> Iterator[Finding]:
    """Torch's version and what it was built for."""
    import torch

    built = {name: v for name, v in vars(torch.version).items() if isinstance(v, str) and not name.startswith("_")}
    built.pop("git_version", None)
    text = ", ".join(f"{name} {value}" for name, value in built.items() if value != torch.__version__)
    yield Finding(section=LIBRARIES, what="torch", value=f"{torch.__version__}, built for {text or 'the host alone'}")


def import_library(name: str) -> Iterator[Finding]:
    """A library that hybridrec stands on."""
    module = importlib.import_module(name)
    yield Finding(section=LIBRARIES, what=name, value=f"imported from {Path(str(module.__file__)).parent}")


def import_users(name: str) -> Iterator[Finding]:
    """A module of the user's, which may patch libraries: so that what it does is seen below."""
    try:
        importlib.import_module(name)
    except Exception as error:  # the user's code may raise anything
        value = f"{type(error).__name__}: {error}"
        remedy = f"Run the doctor where `python -c 'import {name}'` works."
        yield Finding(section=LIBRARIES, what=f"--import {name}", value=value, status=Status.WARN, remedy=remedy)
        return
    yield Finding(section=LIBRARIES, what=f"--import {name}", value="imported before the checks below")


def hybridrec_imports() -> Iterator[Finding]:
    """Resolve all public names: whatever TorchRec or FBGEMM lack is named by the error."""
    for name in hybridrec.__all__:
        getattr(hybridrec, name)
    importlib.import_module("hybridrec._compat.fbgemm")
    yield Finding(section=LIBRARIES, what="hybridrec", value="finds all that it needs of TorchRec and FBGEMM")


def core() -> Iterator[Finding]:
    """The compiled core, or the reference and why."""
    from hybridrec.native.core import ENVIRONMENT_VARIABLE, has_compiled_core, serving_core

    if serving_core() == "compiled":
        yield Finding(section=LIBRARIES, what="core", value="compiled")
        return
    if has_compiled_core():
        why, remedy = f"{ENVIRONMENT_VARIABLE} is set to it", f"unset {ENVIRONMENT_VARIABLE}"
    else:
        why, remedy = "the C++ core was not built", "Install a C++20 compiler and reinstall hybridrec"
    remedy = f"Same results, much slower tables. {remedy}."
    yield Finding(section=LIBRARIES, what="core", value=f"numpy reference: {why}", status=Status.WARN, remedy=remedy)


def torch_threads() -> Iterator[Finding]:
    """Torch's threads against the cores that this process may use."""
    import torch

    threads, cores = torch.get_num_threads(), machine.usable_cores()
    value = f"{threads} (OMP_NUM_THREADS {os.environ.get('OMP_NUM_THREADS', 'not set')})"
    if threads > math.ceil(cores):
        remedy = f"More than the {cores:g} cores: threads wait for each other. export OMP_NUM_THREADS={int(cores) or 1}"
        yield Finding(section=LIBRARIES, what="torch threads", value=value, status=Status.WARN, remedy=remedy)
        return
    yield Finding(section=LIBRARIES, what="torch threads", value=value)


def devices(wanted: str, channel: Channel) -> Generator[Finding, None, Any]:
    """All backends; returns the device that training would use, None if there is none of the type wanted."""
    import torch

    from hybridrec.backend import HOST, known_backends, resolve_backend

    channel.send(host=HOST.type)
    usable, reasons = {}, {}
    for name in sorted(known_backends()):
        try:
            usable[name] = resolve_backend(name)
        except Exception as error:  # a backend is a third party's; its libraries may raise anything
            reasons[name] = str(error).removeprefix(f"device {name!r}: ") or repr(error)
    accelerators = [name for name, backend in usable.items() if not backend.is_host_memory]
    chosen = wanted if wanted != "auto" else next(iter([*accelerators, *usable]), HOST.type)
    if chosen not in usable and chosen not in reasons:
        known = ", ".join(map(repr, known_backends())) or "none: is hybridrec installed?"
        remedy = f"Known: {known}. Pass one of them, or install a package with a backend of that name."
        yield Finding(section=DEVICES, what=chosen, value="unknown", status=Status.FAIL, remedy=remedy)
    for name, reason in reasons.items():
        problem, remedy = split_reason(reason)
        status = Status.FAIL if name == chosen else Status.OFF
        yield Finding(
            section=DEVICES, what=name, value=f"not usable: {problem}", status=status, remedy=remedy or "See above."
        )
    for name, backend in usable.items():
        count = 1 if backend.is_host_memory else torch.get_device_module(name).device_count()
        yield from _memory(name, count, backend)
        if name == chosen:
            channel.send(
                device=name, count=count, collective=backend.collective_backend, is_host=backend.is_host_memory
            )
    return (HOST if usable[chosen].is_host_memory else torch.device(chosen, 0)) if chosen in usable else None


def _memory(name: str, count: int, backend: Any) -> Iterator[Finding]:
    import torch

    for index in range(count):
        device = torch.device(name) if backend.is_host_memory else torch.device(name, index)
        free, total = backend.memory_bytes(device)
        value = f"usable, {machine.gib(free)} free of {machine.gib(total)}, collectives: {backend.collective_backend}"
        yield Finding(section=DEVICES, what=str(device), value=value)


def files(package: str) -> Iterator[Finding]:
    """Files that differ from those that were installed."""
    checks = []
    for distribution in _PACKAGES[package]:
        try:
            checks.append(integrity.check_files(distribution, package))
        except importlib.metadata.PackageNotFoundError:
            continue
    check = max(checks, key=lambda c: c.num_files, default=None)
    what = f"files of {package}"
    if check is None or check.num_files == 0:
        remedy = "Install a released wheel, so that it can be checked: " + install_hint(stacks())
        value = "no distribution says which they should be (installed from a source tree?)"
        yield Finding(section=UNMODIFIED, what=what, value=value, status=Status.WARN, remedy=remedy)
        return
    reinstall = f"pip install --force-reinstall --no-deps {check.distribution}=={check.version}"
    if check.shadowed_by:
        value = f"imported from {check.shadowed_by}, which is not where {check.distribution} {check.version} lies"
        remedy = "Take that copy off sys.path (PYTHONPATH, the current folder)."
        yield Finding(section=UNMODIFIED, what=what, value=value, status=Status.WARN, remedy=remedy)
    for word, names in (("changed", check.changed), ("missing", check.missing)):
        if names:
            value = f"{word} since {check.distribution} {check.version} was installed: {_some(names)}"
            yield Finding(section=UNMODIFIED, what=what, value=value, status=Status.WARN, remedy=reinstall)
    if not (check.changed or check.missing or check.shadowed_by):
        value = f"all {check.num_files} as {check.distribution} {check.version} installed them"
        yield Finding(section=UNMODIFIED, what=what, value=value)


def code(package: str) -> Iterator[Finding]:
    """Names in memory that are not what the package's source says; hybridrec's own wraps are told apart."""
    ours = str(Path(hybridrec.__file__).resolve().parent) + os.sep
    found = patches.find_patches(package)
    own = [patch for patch in found if patch.source.startswith(ours)]
    foreign = [patch for patch in found if not patch.source.startswith(ours)]
    what = f"code of {package}"
    for patch in foreign[:_SHOWN]:
        remedy = "hybridrec works with the library as released: do not import what replaces it."
        value = f"{patch.name} is patched: {patch.now}"
        yield Finding(section=UNMODIFIED, what=what, value=value, status=Status.WARN, remedy=remedy)
    if len(foreign) > _SHOWN:
        value, remedy = f"{len(foreign) - _SHOWN} more: {_some([p.name for p in foreign[_SHOWN:]])}", "As above."
        yield Finding(section=UNMODIFIED, what=what, value=value, status=Status.WARN, remedy=remedy)
    if not foreign:
        note = f"; hybridrec itself wraps {len(own)} functions of the planner" if own else ""
        yield Finding(section=UNMODIFIED, what=what, value=f"nothing is patched{note}")


def operators() -> Iterator[Finding]:
    """Kernels of FBGEMM's operators that someone else registered."""
    dispatcher = importlib.import_module("hybridrec._compat.dispatcher")
    found = dispatcher.registrations()
    what = "fbgemm operators"
    # Source file -> operators. One library replaces dozens at once.
    replaced: dict[str, list[str]] = {}
    for r in found:
        if r.is_foreign or r.replaces:
            verb = f"replaces {r.replaces.rpartition('/')[2]}" if r.replaces else "added"
            replaced.setdefault(r.source, []).append(f"{r.operator} [{r.key}] {verb}")
    libraries = dispatcher.loaded_libraries()
    for source, names in replaced.items():
        where = f"; libraries loaded besides: {', '.join(libraries)}" if libraries else ""
        value = f"registered again by {source}: {_some(names)}{where}"
        remedy = (
            "Tables on FBGEMM's kernels may fail or change (see Kernels). Do not import the module that registers "
            "them in a training process."
        )
        yield Finding(section=UNMODIFIED, what=what, value=value, status=Status.WARN, remedy=remedy)
    if not replaced:
        yield Finding(section=UNMODIFIED, what=what, value=f"all {len(found)} kernels are FBGEMM's own")


def host_budget() -> Iterator[Finding]:
    """What `get_default_hybrid_sharders` gives the shards of one rank."""
    from hybridrec.distributed.host_memory import DEFAULT_SHARE, host_budget_bytes, local_world_size

    budget, ranks = host_budget_bytes(None), local_world_size()
    each = f"each of {ranks} ranks" if ranks > 1 else "one rank; W ranks on this machine get 1/W of it each"
    value = f"{machine.gib(budget)} for {each} (host_memory_bytes changes it)"
    limit = min(machine.cgroup_limits().values(), default=None)
    if limit is not None and budget * ranks > DEFAULT_SHARE * limit * 1.01:
        remedy = (
            f"The memory cgroup allows {machine.gib(limit)}: pass get_default_hybrid_sharders(host_env, "
            f"host_memory_bytes={int(DEFAULT_SHARE * limit / ranks)}), or the process is killed before it can refuse."
        )
        yield Finding(section=HOST_MEMORY, what="default budget", value=value, status=Status.WARN, remedy=remedy)
        return
    yield Finding(section=HOST_MEMORY, what="default budget", value=value)


def _some(names: tuple[str, ...] | list[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more


if __name__ == "__main__":
    main()
