"""Command line of the Little Demo."""

from __future__ import annotations

from pathlib import Path

import pytest

from examples.little_demo.options import MAX_DEPTH, parse_args


@pytest.mark.parametrize("text", ["0", "-1", "1.5", ""])
@pytest.mark.parametrize("option", ["--epochs", "--batches", "--batch-size", "--ranks", "--depth", "--rows", "--ids"])
def test_counts_below_one_are_refused(option: str, text: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as refused:
        parse_args([f"{option}={text}"])
    assert refused.value.code == 2
    assert f"argument {option}: {text!r} is not a whole number from 1 on" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--depth", str(MAX_DEPTH + 1)], "--depth: 13 is more than the 12 batches"),
        (["--workers", "-1"], "--workers: '-1' is not a whole number from 0 on"),
        (["--data", "criteo"], "--data criteo needs --path FILE"),
        (["--data", "criteo", "--path", "missing.tsv"], "--path: there is no file 'missing.tsv'"),
        (["--path", "train.txt"], "--path has no effect without --data criteo"),
        (["--rows", "10"], "--rows has no effect without --data powerlaw"),
        (["--exponent", "1"], "--exponent has no effect without --data powerlaw"),
        (["--data", "powerlaw", "--exponent", "-0.5"], "--exponent: '-0.5' is not a number from 0 to 10"),
        (["--data", "powerlaw", "--exponent", "nan"], "--exponent: 'nan' is not a number from 0 to 10"),
        (["--data", "powerlaw", "--features", "101"], "--features: 101 is more than 100"),
        (["--data", "powerlaw", "--ids", str(2**40 + 1)], "is more than 2^40"),
        (["--picture", "losses.pdf"], "--picture: the name 'losses.pdf' does not end in .png"),
    ],
)
def test_options_that_make_no_sense_are_refused(
    options: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as refused:
        parse_args(options)
    assert refused.value.code == 2
    assert message in capsys.readouterr().err


def test_defaults_are_the_quick_demo() -> None:
    args = parse_args([])
    assert (args.data, args.depth, args.epochs, args.batch_size, args.seed) == ("movielens", 3, 1, 512, 0)
    assert args.picture is args.tensorboard is args.workers is args.batches is None


def test_options_of_a_data_set_are_taken(tmp_path: Path) -> None:
    path = tmp_path / "train.txt"
    path.write_text("")
    assert parse_args(["--data", "criteo", "--path", str(path)]).path == path
    args = parse_args(["--data", "powerlaw", "--rows", "7", "--ids", "8", "--features", "9", "--exponent", "0"])
    assert (args.rows, args.ids, args.features, args.exponent) == (7, 8, 9, 0.0)
