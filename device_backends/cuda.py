"""CUDA GPUs.

FBGEMM's backward sorts the occurrences of a batch by row, stably, and one warp or block adds those of a row in that
order: repeatable, and the same wherever the row is. A row that occurs more than 1,024 times in a batch is the exception
(4,096 on the newest GPUs): several blocks share it and add their sums atomically, unless torch's deterministic mode is
on (``torch.use_deterministic_algorithms(True)``). Source: FBGEMM 1.8,
codegen/training/backward/embedding_backward_split_kernel_cta_template.cu.
"""

from __future__ import annotations

import functools

import torch

from device_backends.base import AcceleratorBackend, tbe_limit
from hybridrec.backend import KernelRequest, TbePlacement

_TBE = TbePlacement(location="DEVICE", compute_device="CUDA")


class CudaBackend(AcceleratorBackend):
    """NVIDIA GPUs through the CUDA build of torch."""

    device_type = "cuda"
    collective_backend = "nccl"
    planner_alias = "cuda"

    def unavailable_reason(self) -> str | None:
        """None if a GPU can be used now, else why not and what to do."""
        return _unavailable_reason()

    def tbe_placement(self, request: KernelRequest) -> TbePlacement | str:
        """FBGEMM's CUDA kernels.

        Not its Adam: that takes the number of the step in the forward, where it counts batches that are never trained.
        """
        if request.optimizer == "adam":
            return "FBGEMM's 'adam' counts forwards, not trained batches"
        return tbe_limit(request, where="on GPUs", dim_multiple=4, takes_weights=True) or _TBE


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
