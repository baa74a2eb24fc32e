"""What the Little Demo records while it trains, and the pictures and logs of it."""

from __future__ import annotations

import dataclasses
import io
from pathlib import Path
from typing import Any

import pytest
import torch
from tqdm import tqdm

from examples.little_demo import pictures
from examples.little_demo.history import Board, History, Recorder
from hybridrec import TableStats


def stats(table: str, **counters: int) -> TableStats:
    zeros: dict[str, Any] = {f.name: 0 for f in dataclasses.fields(TableStats)}
    return TableStats(**(zeros | {"table": table} | counters))


class Counters:
    """Two tables, of which one hits half of its accesses at first and always afterwards."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self) -> list[TableStats]:
        self.calls += 1
        user = stats("user", accesses=100 * self.calls, access_hits=100 * self.calls - 50)
        return [user, stats("movie", accesses=300, access_hits=0)]


def record(num_batches: int, **options: Any) -> History:
    recorder = Recorder(Counters(), **options)
    for number in range(num_batches):
        recorder.add(torch.tensor(1.0 / (1 + number)), num_rows=7)
    return recorder.finish()


def test_hit_rates_are_those_since_the_report_before() -> None:
    history = record(25)
    assert history.steps == [10, 20, 25]
    assert [loss.item() for loss in history.losses] == [pytest.approx(1.0 / (1 + n)) for n in range(25)]
    assert history.num_rows == 175
    assert [rates["user"] for rates in history.hit_rates] == [0.5, 1.0, 1.0]
    assert history.hit_rates[0]["movie"] == 0.0
    assert history.hit_rates[1]["movie"] != history.hit_rates[1]["movie"]  # NaN: nothing was looked up
    assert [rates["all"] for rates in history.hit_rates] == [0.125, 1.0, 1.0]


def test_nothing_is_reported_twice() -> None:
    assert record(20).steps == [10, 20]
    assert record(0).steps == []


def test_losses_are_printed_above_the_bar(capsys: pytest.CaptureFixture[str]) -> None:
    with tqdm(total=12, file=io.StringIO()) as bar:
        record(12, bar=bar)
    mean = sum(1.0 / (1 + n) for n in range(10)) / 10
    assert capsys.readouterr().out.splitlines() == [
        f"batch     10  loss {mean:.7f}",
        f"batch     12  loss {(1 / 11 + 1 / 12) / 2:.7f}",
    ]


def test_tensorboard_reads_back_what_was_logged(tmp_path: Path) -> None:
    accumulators = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    board = Board(tmp_path / "log")
    record(12, board=board)
    board.add("auc", 0.75, 12)
    board.close()
    log = accumulators.EventAccumulator(str(tmp_path / "log"))
    log.Reload()
    assert set(log.Tags()["scalars"]) == {"loss", "auc", "hit_rate/user", "hit_rate/movie", "hit_rate/all"}
    assert [(e.step, e.value) for e in log.Scalars("loss")] == [(n, pytest.approx(1.0 / n)) for n in range(1, 13)]
    assert [(e.step, e.value) for e in log.Scalars("hit_rate/user")] == [(10, 0.5), (12, 1.0)]
    assert [(e.step, e.value) for e in log.Scalars("auc")] == [(12, 0.75)]


@pytest.mark.parametrize("num_batches", [1, 60])
def test_picture_shows_losses_and_hit_rates(num_batches: int, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    from matplotlib.image import imread

    path = tmp_path / "new" / "picture.png"
    pictures.draw(record(num_batches), path, "title")
    pixels = imread(path)
    assert pixels.shape == (600, 800, 4)
    above, below = pixels[:300, :, :3], pixels[300:, :, :3]
    assert (abs(above - (0.122, 0.467, 0.706)) < 0.01).all(2).sum() > 20  # the mean's line, matplotlib's first colour
    assert (below < 0.01).all(2).sum() > 200  # black: all tables together
    other = tmp_path / "other.png"
    history = record(num_batches)
    history.losses[-1] += 1.0
    pictures.draw(history, other, "title")
    assert (imread(other) != pixels).any()


def test_moving_mean_starts_with_what_there_is() -> None:
    values = torch.randn(50, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    expected = [values[max(0, n - pictures.SMOOTHED_OVER + 1) : n + 1].mean() for n in range(50)]
    torch.testing.assert_close(pictures.moving_mean(values), torch.stack(expected))


def test_missing_packages_are_said_with_the_remedy(capsys: pytest.CaptureFixture[str]) -> None:
    assert pictures.is_usable("torch", "picture")
    assert capsys.readouterr().out == ""
    assert not pictures.is_usable("no_such_package", "picture")
    assert "no picture: no_such_package is not installed" in (said := capsys.readouterr().out)
    assert "pip install no_such_package" in said
