"""``python -m tests.simnpu MODULE [ARGS]``: run a module as a program, with the simulated NPU in place.

Each process sees one device, so that its local rank among the devices it sees is 0, as under
``torchrun --virtual-local-rank``. The program fails if it left a hazard behind.
"""

from __future__ import annotations

import os
import runpy
import sys

from tests.simnpu.install import install
from tests.simnpu.memory import check_no_hazards


def main(argv: list[str]) -> None:
    """Run ``argv[0]``, which sees ``argv`` as its own."""
    if not argv:
        raise SystemExit("usage: python -m tests.simnpu MODULE [ARGS]")
    install()
    if "LOCAL_RANK" in os.environ:
        os.environ["LOCAL_RANK"] = "0"
    sys.argv = argv
    try:
        runpy.run_module(argv[0], run_name="__main__", alter_sys=True)
    except SystemExit as end:
        if end.code:
            raise
    check_no_hazards()


main(sys.argv[1:])
