"""The command line, and how this process finds its device and the other ranks."""

from __future__ import annotations

import argparse
import importlib
import logging
import os
import warnings
from dataclasses import dataclass

import torch
import torch.distributed as dist

COLLECTIVES = {"cpu": "gloo", "cuda": "nccl", "npu": "hccl"}
"""Device type -> backend of its process group."""
RUN = "examples/little_demo/run.sh"


@dataclass(frozen=True, kw_only=True)
class Ranks:
    """This process among the others."""

    rank: int
    world_size: int
    local_world_size: int
    """Ranks on this machine."""
    device: torch.device
    host_group: dist.ProcessGroup
    """gloo: ids travel over it between the ranks' host memories."""


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    """The command line; ends the process with a usage text if it is wrong."""
    parser = argparse.ArgumentParser(
        prog=RUN,
        description="Train a small DLRM on MovieLens (100,004 ratings). Its hashed tables are larger than their device "
        "tier, so that rows move between device and host. Prints the plan, losses, held-out AUC, where the rows are, "
        "hit rates and speed.",
        epilog=f"Exit status: 0; 1 if a full epoch did not reach an AUC of 0.77. Short try: {RUN} --batches 20",
    )
    add = parser.add_argument
    add(
        "--device",
        choices=["auto", *COLLECTIVES],
        default="auto",
        help="default auto: cuda or npu if present, else cpu",
    )
    add("--ranks", type=_positive, metavar="W", help="processes to start, each on a device of its own (default: 2)")
    add("--epochs", type=_positive, default=1, metavar="N", help="passes over the training part (default: 1)")
    add("--batches", type=_positive, metavar="N", help="stop after N batches; short of an epoch the AUC is not judged")
    add("--batch-size", type=_positive, default=512, metavar="B", help="ratings a batch, over all ranks (default: 512)")
    add("--seed", type=int, default=0, help="of split, order, rows and weights; same seed, same losses (default: 0)")
    return parser.parse_args(argv)


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{number} is not positive")
    return number


def quiet_libraries() -> None:
    """Hide what the libraries below say about each other: deprecated calls, hints to their maintainers.

    Call it before torchrec is imported. hybridrec's own warnings stay.
    """
    warnings.filterwarnings("ignore", module=r"(torch|torchrec|torchmetrics|fbgemm_gpu)(\.|$)")
    for name in ("torchrec", "torch.fx._symbolic_trace"):
        logging.getLogger(name).setLevel(logging.ERROR)


def choose_device(name: str, local_rank: int) -> torch.device:
    """The device of this rank, made the current one of its type.

    Args:
        name: cpu, cuda, npu, or auto.
        local_rank: Number of this process on its machine; rank r takes device r.

    Raises:
        SystemExit: There is no such device.
    """
    if name == "auto":
        accelerator = torch.accelerator.current_accelerator(check_available=True)
        name = accelerator.type if accelerator is not None and accelerator.type in COLLECTIVES else "cpu"
    if name == "cpu":
        return torch.device(name)
    if name == "npu":
        importlib.import_module("torch_npu")  # teaches torch the device
    module = torch.get_device_module(name)
    count = module.device_count()
    if count == 0:
        raise SystemExit(f"--device {name}: torch {torch.__version__} finds none on this machine. Pass --device cpu.")
    if local_rank >= count:
        raise SystemExit(
            f"local rank {local_rank} needs {name} device {local_rank}, but this machine has {count} of them. "
            f"Pass --ranks {count}, or --device cpu."
        )
    module.set_device(local_rank)
    return torch.device(name, local_rank)


def join_ranks(args: argparse.Namespace) -> Ranks:
    """Meet the other processes that torchrun started. Collective.

    Raises:
        SystemExit: torchrun did not start this process, or the options do not fit what it started.
    """
    if "RANK" not in os.environ:
        raise SystemExit(f"This program runs as several processes. Start it with {RUN}, or with torchrun.")
    world_size = int(os.environ["WORLD_SIZE"])
    if args.ranks not in (None, world_size):
        raise SystemExit(
            f"--ranks {args.ranks}, but torchrun started {world_size} processes. {RUN} starts as many as asked."
        )
    if args.batch_size < world_size:
        raise SystemExit(
            f"--batch-size {args.batch_size}: less than one rating for each of {world_size} ranks. Raise it."
        )
    device = choose_device(args.device, int(os.environ["LOCAL_RANK"]))
    dist.init_process_group(COLLECTIVES[device.type])
    return Ranks(
        rank=dist.get_rank(),
        world_size=world_size,
        local_world_size=int(os.environ["LOCAL_WORLD_SIZE"]),
        device=device,
        host_group=dist.new_group(backend="gloo"),
    )


def leave_ranks(ranks: Ranks) -> None:
    """Part from the other processes once all are done. Collective."""
    dist.barrier(group=ranks.host_group)
    dist.destroy_process_group()
