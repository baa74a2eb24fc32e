"""How this process finds its device and the other ranks."""

from __future__ import annotations

import argparse
import importlib
import logging
import os
import sys
import warnings
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.run import main as torchrun

COLLECTIVES = {"cpu": "gloo", "cuda": "nccl", "npu": "hccl"}
"""Device type -> backend of its process group."""
DEFAULT_RANKS = 2


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


def quiet_libraries() -> None:
    """Hide what the libraries below say about each other: deprecated calls, hints to their maintainers.

    Call it before torchrec is imported. hybridrec's own warnings stay.
    """
    warnings.filterwarnings("ignore", module=r"(torch|torchrec|torchmetrics|fbgemm_gpu)(\.|$)")
    for name in ("torchrec", "torch.fx._symbolic_trace"):
        logging.getLogger(name).setLevel(logging.ERROR)


def choose_device(name: str, local_rank: int) -> torch.device:
    """The device of a rank.

    Args:
        name: cpu, cuda, npu, or auto.
        local_rank: Number of the process on its machine; rank r takes device r.

    Raises:
        SystemExit: There is no such device.
    """
    if name == "auto":
        accelerator = torch.accelerator.current_accelerator(check_available=True)
        name = accelerator.type if accelerator is not None and accelerator.type in COLLECTIVES else "cpu"
    if name == "cpu":
        return torch.device(name)
    if name == "npu":
        _import_torch_npu()
    count = torch.get_device_module(name).device_count()
    if count == 0:
        raise SystemExit(f"--device {name}: torch {torch.__version__} finds none on this machine. Pass --device cpu.")
    if local_rank >= count:
        raise SystemExit(
            f"local rank {local_rank} needs {name} device {local_rank}, but this machine has {count} of them. "
            f"Pass --ranks {count}, or --device cpu."
        )
    return torch.device(name, local_rank)


def _import_torch_npu() -> None:
    """Teach torch the device "npu".

    Raises:
        SystemExit: The package is missing or cannot be used.
    """
    try:
        importlib.import_module("torch_npu")
    except ModuleNotFoundError as error:
        if error.name != "torch_npu":
            raise  # an installation with a hole: the trace says where
        raise SystemExit(
            "--device npu: torch_npu is not installed. Install hybridrec[npu] in a fresh environment, or pass "
            "--device cpu."
        ) from None
    except (ImportError, OSError, RuntimeError) as error:  # libraries of CANN that are not found, another torch
        raise SystemExit(
            f"--device npu: torch_npu cannot be imported ({error}). Source CANN's set_env.sh in this shell, or pass "
            "--device cpu."
        ) from None


def check_batch_size(batch_size: int, world_size: int) -> None:
    """Every rank needs something to do.

    Raises:
        SystemExit: A batch has fewer rows than there are ranks.
    """
    if batch_size < world_size:
        raise SystemExit(f"--batch-size {batch_size}: less than one row for each of {world_size} ranks. Raise it.")


def start_ranks(args: argparse.Namespace, argv: list[str]) -> int:
    """Start one process a rank and wait for all, as ``torchrun --standalone --nproc-per-node=W`` does.

    Args:
        args: What ``argv`` says.
        argv: Options of the program.

    Returns:
        Exit status: that of the first process that failed, or 0.

    Raises:
        SystemExit: The options do not fit this machine. Said once here rather than by every rank.
    """
    world_size = args.ranks or DEFAULT_RANKS
    check_batch_size(args.batch_size, world_size)
    choose_device(args.device, world_size - 1)
    return start_processes(world_size, "examples.little_demo", argv)


def start_processes(world_size: int, module: str, argv: list[str]) -> int:
    """Start a module on so many ranks of this machine and wait for all.

    Args:
        world_size: How many.
        module: With a ``__main__``.
        argv: Its options.

    Returns:
        Exit status: that of the first process that failed, or 0.
    """
    try:
        torchrun(["--standalone", f"--nproc-per-node={world_size}", "-m", module, *argv])
    except ChildFailedError as error:  # the rank has said why; torchrun's own trace would bury it
        _, failure = error.get_first_failure()
        return max(1, failure.exitcode)  # negative: killed by a signal
    return 0


def join_ranks(args: argparse.Namespace) -> Ranks:
    """Meet the other processes that torchrun started. Collective.

    Raises:
        SystemExit: The options do not fit what torchrun started.
    """
    world_size = int(os.environ["WORLD_SIZE"])
    if args.ranks not in (None, world_size):
        raise SystemExit(f"--ranks {args.ranks}, but torchrun started {world_size} processes. Leave --ranks out.")
    check_batch_size(args.batch_size, world_size)
    device = choose_device(args.device, int(os.environ["LOCAL_RANK"]))
    if device.type != "cpu":
        torch.get_device_module(device).set_device(device)
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


def leave(status: int) -> None:
    """End the process without taking the interpreter apart.

    All is said and the groups are closed by then, but gloo's threads can still abort the process meanwhile, which would
    turn a success into exit status 134.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status or int(hasattr(sys, "last_type")))  # it has if an exception ends the program
