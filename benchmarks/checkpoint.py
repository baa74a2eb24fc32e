"""Saving and loading against what dd reaches for the same bytes, and what saving costs the steps beside it.

One rank, one collection on the host. Repeats are interleaved; figures are medians and their ratios:

    dd        the bytes of a snapshot from /dev/zero, with fsync, on the same disk
    save      checkpoint.save
    load      checkpoint.load of that snapshot (which was written a moment ago: the system may have it in memory)
    step      a training step alone, and while a snapshot is written by a thread

    python -m benchmarks.checkpoint --rows 1000000 --dim 64 --folder DIR
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import subprocess
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from benchmarks.oversized import OPTIMIZERS, collection
from hybridrec import checkpoint


def batch(args: argparse.Namespace, ids: torch.Tensor) -> KeyedJaggedTensor:
    """The same ids in every feature, one a bag."""
    keys = [f"f{t}" for t in range(args.tables)]
    return KeyedJaggedTensor(
        keys, ids.repeat(args.tables), lengths=torch.ones(len(ids) * args.tables, dtype=torch.int64)
    )


def train(module: torch.nn.Module, features: KeyedJaggedTensor) -> float:
    """Seconds of one step."""
    start = time.perf_counter()
    module(features).values().sum().backward()
    return time.perf_counter() - start


def dd(folder: Path, num_bytes: int) -> float:
    """Seconds."""
    blocks = -(-num_bytes // 2**22)
    target = folder / "dd"
    command = ["dd", "if=/dev/zero", f"of={target}", "bs=4M", f"count={blocks}", "conv=fsync", "status=none"]
    start = time.perf_counter()
    subprocess.run(command, check=True)
    seconds = time.perf_counter() - start
    target.unlink()
    return seconds * num_bytes / (blocks * 2**22)


def steps_beside_a_save(module: torch.nn.Module, features: list[KeyedJaggedTensor], folder: Path) -> list[float]:
    """Seconds of each step from the beginning of a snapshot until its rows are written."""
    start = time.perf_counter()
    saving = checkpoint.Saving(folder, module)
    begin = time.perf_counter() - start
    saving.start()
    seconds = []
    for number in range(10**6):
        if saving.is_written:
            break
        seconds.append(train(module, features[number % len(features)]))
    saving.finish()
    print(f"  a snapshot held the steps up for {begin * 1000:.0f} ms, then {len(seconds)} steps ran beside it")
    return seconds


def main() -> None:
    """Print the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tables", type=int, default=2)
    parser.add_argument("--rows", type=int, default=500_000, help="rows of each table (default 500000)")
    parser.add_argument("--dim", type=int, default=64)
    parser.add_argument("--batch", type=int, default=4096)
    parser.add_argument("--optimizer", choices=OPTIMIZERS, default="adagrad")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--folder", type=Path, help="on the disk in question (default: a temporary one)")
    args = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    module = collection(args, device_rows=max(args.rows // 10, 200_000))
    ids = torch.randperm(args.rows)
    for part in ids.split(100_000):
        train(module, batch(args, part))
    generator = torch.Generator().manual_seed(1)
    features = [batch(args, torch.randint(args.rows, (args.batch,), generator=generator)) for _ in range(20)]
    folder = Path(tempfile.mkdtemp(dir=args.folder))
    found: dict[str, list[float]] = {name: [] for name in ("dd", "save", "load", "step", "step beside a save")}
    num_bytes = 0
    try:
        for _ in range(args.repeats):
            start = time.perf_counter()
            saved = checkpoint.save(folder, module, keep=1)
            found["save"].append(time.perf_counter() - start)
            num_bytes = sum(f.stat().st_size for f in saved.rglob("*") if f.is_file())
            found["dd"].append(dd(folder, num_bytes))
            start = time.perf_counter()
            checkpoint.load(folder, module)
            found["load"].append(time.perf_counter() - start)
            for one in features:
                train(module, one)
            found["step"] += [train(module, one) for one in features]
            found["step beside a save"] += steps_beside_a_save(module, features, folder / "beside")
    finally:
        shutil.rmtree(folder)
    medians = {name: statistics.median(seconds) for name, seconds in found.items() if seconds}
    print(f"{args.tables} tables of {args.rows:,} x {args.dim}, {args.optimizer}: {num_bytes / 1e9:.2f} GB a snapshot")
    for name in ("dd", "save", "load"):
        rate = num_bytes / medians[name] / 1e9
        print(f"{name:>5}: {medians[name]:.2f} s, {rate:.2f} GB/s, {medians['dd'] / medians[name]:.2f} of dd")
    if "step beside a save" in medians:
        alone, beside = medians["step"], medians["step beside a save"]
        what = f"a step of {args.batch} ids: {alone * 1000:.1f} ms, beside a save {beside * 1000:.1f} ms"
        print(f"{what}, {beside / alone:.2f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    main()
