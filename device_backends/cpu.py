"""The host itself as the device: slots are ordinary memory. For development and for tests, exact and complete."""

from __future__ import annotations

import torch
from torch import Tensor

_TBE_OPTIMIZERS = frozenset({"sgd", "adagrad", "rowwise_adagrad"})
_TBE_DIM_MULTIPLE = 4


class CpuBackend:
    """Host memory. Satisfies `DeviceBackend`. All methods may be called from any thread."""

    device_type = "cpu"
    is_host_memory = True
    collective_backend = "gloo"

    def unavailable_reason(self) -> str | None:
        """None: the host is always there."""
        return None

    def kernel_name(self, *, optimizer: str, dim: int, is_weighted: bool) -> str:
        """FBGEMM's kernel where its CPU build has the optimizer and the dim, else plain PyTorch operators.

        Source: FBGEMM 1.8 refuses Adam on the CPU, and dims that are no multiple of 4.
        """
        return "tbe" if optimizer in _TBE_OPTIMIZERS and dim % _TBE_DIM_MULTIPLE == 0 else "torch"

    def empty_staging(self, num_floats: int) -> Tensor:
        """Uninitialised float32 [num_floats]; ordinary memory, since nothing has to cross a bus."""
        return torch.empty(num_floats, dtype=torch.float32)

    def synchronize(self, device: torch.device) -> None:
        """Nothing to wait for: work on the host is done when the call returns."""

    def memory_bytes(self, device: torch.device) -> tuple[int, int]:
        """(available, total) bytes of the machine. A cgroup's limit is the caller's business: host budgets know it."""
        fields = _meminfo_kib()
        return fields["MemAvailable"] * 1024, fields["MemTotal"] * 1024


def _meminfo_kib() -> dict[str, int]:
    """The lines of /proc/meminfo, in KiB. Source: proc(5)."""
    with open("/proc/meminfo", encoding="ascii") as file:
        lines = (line.partition(":") for line in file)
        return {name: int(value.split()[0]) for name, _, value in lines}


backend = CpuBackend()
