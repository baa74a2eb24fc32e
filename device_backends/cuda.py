"""CUDA GPUs.

Every table is served by plain PyTorch operators here; FBGEMM's CUDA kernels are not used yet.
"""

from __future__ import annotations

import functools

import torch

from device_backends.base import AcceleratorBackend


class CudaBackend(AcceleratorBackend):
    """NVIDIA GPUs through the CUDA build of torch."""

    device_type = "cuda"
    collective_backend = "nccl"
    planner_alias = "cuda"

    def unavailable_reason(self) -> str | None:
        """None if a GPU can be used now, else why not and what to do."""
        return _unavailable_reason()


@functools.cache
def _unavailable_reason() -> str | None:
    if torch.version.cuda is None:
        return (
            f"torch {torch.__version__} is built without CUDA. Install hybridrec[cuda] in a fresh environment, or use "
            "device 'cpu'."
        )
    if not torch.cuda.is_available():
        return (
            f"torch {torch.__version__} is built for CUDA {torch.version.cuda} but finds no usable GPU. Check that "
            "nvidia-smi lists one, that its driver supports this CUDA version and that CUDA_VISIBLE_DEVICES does not "
            "hide it, or use device 'cpu'."
        )
    return None


backend = CudaBackend()
