"""The picture of a run: loss and hit rate over the batches."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import torch

from examples.little_demo.history import History

SMOOTHED_OVER = 20
"""Batches of which the thick line is the mean."""


def draw(history: History, path: Path, title: str) -> None:
    """Write a PNG: losses above, below them the hit rate of each table.

    Args:
        history: Of rank 0, at least one batch.
        path: Folders on the way are made; an older file is replaced.
        title: Above the picture.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    losses = torch.stack(history.losses).double().cpu()
    figure = Figure(figsize=(8, 6), dpi=100, layout="constrained")
    FigureCanvasAgg(figure)  # draws into memory; no window, no screen
    above, below = figure.subplots(2, 1, sharex=True)
    figure.suptitle(title)

    steps = range(1, len(losses) + 1)
    above.plot(steps, losses, color="0.75", linewidth=0.8, label="each batch")
    above.plot(steps, moving_mean(losses), color="C0", linewidth=1.8, label=f"mean of {SMOOTHED_OVER}")
    above.set_ylabel("loss (rank 0)")
    above.legend(loc="upper right")

    for table in history.hit_rates[0]:
        is_all = table == "all"
        style = {"color": "black", "linewidth": 2.0} if is_all else {"linewidth": 1.0}
        if is_all or len(history.hit_rates[0]) <= 9:  # more lines than colours would tell nothing apart
            below.plot(history.steps, [rates[table] for rates in history.hit_rates], marker=".", label=table, **style)
    below.set_ylim(0.0, 1.02)
    below.set_ylabel("ids whose row was on the device")
    below.set_xlabel("batch")
    below.legend(loc="lower right", ncols=3)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, format="png")


def is_usable(package: str, what: str) -> bool:
    """Whether an optional package is installed; if not, says so, and what to do."""
    if importlib.util.find_spec(package) is not None:
        return True
    print(f"no {what}: {package} is not installed. All else works; to have it: pip install {package}", flush=True)
    return False


def moving_mean(values: torch.Tensor) -> torch.Tensor:
    """Mean of each value and up to `SMOOTHED_OVER` - 1 before it, float64 [N] from float64 [N]."""
    sums = torch.cat([values.new_zeros(1), values.cumsum(0)])
    ends = torch.arange(1, len(values) + 1)
    starts = (ends - SMOOTHED_OVER).clamp(min=0)
    return (sums[ends] - sums[starts]) / (ends - starts)
