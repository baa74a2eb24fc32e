"""The command line. Nothing heavy is imported here, so that ``--help`` is quick."""

from __future__ import annotations

import argparse
from pathlib import Path

DEVICES = ("cpu", "cuda", "npu")
DATA_SETS = ("movielens", "criteo", "powerlaw")
MAX_DEPTH = 12
MAX_POWERLAW_FEATURES = 100
PICTURE = Path(__file__).parents[2] / "out" / "little_demo.png"
SNAPSHOTS = PICTURE.with_name("little_demo_snapshots")


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    """The command line; ends the process with a usage text if it is wrong."""
    parser = argparse.ArgumentParser(
        prog="examples/little_demo/run.sh",
        description="Train a small DLRM. Its hashed tables are larger than their device tier, so that rows move "
        "between device and host while it trains. Prints the plan, losses, held-out AUC, where the rows are, hit "
        "rates, the stages of the pipeline and speed.",
        epilog="Exit status: 0; 1 if a full epoch of MovieLens did not reach an AUC of 0.77. "
        "Short try: %(prog)s --batches 20",
    )
    add = parser.add_argument
    add(
        "--device",
        choices=["auto", *DEVICES],
        default="auto",
        help="default auto: cuda or npu if present, else cpu",
    )
    add(
        "--ranks",
        type=_positive,
        metavar="W",
        help="processes to start, each on a device of its own (default: 2)",
    )
    add("--epochs", type=_positive, default=1, metavar="N", help="passes over the training part (default: 1)")
    add("--batches", type=_positive, metavar="N", help="stop after N batches; short of an epoch the AUC is not judged")
    add("--batch-size", type=_positive, default=512, metavar="B", help="rows a batch, over all ranks (default: 512)")
    add("--seed", type=int, default=0, help="of split, order, rows and weights; same seed, same losses (default: 0)")
    add(
        "--depth",
        type=_positive,
        default=3,
        metavar="N",
        help=f"batches in the pipeline, 1 to {MAX_DEPTH}; 1: one after the other. Sizes the caches, changes no loss "
        "(default: 3)",
    )
    add(
        "--workers",
        type=_count,
        metavar="N",
        help="processes a rank that read data (default: 0; for criteo up to 2, if cores are free)",
    )

    data = parser.add_argument_group("data")
    add = data.add_argument
    add(
        "--data",
        choices=DATA_SETS,
        default="movielens",
        help="movielens: 100,004 ratings that come with the demo (default); criteo: a file of yours; powerlaw: made-up "
        "clicks whose best possible AUC is known",
    )
    add("--path", type=Path, metavar="FILE", help="criteo: text file with labels, may be .gz; read as it is used")
    add("--rows", type=_positive, metavar="N", help="powerlaw: rows to train on (default: 200,000)")
    add("--ids", type=_positive, metavar="N", help="powerlaw: different ids a feature (default: 20,000)")
    add("--features", type=_positive, metavar="F", help="powerlaw: features of one id each (default: 4)")
    add("--exponent", type=_exponent, metavar="X", help="powerlaw: skew, 0 = none (default: 1.05)")

    out = parser.add_argument_group("output")
    out.add_argument(
        "--picture",
        type=Path,
        metavar="FILE.png",
        help="draw loss and hit rate there (default: out/little_demo.png of this checkout, overwritten by every run). "
        "Needs matplotlib",
    )
    out.add_argument(
        "--tensorboard", type=Path, metavar="DIR", help="log loss, hit rates and AUC there. Needs tensorboard"
    )
    add = out.add_argument
    add("--save-every", type=_positive, metavar="N", help="write a snapshot every N batches, and one on SIGTERM")
    add("--resume", action="store_true", help="go on from the newest snapshot, if there is one")
    add(
        "--snapshots",
        type=Path,
        metavar="DIR",
        help="where they are (default: out/little_demo_snapshots of this checkout); the newest 3 are kept",
    )
    args = parser.parse_args(argv)
    _check_together(parser, args)
    return args


def _check_together(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    """Options that only make sense with others."""
    if args.depth > MAX_DEPTH:
        parser.error(f"argument --depth: {args.depth} is more than the {MAX_DEPTH} batches that can be in flight")
    if args.data == "criteo" and args.path is None:
        parser.error("--data criteo needs --path FILE: a Criteo text file with labels (train.txt, day_0.gz ..)")
    if args.data == "criteo" and not args.path.is_file():
        parser.error(f"argument --path: there is no file {str(args.path)!r}")
    if args.data != "criteo" and args.path is not None:
        parser.error("--path has no effect without --data criteo")
    for name in ("rows", "ids", "features", "exponent"):
        if args.data != "powerlaw" and getattr(args, name) is not None:
            parser.error(f"--{name} has no effect without --data powerlaw")
    if args.features is not None and args.features > MAX_POWERLAW_FEATURES:
        parser.error(f"argument --features: {args.features} is more than {MAX_POWERLAW_FEATURES}")
    if args.ids is not None and args.ids > 2**40:
        parser.error(f"argument --ids: {args.ids} is more than 2^40")
    if args.snapshots is not None and not (args.save_every or args.resume):
        parser.error("--snapshots has no effect without --save-every or --resume")
    if args.picture is not None and args.picture.suffix.lower() != ".png":
        parser.error(f"argument --picture: the name {str(args.picture)!r} does not end in .png")


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 1 on")
    return int(text)


def _count(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 0 on")
    return int(text)


def _exponent(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0.0 <= value <= 10.0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number from 0 to 10")
    return value
