"""Snapshots against what dd reaches for the same bytes on the same disk, and what they cost the steps beside them.

Hashed tables on the host, row-wise over ranks that share the machine, one torch thread each. Repeats are interleaved;
figures are medians, and their ratios:

    dd            the bytes of a snapshot from /dev/zero, with fsync
    dd, reading   its files to /dev/null, which the system was told to forget before
    save          checkpoint.save
    load          checkpoint.load of it: its files forgotten before (cold), and once more (warm)
    delta         DeltaWriter.save_delta after 1 % of the rows were trained
    stop, step    how long the beginning of a snapshot holds training up; a step alone, and while a thread writes

`--quick` takes a minute on a machine that has nothing else to do. The table is that of benchmarks/RESULTS.md.

    python -m benchmarks.checkpoint --quick --ranks 1 2
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.multiprocessing.spawn import spawn
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from benchmarks.oversized import OPTIMIZERS, collection
from hybridrec import checkpoint

Figures = dict[str, list[float]]


class Rank:
    """What one rank trains and saves."""

    def __init__(self, args: argparse.Namespace, folder: Path) -> None:
        self._args, self.folder, self.figures = args, folder, Figures()
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        self._module: nn.Module = collection(args, device_rows=max(args.rows // 10, 50_000))
        self._random = torch.Generator().manual_seed(1)
        for part in torch.arange(args.rows).split(100_000):
            self._step(part)

    def _step(self, ids: Tensor) -> tuple[float, float]:
        """One step with this rank's share of the ids, one a bag, in every feature: seconds, and those of the thread."""
        mine, tables = ids[self.rank :: self.world_size], self._args.tables
        keys, lengths = [f"f{t}" for t in range(tables)], torch.ones(len(mine) * tables, dtype=torch.int64)
        features = KeyedJaggedTensor(keys, mine.repeat(tables), lengths=lengths)
        start, of_thread = time.perf_counter(), time.thread_time()
        self._module(features).values().sum().backward()
        return time.perf_counter() - start, time.thread_time() - of_thread

    def _random_step(self, name: str) -> None:
        ids = torch.randint(self._args.rows, (self._args.batch,), generator=self._random)
        seconds, of_thread = self._step(ids)
        self._note(name, seconds)
        self._note(f"{name}, its thread", of_thread)

    def _note(self, name: str, figure: float) -> None:
        self.figures.setdefault(name, []).append(figure)

    def _timed(self, name: str, call: Callable[[], object]) -> None:
        """All ranks begin together; the figure is that of this one."""
        dist.barrier()
        start = time.perf_counter()
        call()
        self._note(name, time.perf_counter() - start)

    def _first(self, call: Callable[[], object]) -> None:
        """On rank 0, the others wait."""
        dist.barrier()
        if self.rank == 0:
            call()
        dist.barrier()

    def repeat(self) -> None:
        """Every figure once more."""
        for _ in range(3):
            self._random_step("step, warm-up")
        self._timed("save", lambda: checkpoint.save(self.folder, self._module, keep=1))
        snapshot = checkpoint.latest(self.folder)
        if snapshot is None:
            raise SystemExit(f"{self.folder} has no snapshot")
        files = [path for path in snapshot.rglob("*") if path.is_file()]
        self._note("bytes", num_bytes := sum(path.stat().st_size for path in files))
        self._first(lambda: self._note("dd", write_zeros(self.folder / "dd", num_bytes)))
        self._first(lambda: forget(files))
        self._first(lambda: self._note("dd, reading", read_all(files)))
        self._first(lambda: forget(files))
        for name in ("load, cold", "load, warm"):
            self._timed(name, lambda: checkpoint.load(self.folder, self._module))
        self._delta()
        for _ in range(10):
            self._random_step("step, warm-up")
        for _ in range(60):
            self._random_step("step")
            self._is_everyone(True)
        self._beside_a_save()

    def _delta(self) -> None:
        writer = checkpoint.DeltaWriter(self.folder / "chain", self._module, keep=1)
        full = writer.save_full()
        self._step(torch.randperm(self._args.rows, generator=self._random)[: self._args.rows // 100])
        self._timed("delta", writer.save_delta)
        size = {part: sum(p.stat().st_size for p in (full / part).rglob("*")) for part in ("rows", "deltas")}
        self._note("delta, share of the rows' bytes", size["deltas"] / size["rows"])
        writer.close()

    def _beside_a_save(self) -> None:
        dist.barrier()
        start = time.perf_counter()
        saving = checkpoint.Saving(self.folder / "beside", self._module, keep=1)
        self._note("stop", time.perf_counter() - start)
        start = time.perf_counter()
        saving.start()
        while not self._is_everyone(saving.is_written):
            self._random_step("step beside a save")
        self._note("writing beside steps", time.perf_counter() - start)
        saving.finish()

    def _is_everyone(self, value: bool) -> bool:
        flag = torch.tensor(int(value))
        dist.all_reduce(flag, op=dist.ReduceOp.MIN)
        return bool(flag)


def write_zeros(target: Path, num_bytes: int) -> float:
    """Seconds."""
    count = -(-num_bytes // 2**22)
    seconds = dd("if=/dev/zero", f"of={target}", f"count={count}", "conv=fsync")
    target.unlink()
    return seconds * num_bytes / (count * 2**22)


def read_all(files: list[Path]) -> float:
    """Seconds."""
    return sum(dd(f"if={path}", "of=/dev/null") for path in files)


def dd(*arguments: str) -> float:
    """Seconds."""
    start = time.perf_counter()
    subprocess.run(["dd", "bs=4M", "status=none", *arguments], check=True)
    return time.perf_counter() - start


def forget(files: list[Path]) -> None:
    """Let the system drop what it has of them in memory."""
    for path in files:
        descriptor = os.open(path, os.O_RDONLY)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def run_rank(rank: int, world_size: int, folder: Path, args: argparse.Namespace) -> None:
    """One process."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/ranks", rank=rank, world_size=world_size)
    one = Rank(args, folder)
    for _ in range(args.repeats):
        one.repeat()
    (folder / f"{rank}.json").write_text(json.dumps(one.figures))
    dist.barrier()
    dist.destroy_process_group()


def measure(world_size: int, args: argparse.Namespace) -> dict[str, float]:
    """The medians; of ranks the slowest one's."""
    folder = Path(tempfile.mkdtemp(dir=args.folder)).resolve()
    try:
        spawn(run_rank, (world_size, folder, args), nprocs=world_size)
        ranks = [json.loads((folder / f"{rank}.json").read_text()) for rank in range(world_size)]
    finally:
        shutil.rmtree(folder)
    return {name: max(statistics.median(one[name]) for one in ranks if name in one) for name in ranks[0]}


def lines(world_size: int, found: dict[str, float]) -> list[str]:
    """The rows of the table."""

    def speed(name: str, beside: str) -> str:
        rate, share = found["bytes"] / found[name] / 1e9, found[beside] / found[name]
        return f"{rate:.2f} GB/s, {share:.2f} of {beside}"

    def line(what: str, figure: str, goal: str = "", is_met: bool | None = None) -> str:
        verdict = {None: "", True: "met", False: "missed"}[is_met]
        return f"| {world_size} | {what} | {figure} | {goal} | {verdict} |"

    slower = found["step beside a save"] / found["step"]
    its_thread = found["step beside a save, its thread"] / found["step, its thread"]
    share = found["delta, share of the rows' bytes"]
    return [
        *(line(name, f"{found['bytes'] / found[name] / 1e9:.2f} GB/s") for name in ("dd", "dd, reading")),
        line("save", speed("save", "dd"), "0.60 of dd", found["dd"] / found["save"] >= 0.6),
        line("load, cold", speed("load, cold", "dd"), "0.60 of dd", found["dd"] / found["load, cold"] >= 0.6),
        line("load, cold", speed("load, cold", "dd, reading")),
        line("load, warm", speed("load, warm", "dd"), "0.60 of dd", found["dd"] / found["load, warm"] >= 0.6),
        line("delta of 1 % of the rows", f"{share:.2%} of the rows' bytes", "1.20 %", share <= 0.012),
        line("the same", f"{found['delta'] * 1e3:.0f} ms, {found['delta'] / found['save']:.2f} of a save"),
        line("stop for a snapshot", f"{found['stop'] * 1e3:.0f} ms"),
        line("step alone", f"{found['step'] * 1e3:.1f} ms"),
        line("step beside a save", f"{slower:.2f} of that", "1.20", slower <= 1.2),
        line("processor time of its thread", f"{its_thread:.2f} of that of a step alone"),
        line("writing beside steps", f"{found['writing beside steps'] / found['save']:.2f} of a save"),
    ]


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tables", type=int, default=2)
    parser.add_argument("--rows", type=int, default=1_000_000, help="rows of each table (default 1000000)")
    parser.add_argument("--dim", type=int, default=64)
    parser.add_argument("--batch", type=int, default=4096, help="ids of a feature in a step, of all ranks")
    parser.add_argument("--optimizer", choices=OPTIMIZERS, default="adagrad")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1], help="numbers of ranks, one run each")
    parser.add_argument("--quick", action="store_true", help="a quarter of the rows")
    parser.add_argument("--folder", type=Path, help="on the disk in question (default: a temporary one)")
    parser.add_argument("--json", type=Path, help="a file for the medians, by number of ranks")
    args = parser.parse_args()
    args.rows = args.rows // 4 if args.quick else args.rows
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    found = {world_size: measure(world_size, args) for world_size in args.ranks}
    size = next(iter(found.values()))["bytes"] / 1e9
    print(f"\n{args.tables} tables of {args.rows:,} x {args.dim}, {args.optimizer}: {size:.2f} GB a snapshot\n")
    print("| ranks | what | figure | goal | |\n|---|---|---|---|---|")
    for world_size, medians in found.items():
        print("\n".join(lines(world_size, medians)))
    if args.json is not None:
        args.json.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
