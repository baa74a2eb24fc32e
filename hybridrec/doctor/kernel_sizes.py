"""Every kernel of a device at a real size, against the optimizers' formulas. Run as a process of its own.

``python -m hybridrec.doctor.kernel_sizes --out FILE --device DEVICE``.
"""

from __future__ import annotations

import argparse
import time
import warnings
from typing import get_args

import torch

from hybridrec.backend import HOST, resolve_backend
from hybridrec.doctor.child import Channel
from hybridrec.doctor.kernels import check_kernel, large_case
from hybridrec.kernels.factory import kernel_choice
from hybridrec.kernels.optimizer import OptimizerKind, OptimizerSpec

DIMS = (6, 8, 64, 128)


def main() -> None:
    """Check all; one record a kernel that was right, ``error`` for one that was not."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", required=True)
    parser.add_argument("--device", required=True)
    parser.add_argument("--rows", type=int, default=20_000)
    parser.add_argument("--bags", type=int, default=2_048)
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    channel = Channel(args.out)
    device = torch.device(HOST.type)
    if args.device != HOST.type:
        resolve_backend(args.device)
        device = torch.device(args.device, 0)
    for kind in get_args(OptimizerKind):
        for dim in DIMS if kind != "none" else ():
            for is_weighted in (False, True):
                _check(channel, kind, dim, is_weighted, device, args)
    channel.send(done=True)


def _check(
    channel: Channel, kind: OptimizerKind, dim: int, is_weighted: bool, device: torch.device, args: argparse.Namespace
) -> None:
    case = large_case(dim, is_weighted=is_weighted, num_rows=args.rows, num_bags=args.bags)
    channel.begin(f"{kind}, {case.name}")
    name = kernel_choice(OptimizerSpec(kind=kind), dim=dim, is_weighted=is_weighted, device=device).name
    started = time.perf_counter()
    try:
        check_kernel(kind, case, is_weighted=is_weighted, device=device)
    except Exception as error:  # a driver or a library may raise anything; the other kernels are tried all the same
        channel.send(error=f"{name} kernel: {type(error).__name__}: {error}")
        return
    seconds = time.perf_counter() - started
    channel.send(kernel=f"{name}, {kind}, {case.name}", seconds=round(seconds, 3))


if __name__ == "__main__":
    main()
