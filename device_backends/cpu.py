"""The host itself as the device: slots are ordinary memory. For development and for tests, exact and complete."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from device_backends import fbgemm_owner
from device_backends.base import tbe_limit
from hybridrec.backend import KernelRequest, PlanningRates, TbePlacement
from hybridrec.errors import BackendError

_MEMINFO = Path("/proc/meminfo")
# cgroup v2 and v1; without a limit the first says "max", the second more bytes than any machine has
_CGROUP_LIMITS = (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"))
_TBE = TbePlacement(location="HOST", compute_device="CPU")


class CpuBackend:
    """Host memory. Satisfies `DeviceBackend`. All methods may be called from any thread."""

    device_type = "cpu"
    is_host_memory = True
    collective_backend = "gloo"
    planner_alias = "cpu"

    def unavailable_reason(self) -> str | None:
        """None: the host is always there."""
        return None

    def tbe_placement(self, request: KernelRequest) -> TbePlacement | str:
        """FBGEMM's tables where its CPU build has the optimizer and the dim, unless its operators were replaced.

        Source: FBGEMM 1.8 refuses Adam on the CPU, and dims that are no multiple of 4.
        """
        limit = tbe_limit(request, where="on the host", dim_multiple=4, takes_weights=True)
        return limit or fbgemm_owner.take_for_host() or _TBE

    def planning_rates(self) -> PlanningRates | None:
        """TorchRec's constants."""
        return None

    def self_test(self, device: torch.device) -> None:
        """Nothing to test: nothing is copied, and there are no streams."""

    def empty_staging(self, num: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """Uninitialised [num]; ordinary memory, since nothing has to cross a bus."""
        return torch.empty(num, dtype=dtype)

    def make_stream(self, device: torch.device) -> Any:
        """A stream that orders nothing: work on the host is done when the call returns."""
        return torch.cpu.Stream()

    def current_stream(self, device: torch.device) -> Any:
        """A stream that orders nothing."""
        return torch.cpu.current_stream()

    def use_stream(self, stream: Any) -> AbstractContextManager[Any]:
        """Changes nothing."""
        return nullcontext()

    def record_event(self, stream: Any) -> Any:
        """An event that has passed."""
        return torch.cpu.Event()

    def record_stream(self, tensor: Tensor, stream: Any) -> None:
        """Nothing uses it later."""

    def indexed(self, device: torch.device) -> torch.device:
        """There is one host."""
        return device

    def use_device(self, device: torch.device) -> None:
        """Nothing to choose."""

    def synchronize(self, device: torch.device) -> None:
        """Nothing to wait for: work on the host is done when the call returns."""

    def memory_bytes(self, device: torch.device) -> tuple[int, int]:
        """(available, total) bytes: the machine's, but no more than this process's memory cgroup may take in all.

        What others in the cgroup take now is not subtracted. Source: proc(5), cgroups(7).

        Raises:
            BackendError: The system does not say (it is no Linux).
        """
        fields = dict(line.partition(":")[::2] for line in _read(_MEMINFO).splitlines())
        if "MemTotal" not in fields or "MemAvailable" not in fields:
            raise BackendError(f"device 'cpu': {_MEMINFO} does not say how much memory there is. Run on Linux.")
        limits = [int(text) for path in _CGROUP_LIMITS if (text := _read(path).strip()).isdigit()]
        available, total = (int(fields[name].split()[0]) * 1024 for name in ("MemAvailable", "MemTotal"))
        return min([available, *limits]), min([total, *limits])


def _read(path: Path) -> str:
    """The text of a file, empty if there is none."""
    try:
        return path.read_text(encoding="ascii")
    except OSError:
        return ""


backend = CpuBackend()
