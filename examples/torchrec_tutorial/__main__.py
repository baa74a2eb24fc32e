"""Started once by `run.sh`, it starts two ranks; started by torchrun, it is one of them."""

from __future__ import annotations

import logging
import os
import sys
import tempfile
import warnings
from pathlib import Path

from examples.little_demo.launch import leave, quiet_libraries, start_processes

RANKS = 2


def start() -> int:
    """Start the ranks with a folder for what they write.

    Returns:
        Exit status: 0 if everything was as the tutorial says.
    """
    with tempfile.TemporaryDirectory(prefix="tutorial_") as folder:
        return start_processes(RANKS, "examples.torchrec_tutorial", [folder])


def be_a_rank(folder: Path) -> None:
    """All steps, in order."""
    import torch.distributed as dist

    from examples.torchrec_tutorial import steps
    from examples.torchrec_tutorial.tell import say

    dist.init_process_group("gloo")
    steps.run(folder)
    say("\nEverything is as it says.")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    if "RANK" not in os.environ:
        sys.exit(start())
    quiet_libraries()
    warnings.filterwarnings("ignore", "The TorchScript type system", UserWarning)  # in TorchRec's data types
    logging.getLogger().addFilter(lambda record: False)  # what TorchRec logs without a name; others have their own
    be_a_rank(Path(sys.argv[1]))
    leave(0)
