"""Freezing into files takes a chunk of memory, not a table."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable
from pathlib import Path

import torch

from hybridrec import HashEmbeddingBagCollection, HashEmbeddingBagConfig
from hybridrec.inference import freeze

ROWS, DIM = 100_000, 256
TABLE_BYTES = 4 * ROWS * DIM


def anonymous_bytes() -> int:
    """What this process has in memory that is no file's page."""
    (kilobytes,) = re.findall(r"^RssAnon:\s+(\d+) kB", Path("/proc/self/status").read_text(), re.MULTILINE)
    return 1024 * int(kilobytes)


def peak_of(action: Callable[[], object]) -> int:
    """Bytes that were taken at most, above those that were there before."""
    before, peak, is_over = anonymous_bytes(), 0, threading.Event()

    def watch() -> None:
        nonlocal peak
        while not is_over.wait(0.002):
            peak = max(peak, anonymous_bytes())

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        kept = action()
        peak = max(peak, anonymous_bytes())
    finally:
        is_over.set()
        watcher.join()
    del kept
    return peak - before


def test_a_table_larger_than_the_spare_memory_is_streamed(tmp_path: Path) -> None:
    collection = HashEmbeddingBagCollection([HashEmbeddingBagConfig(10, DIM, "large", feature_names=["f"])]).eval()
    ids = torch.arange(ROWS) * 7 - 3
    rows = torch.randn(ROWS, DIM)
    collection.bag_of("large").set_extra_state(
        {"ids": ids, "scores": torch.zeros_like(ids), "rows": rows, "states": []}
    )
    freeze(collection, tmp_path / "warm up", dtype="fp32", chunk_rows=512)
    streamed = peak_of(lambda: freeze(collection, tmp_path / "frozen", dtype="fp32", chunk_rows=512))
    in_memory = peak_of(lambda: freeze(collection, dtype="fp32", chunk_rows=512))
    assert in_memory > 0.9 * TABLE_BYTES, "the measure sees a table"
    assert streamed < TABLE_BYTES / 4, f"{streamed:,} bytes for a table of {TABLE_BYTES:,}"
