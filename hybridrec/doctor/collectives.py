"""One rank of a self-test of collectives: every element that arrives is known beforehand.

Run as ``python -m hybridrec.doctor.collectives``, once a rank; ranks meet through a file, so that the group's own
network is the only one that is tested.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from hybridrec._compat.torch_distributed import all_gather_single, reduce_scatter_single
from hybridrec.backend import HOST, resolve_backend
from hybridrec.doctor.child import Channel
from hybridrec.errors import BackendError

_UNIT = 1024
"""Elements are sent in multiples of this, unless told otherwise."""
_EXACT = 1 << 24
"""Whole numbers below this are exact in float32."""


def main() -> None:
    """The rank's whole life. It ends by ``os._exit``: a communicator that failed may wait for ever at exit."""
    parser = argparse.ArgumentParser()
    for name in ("--out", "--store", "--device-type", "--backend"):
        parser.add_argument(name, required=True)
    for name in ("--rank", "--world-size"):
        parser.add_argument(name, type=int, required=True)
    parser.add_argument("--seconds", type=float, required=True)
    parser.add_argument("--units", type=int, nargs="+", default=[_UNIT])
    args = parser.parse_args()
    channel = Channel(args.out)
    try:
        _run(args, channel)
    except Exception as error:  # whatever a driver, a network or a library raises is the answer
        channel.send(error=f"{type(error).__name__}: {error}")
        os._exit(1)
    os._exit(0)


def _run(args: argparse.Namespace, channel: Channel) -> None:
    device = HOST
    if args.device_type != HOST.type:
        resolve_backend(args.device_type)  # first: it may teach torch the name
        device = torch.device(args.device_type, args.rank)
        torch.get_device_module(device).set_device(device)
    channel.begin(f"init_process_group({args.backend!r})")
    store = dist.FileStore(args.store, args.world_size)  # type: ignore[attr-defined]  # public, but not listed
    timeout = timedelta(seconds=args.seconds)
    dist.init_process_group(args.backend, store=store, rank=args.rank, world_size=args.world_size, timeout=timeout)
    for unit in args.units:
        for name, test in _TESTS.items():
            what = name if len(args.units) == 1 else f"{name} of {unit} elements"
            channel.begin(what)
            channel.send(milliseconds={what: _timed(test, args.rank, args.world_size, device, unit)})
    channel.begin("barrier")
    dist.barrier()
    channel.send(done=True)


def _timed(test: _Test, rank: int, world_size: int, device: torch.device, unit: int) -> float:
    test(rank, world_size, device, unit)  # the first call connects
    started = time.perf_counter()
    test(rank, world_size, device, unit)
    return (time.perf_counter() - started) * 1e3


def block(source: int, target: int, unit: int = _UNIT) -> Tensor:
    """int64 [size]: what rank ``source`` sends to rank ``target``. Sizes differ for every pair of two ranks."""
    size = unit * (1 + (source + 2 * target) % 4)
    return source * 10**12 + target * 10**9 + torch.arange(size)


def all_to_all(rank: int, world_size: int, device: torch.device, unit: int = _UNIT) -> None:
    """Blocks of different sizes between all pairs, the way ids travel as int64 and pools as float32.

    Raises:
        BackendError: Something else arrived.
    """
    sent = [block(rank, target, unit) for target in range(world_size)]
    expected = [block(source, rank, unit) for source in range(world_size)]
    _exchange("all_to_all", rank, sent, expected, device)
    sent, expected = ([(b % _EXACT).float() for b in blocks] for blocks in (sent, expected))
    _exchange("all_to_all of float32", rank, sent, expected, device)


def _exchange(name: str, rank: int, sent: list[Tensor], expected: list[Tensor], device: torch.device) -> None:
    received = torch.full((sum(b.numel() for b in expected),), -1, dtype=expected[0].dtype, device=device)
    dist.all_to_all_single(
        received,
        torch.cat(sent).to(device),
        output_split_sizes=[b.numel() for b in expected],
        input_split_sizes=[b.numel() for b in sent],
    )
    _compare(name, rank, received, torch.cat(expected))


def all_gather(rank: int, world_size: int, device: torch.device, unit: int = _UNIT) -> None:
    """The same block to everybody.

    Raises:
        BackendError: Something else arrived.
    """
    sent = rank * 10**9 + torch.arange(unit)
    received = torch.full((world_size * unit,), -1, dtype=torch.int64, device=device)
    all_gather_single(received, sent.to(device))
    expected = torch.cat([source * 10**9 + torch.arange(unit) for source in range(world_size)])
    _compare("all_gather", rank, received, expected)


def reduce_scatter(rank: int, world_size: int, device: torch.device, unit: int = _UNIT) -> None:
    """Sums of float32 that are whole numbers, so that they are exact in any order.

    Raises:
        BackendError: Something else arrived.
    """
    positions = (torch.arange(world_size * unit) % (_EXACT // (world_size * (world_size + 1)))).float()
    received = torch.full((unit,), -1.0, device=device)
    reduce_scatter_single(received, (positions * (rank + 1)).to(device))
    total = world_size * (world_size + 1) // 2
    _compare("reduce_scatter", rank, received, positions[rank * unit : (rank + 1) * unit] * total)


def _compare(name: str, rank: int, received: Tensor, expected: Tensor) -> None:
    received = received.cpu()
    wrong = (received != expected).nonzero().flatten()
    if wrong.numel():
        i = int(wrong[0])
        raise BackendError(
            f"{name}: {wrong.numel()} of {expected.numel()} elements arrived wrong at rank {rank}; element {i} is "
            f"{received[i].item()}, {expected[i].item()} was sent. Do not train on this network or driver."
        )


_Test = Callable[[int, int, torch.device, int], None]
_TESTS: dict[str, _Test] = {"all_to_all": all_to_all, "all_gather": all_gather, "reduce_scatter": reduce_scatter}

if __name__ == "__main__":
    main()
