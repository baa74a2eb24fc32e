"""FBGEMM's table operators exist once in a process: tables in host memory use them, or fbgemm_ascend does.

Importing fbgemm_ascend replaces the autograd kernels of FBGEMM's lookups for every device; afterwards FBGEMM's tables
in host memory fail. Who comes first keeps them. The other is told why, and has plain operators.
"""

from __future__ import annotations

import sys

ASCEND_MODULE = "fbgemm_ascend"

_is_taken_for_host = False


def take_for_host() -> str:
    """Tables in host memory are about to use FBGEMM's operators: empty, or why they must not."""
    global _is_taken_for_host
    if ASCEND_MODULE in sys.modules:
        return f"{ASCEND_MODULE} is imported, which breaks FBGEMM's tables on the host in this process"
    _is_taken_for_host = True
    return ""


def why_not_ascend() -> str:
    """Why fbgemm_ascend must not be imported now; empty: it may be."""
    if _is_taken_for_host and ASCEND_MODULE not in sys.modules:
        return (
            f"tables on the host use FBGEMM in this process, and importing {ASCEND_MODULE} would break them: train "
            "them in a process of their own"
        )
    return ""
