"""The tutorial, step by step, in the order of TorchRec's introductory one."""

from __future__ import annotations

from pathlib import Path

import torch.distributed as dist

from examples.torchrec_tutorial import (
    step_1_unsharded,
    step_2_data_types,
    step_3_sharded,
    step_4_optimizers,
    step_5_sequences,
    step_6_inference,
    step_7_snapshots,
)


def run(folder: Path) -> None:
    """All of it, on every rank. Collective.

    Args:
        folder: An empty one, the same of all ranks.

    Raises:
        TutorialError: Something is not as it says.
    """
    own = folder / f"rank_{dist.get_rank()}"
    own.mkdir()
    step_1_unsharded.run()
    step_2_data_types.run()
    step_3_sharded.run()
    step_4_optimizers.run()
    step_5_sequences.run()
    step_6_inference.run(own)
    step_7_snapshots.run(folder / "snapshots")
