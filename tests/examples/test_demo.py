"""The Little Demo as a whole: ten batches in a pool of ranks, and twice through its launcher."""

from __future__ import annotations

import gzip
import io
import math
import os
import random
import re
import subprocess
import sys
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist

from examples.little_demo import main
from examples.little_demo.batch import DataError, Share, load
from examples.little_demo.criteo import Criteo
from examples.little_demo.history import Recorder
from examples.little_demo.launch import Ranks
from examples.little_demo.movielens import MovieLens, Ratings, load_ratings
from examples.little_demo.options import parse_args
from examples.little_demo.powerlaw import PowerLaw, PowerLawSizes
from examples.little_demo.report import gather_stats, hit_rate
from examples.little_demo.tables import build_tables
from hybridrec import HybridTrainPipelineSparseDist
from tests.ranks import RankPool

ROOT = Path(__file__).parents[2]
CPU = torch.device("cpu")
LN_2 = math.log(2.0)
TEN_BATCHES = ("--batches", "10", "--seed", "3")


def first_ratings(num_rows: int) -> Ratings:
    """The oldest part of the log."""
    ratings = load_ratings()
    return Ratings(
        users=ratings.users[:num_rows],
        movies=ratings.movies[:num_rows],
        genres=ratings.genres[: int(ratings.genre_lengths[:num_rows].sum())],
        genre_lengths=ratings.genre_lengths[:num_rows],
        labels=ratings.labels[:num_rows],
    )


def join() -> Ranks:
    """The ranks of a pool."""
    world_size = dist.get_world_size()
    return Ranks(
        rank=dist.get_rank(),
        world_size=world_size,
        local_world_size=world_size,
        device=CPU,
        host_group=dist.new_group(backend="gloo"),
    )


def train_ten_batches(seed: int, depth: int = 3) -> dict[str, Any]:
    """A rank's job: what the script does, on ten batches of 256 ratings."""
    ranks = join()
    torch.manual_seed(seed)
    ratings = first_ratings(3_200)
    data = MovieLens(ratings, seed=seed)
    # A device tier as for depth 3 at any depth, so that nothing but the depth differs.
    tables = build_tables(data.tables(), batch_size=256, world_size=ranks.world_size, depth=3, seed=seed)
    model, optimizer, plan = main.build_model(data, tables, ranks)
    pipeline = HybridTrainPipelineSparseDist(model, optimizer, CPU, pipe_n_batch=depth)
    share = Share(batch_size=256, rank=ranks.rank, world_size=ranks.world_size)
    history = main.train(pipeline, model, data.train_batches(share, 0), Recorder(model.module.ebc.stats))
    stats = gather_stats(model.module.ebc.stats(), ranks.host_group)
    result = main.evaluate(pipeline, model, data.test_batches(share), ranks)
    ids = {"user": ratings.users[data.train_rows], "movie": ratings.movies[data.train_rows]}
    return {
        "losses": [loss.item() for loss in history.losses],
        "hit_rates": history.hit_rates,
        "rows": history.num_rows,
        "result": result,
        "kernels": {name: sharding.compute_kernel for name, sharding in plan.plan["ebc"].items()},
        "stats": {of_table[0].table: of_table for of_table in stats},
        "stats_after": {s.table: s for s in model.module.ebc.stats()},
        "live": {name: len(torch.unique(of_table)) for name, of_table in ids.items()},
        "hit_rate": hit_rate([s for of_table in stats for s in of_table]),
        "depth": pipeline.stats().depth,
    }


def check_run(results: list[dict[str, Any]]) -> None:
    """What must hold for `train_ten_batches` at any world size."""
    for rank, result in enumerate(results):
        assert result["kernels"] == {"user": "fused_uvm_caching", "movie": "fused_uvm_caching", "genre": "fused"}
        assert result["result"] == results[0]["result"]
        assert result["result"].num_rows == 640
        assert len(result["losses"]) == 10
        assert result["losses"][0] == pytest.approx(LN_2, abs=0.05)  # nothing learned yet
        assert min(result["losses"][5:]) < LN_2 - 0.01
        for table, live in result["live"].items():
            of_ranks = result["stats"][table]
            assert sum(s.rows for s in of_ranks) == live
            assert [s.rank for s in of_ranks] == list(range(len(results)))
            assert result["stats_after"][table] == of_ranks[rank]  # evaluation left no trace
    movie = results[0]["stats"]["movie"]
    assert sum(s.accesses for s in movie) == 2_560
    assert sum(s.resident for s in movie) < sum(s.rows for s in movie)  # the tier is smaller than the table
    assert sum(s.write_backs for s in movie) > 0
    assert 0.0 < results[0]["hit_rate"] < 1.0
    assert sum(result["rows"] for result in results) == 2_560


def test_ten_batches_on_one_rank(pool_1: RankPool) -> None:
    check_run(pool_1.run(train_ten_batches, 5))


def test_ten_batches_on_two_ranks(pool_2: RankPool) -> None:
    check_run(pool_2.run(train_ten_batches, 5))


def test_seed_decides_the_losses(pool_1: RankPool) -> None:
    first, again, other = (pool_1.run(train_ten_batches, seed)[0]["losses"] for seed in (5, 5, 6))
    assert first == again
    assert first != other


def test_depth_changes_no_loss(pool_2: RankPool) -> None:
    serial, pipelined = (pool_2.run(train_ten_batches, 5, depth) for depth in (1, 3))
    for one, three in zip(serial, pipelined, strict=True):
        assert (one["depth"], three["depth"]) == (1, 3)
        assert one["losses"] == three["losses"]  # bit for bit
        assert one["result"] == three["result"]


def learn_power_law() -> dict[str, Any]:
    """A rank's job: one epoch of a small power law, and what could have been reached."""
    ranks = join()
    torch.manual_seed(0)
    data = PowerLaw(PowerLawSizes(rows=40_000, ids=500, features=2), seed=0)
    tables = build_tables(data.tables(), batch_size=256, world_size=ranks.world_size, depth=3, seed=0)
    model, optimizer, _ = main.build_model(data, tables, ranks)
    pipeline = HybridTrainPipelineSparseDist(model, optimizer, CPU)
    share = Share(batch_size=256, rank=ranks.rank, world_size=ranks.world_size)
    before = main.evaluate(pipeline, model, data.test_batches(share), ranks)
    main.train(pipeline, model, data.train_batches(share, 0), Recorder(model.module.ebc.stats))
    after = main.evaluate(pipeline, model, data.test_batches(share), ranks)
    return {"before": before.auc, "after": after.auc, "best": main.best_auc(data, data.test_batches(share), ranks)}


def test_planted_structure_is_learned_up_to_the_best_auc(pool_2: RankPool) -> None:
    results = pool_2.run(learn_power_law)
    assert results[0] == results[1]
    for result in results:
        assert abs(result["before"] - 0.5) < 0.05
        assert 0.5 + 0.8 * (result["best"] - 0.5) < result["after"] < result["best"]


def learn_criteo(path: Path) -> dict[str, Any]:
    """A rank's job: one epoch of a Criteo file."""
    ranks = join()
    torch.manual_seed(0)
    data = Criteo(path, sample_lines=500)
    tables = build_tables(data.tables(), batch_size=64, world_size=ranks.world_size, depth=3, seed=0)
    model, optimizer, plan = main.build_model(data, tables, ranks)
    pipeline = HybridTrainPipelineSparseDist(model, optimizer, CPU)
    share = Share(batch_size=64, rank=ranks.rank, world_size=ranks.world_size)
    # A pool's ranks cannot have worker processes.
    batches = load(data, share, epochs=range(5), num_workers=0, pin_memory=False)
    history = main.train(pipeline, model, batches, Recorder(model.module.ebc.stats))
    result = main.evaluate(pipeline, model, data.test_batches(share), ranks)
    kernels = {name: sharding.compute_kernel for name, sharding in plan.plan["ebc"].items()}
    return {"auc": result.auc, "kernels": kernels, "batches": len(history.losses)}


def test_criteo_is_learned_from_dense_features_and_ids(pool_2: RankPool, tmp_path: Path) -> None:
    generator = random.Random(0)
    lines = []
    for number in range(4_000):
        first, second = generator.randrange(100), generator.randrange(8)
        clicked = (first > 50) != (second < 2)  # neither field tells it alone
        if generator.random() < 0.1:
            clicked = not clicked
        categories = [f"{number:x}", f"{second:x}", *["" if number % 3 else "ab"] * 24]
        lines.append("\t".join([str(int(clicked)), str(first), *[""] * 12, *categories]) + "\n")
    path = tmp_path / "day_0"
    path.write_text("".join(lines))
    for result in pool_2.run(learn_criteo, path):
        assert result["auc"] > 0.8
        assert (result["kernels"]["c1"], result["kernels"]["c2"]) == ("fused_uvm_caching", "fused")
        assert result["batches"] == 5 * 57  # 3,600 lines to train on; the last batch has 16


@pytest.mark.parametrize(
    ("auc", "num_batches", "status", "words"),
    [
        (0.5, 156, 0, "not judged"),
        (0.7699, 157, 1, "FAILED"),
        (float("nan"), 157, 1, "FAILED"),
        (0.77, 157, 0, "OK"),
        (0.78, 314, 0, "OK"),
    ],
)
def test_full_epochs_are_judged(auc: float, num_batches: int, status: int, words: str) -> None:
    data = MovieLens(first_ratings(100), seed=0)
    got, sentence = main.judge(auc, None, data=data, num_batches=num_batches, per_epoch=157)
    assert got == status
    assert words in sentence


def test_other_data_is_compared_with_what_is_known_of_it() -> None:
    data = PowerLaw(PowerLawSizes(), seed=0)
    assert main.judge(0.65, 0.75, data=data, num_batches=1, per_epoch=391) == (
        0,
        "best possible AUC there: 0.7500; the model has come 60% of the way from guessing to it.",
    )
    assert main.judge(0.65, None, data=data, num_batches=1, per_epoch=None)[0] == 0


def run_demo(*options: str, folder: Path = ROOT) -> subprocess.CompletedProcess[str]:
    """`run.sh` as a user starts it, with this interpreter and nothing preset."""
    environment = {k: v for k, v in os.environ.items() if k not in ("GLOO_SOCKET_IFNAME", "OMP_NUM_THREADS")}
    return subprocess.run(
        [ROOT / "examples" / "little_demo" / "run.sh", *options],
        cwd=folder,
        env=environment | {"HYBRIDREC_PYTHON": sys.executable},
        capture_output=True,
        text=True,
        timeout=550,
        check=False,
    )


def losses_of(done: subprocess.CompletedProcess[str]) -> list[str]:
    return [line for line in done.stdout.splitlines() if "  loss " in line]


@pytest.fixture(scope="module")
def on_cpu(tmp_path_factory: pytest.TempPathFactory) -> tuple[subprocess.CompletedProcess[str], Path]:
    """Ten batches on two ranks, with all that can be written, and the folder where it was started."""
    folder = tmp_path_factory.mktemp("demo")
    (folder / "examples").mkdir()  # is not taken for this checkout's
    (folder / "examples" / "__init__.py").write_text("raise RuntimeError('the wrong examples')")
    options = ("--device", "cpu", *TEN_BATCHES, "--picture", "picture.png", "--tensorboard", "log")
    return run_demo(*options, folder=folder), folder


def check_output(done: subprocess.CompletedProcess[str], device: str, depth: int) -> None:
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"ranks: 2 on {device}, seed: 3" in done.stdout
    assert "fused_uvm_caching" in done.stdout
    assert f"pipeline of rank 0, depth {depth}," in done.stdout
    assert "AUC not judged: 10 batches are less than an epoch of 157." in done.stdout
    assert len(losses_of(done)) == 1


def test_launcher_writes_picture_and_log(on_cpu: tuple[subprocess.CompletedProcess[str], Path]) -> None:
    done, folder = on_cpu
    check_output(done, "cpu", depth=3)
    assert (folder / "picture.png").stat().st_size > 10_000
    assert len(list((folder / "log").iterdir())) == 1


def test_launcher_repeats_its_losses_at_another_depth(
    on_cpu: tuple[subprocess.CompletedProcess[str], Path], tmp_path: Path
) -> None:
    again = run_demo("--device", "cpu", *TEN_BATCHES, "--depth", "1", "--picture", "again.png", folder=tmp_path)
    check_output(again, "cpu", depth=1)
    assert losses_of(again) == losses_of(on_cpu[0])


def test_simulated_npu_learns_the_same(on_cpu: tuple[subprocess.CompletedProcess[str], Path], tmp_path: Path) -> None:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    done = subprocess.run(
        [*torchrun, "-m", "tests.simnpu", "examples.little_demo", "--device", "npu", *TEN_BATCHES]
        + ["--picture", str(tmp_path / "npu.png")],
        cwd=ROOT,
        env=os.environ | {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=550,
        check=False,
    )
    check_output(done, "npu", depth=3)
    loss_of_cpu, loss_of_npu = (float(losses_of(run)[0].split()[-1]) for run in (on_cpu[0], done))
    assert loss_of_npu == pytest.approx(loss_of_cpu, rel=1e-5)  # another kernel, another order of sums
    assert (tmp_path / "npu.png").exists()


def test_launcher_says_which_line_is_wrong_and_fails(tmp_path: Path) -> None:
    good = "\t".join(["1", *["2"] * 13, *["3"] * 26]) + "\n"
    (tmp_path / "day_0").write_text(good * 40 + "what\n" + good * 40)
    done = run_demo("--device", "cpu", "--data", "criteo", "--path", "day_0", "--workers", "1", folder=tmp_path)
    assert done.returncode == 1
    told = [line for line in done.stderr.splitlines() if "day_0, line 41" in line]
    assert 1 <= len(told) <= 2  # torchrun may end the other rank before it has its say
    for line in told:
        assert re.match(r"rank [01]: \S*day_0, line 41: 1 fields\. 40 with a tab between them are expected", line)
        assert line.count("line 41") == 1
    assert "Traceback" not in done.stderr


class Writes(io.StringIO):
    """Remembers what each write brought."""

    def __init__(self) -> None:
        super().__init__()
        self.all: list[str] = []

    def write(self, text: str) -> int:
        self.all.append(text)
        return len(text)


def test_a_rank_tells_wrong_data_in_one_write(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong_data(*_: object) -> int:
        raise DataError("day_0, line 41: malformed")

    ranks = Ranks(rank=1, world_size=2, local_world_size=2, device=CPU, host_group=cast(dist.ProcessGroup, None))
    monkeypatch.setattr(main, "join_ranks", lambda _: ranks)
    monkeypatch.setattr(main, "run", wrong_data)
    written = Writes()
    monkeypatch.setattr(sys, "stderr", written)
    with pytest.raises(SystemExit) as ended:
        main.main(parse_args([]))
    assert (ended.value.code, written.all) == (1, ["rank 1: day_0, line 41: malformed\n"])


def test_launcher_explains_itself_without_starting_ranks() -> None:
    done = run_demo("--ranks", "2", "--help")
    assert done.returncode == 0, done.stderr
    options = "--device --ranks --epochs --batches --batch-size --seed --depth --data --path --picture --tensorboard"
    for option in options.split():
        assert option in done.stdout


def test_launcher_refuses_a_number_of_ranks_that_is_none() -> None:
    done = run_demo("--ranks", "two")
    assert done.returncode == 2
    assert "argument --ranks: 'two' is not a whole number from 1 on" in done.stderr


@pytest.mark.slow
def test_one_epoch_reaches_the_goal(tmp_path: Path) -> None:
    done = run_demo("--device", "cpu", folder=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "OK: held-out AUC 0.7" in done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("options", ["--workers 0", "--workers 2 --depth 5 --epochs 2"])
def test_criteo_file_is_trained_on_from_the_command_line(options: str, tmp_path: Path) -> None:
    labels = [n // 10 % 2 for n in range(2_560)]
    lines = ["\t".join([str(label), *["5"] * 13, *[f"{label:x}"] * 26]) + "\n" for label in labels]
    with gzip.open(tmp_path / "day_0.gz", "wt") as file:
        file.writelines(lines)
    common = ("--device", "cpu", "--data", "criteo", "--path", "day_0.gz", "--picture", "p.png")
    done = run_demo(*common, *options.split(), folder=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "day_0.gz, about 2,560 impressions, one in 10 held out" in done.stdout
    assert "held-out AUC: 1.0000 on 256 impressions" in done.stdout
    assert "not judged" in done.stdout


@pytest.mark.slow
def test_power_law_is_compared_with_the_best_auc_from_the_command_line(tmp_path: Path) -> None:
    sizes = ("--rows", "20480", "--ids", "100", "--features", "2", "--exponent", "1")
    done = run_demo("--device", "cpu", "--data", "powerlaw", *sizes, "--picture", "p.png", folder=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    reached, best = (
        float(re.search(rf"{words}: (0\.\d+)", done.stdout)[1])  # type: ignore[index]
        for words in ("held-out AUC", "best possible AUC there")
    )
    assert 0.6 < reached < best < 0.9
