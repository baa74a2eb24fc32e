"""Operators that the libraries of a real NPU lack: refused here, since a silent copy through the host would hide there.

torch-npu runs an operator without a kernel on the CPU, with copies both ways and one warning. Of FBGEMM's operators the
device has those that fbgemm-ascend registers. Both lists beside this module were read from the wheels that are pinned;
`make npu-api` compares them, `make npu-api ARGS=--update` writes them.
"""

from __future__ import annotations

import functools
from pathlib import Path

ATEN_MISSING = Path(__file__).parent / "aten_missing.txt"
"""PyTorch's operators with a kernel for the CPU, none for the NPU, and none that is made of other operators."""
FBGEMM_PRESENT = Path(__file__).parent / "fbgemm_present.txt"
"""FBGEMM's operators with a kernel for the NPU, on Atlas A2 and on A3."""


def refuse_missing(name: str, overload: str) -> None:
    """
    Raises:
        NotImplementedError: A real NPU has no kernel of the operator ``name``, such as "aten::segment_reduce".
    """
    full_name = f"{name}.{overload}".rstrip(".")
    is_fbgemm = name.startswith("fbgemm::")
    if (full_name not in read_list(FBGEMM_PRESENT)) if is_fbgemm else (full_name in read_list(ATEN_MISSING)):
        raise NotImplementedError(
            f"{full_name}: {'fbgemm-ascend' if is_fbgemm else 'torch-npu'} has no kernel of it for the NPU, where it "
            "would run on the CPU without a word. Use operators that the device has, or move the tensors to the host."
        )


@functools.cache
def read_list(path: Path) -> frozenset[str]:
    """Names of operators, ``aten::add.Tensor``; comments left out."""
    return frozenset(line for line in path.read_text().splitlines() if not line.startswith("#"))
