"""Two torchrun agents with one rank each train what one agent with two ranks trains, bit for bit."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.ports import free_port
from tests.repo.sources import ROOT

WATCHDOG_SECONDS = 280.0
STOP_SECONDS = 60.0
Ranks = list[tuple[dict[str, Any], dict[str, np.ndarray]]]


def torchrun(agents: list[list[str]], loop: str, out: Path) -> Ranks:
    """Start the agents, wait for all, and return what each rank wrote: (facts, arrays), in rank order."""
    out.mkdir()
    # torchrun fixes the number of threads only where it starts several ranks, and sums depend on it.
    env = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    logs = [(out / f"agent_{number}.log").open("w+") for number in range(len(agents))]
    script = ["-m", "tests.distributed.train_on_nodes", "--out", str(out), "--loop", loop]
    started = [
        subprocess.Popen(
            [sys.executable, "-m", "torch.distributed.run", *options, *script],
            env=env,
            cwd=ROOT,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
        )
        for options, log in zip(agents, logs, strict=True)
    ]
    deadline = time.monotonic() + WATCHDOG_SECONDS
    try:
        while any(agent.poll() is None for agent in started) and time.monotonic() < deadline:
            if any(agent.poll() not in (None, 0) for agent in started):
                break
            time.sleep(0.1)
    finally:
        codes = [agent.poll() for agent in started]
        for agent in started:
            stop(agent)
    texts = []
    for log in logs:
        log.seek(0)
        texts.append(log.read()[-3000:])
        log.close()
    assert codes == [0] * len(agents), "\n--- next agent\n".join(texts)
    ranks: Ranks = []
    for rank in range(2):
        with np.load(out / f"rank_{rank}.npz") as arrays:
            ranks.append((json.loads((out / f"rank_{rank}.json").read_text()), dict(arrays)))
    return ranks


def stop(agent: subprocess.Popen[bytes] | subprocess.Popen[str]) -> None:
    """End an agent; asked to, it ends its ranks first."""
    if agent.poll() is None:
        agent.terminate()
        try:
            agent.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            agent.kill()
            agent.wait()


def one_node() -> list[list[str]]:
    return [["--nnodes=1", "--nproc-per-node=2", "--master-addr=127.0.0.1", f"--master-port={free_port()}"]]


def two_nodes(rendezvous: str) -> list[list[str]]:
    """The two-node lines of docs/multi_node.md, on one machine."""
    port = free_port()
    if rendezvous == "static":
        common = ["--nnodes=2", "--nproc-per-node=1", "--master-addr=127.0.0.1", f"--master-port={port}"]
        return [[*common, f"--node-rank={number}"] for number in range(2)]
    common = ["--nnodes=2", "--nproc-per-node=1", "--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{port}"]
    return [[*common, "--rdzv-id=two_nodes", "--local-addr=127.0.0.1"]] * 2


def where(facts: dict[str, Any]) -> list[int]:
    return [int(facts[name]) for name in ("GROUP_RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "WORLD_SIZE")]


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> Ranks:
    """What one node with two ranks trains, in a plain loop."""
    ranks = torchrun(one_node(), "plain", tmp_path_factory.mktemp("nodes") / "one")
    assert [where(facts) for facts, _ in ranks] == [[0, 0, 2, 2], [0, 1, 2, 2]]
    return ranks


@pytest.mark.parametrize(("rendezvous", "loop"), [("static", "plain"), ("c10d", "pipeline")])
def test_two_nodes_are_one_node_with_two_ranks(one: Ranks, rendezvous: str, loop: str, tmp_path: Path) -> None:
    two = torchrun(two_nodes(rendezvous), loop, tmp_path / "two")

    assert [where(facts) for facts, _ in two] == [[0, 0, 1, 2], [1, 0, 1, 2]]  # LOCAL_RANK is 0 twice
    for (facts, mine), (other_facts, theirs) in zip(one, two, strict=True):
        assert facts["victims"] > 0 and other_facts["victims"] > 0  # rows moved between the tiers
        assert mine.keys() == theirs.keys() and len(mine["losses"]) == 40
        for name, values in mine.items():
            assert values.tobytes() == theirs[name].tobytes(), f"{name} differ"
    # The comparison can fail: ranks have different data and different rows, and training changes the losses.
    first, second = one[0][1], one[1][1]
    assert first["losses"].tobytes() != second["losses"].tobytes()
    assert len(set(first["losses"].tolist())) > 20
    for name in ("ids_0", "ids_1", "ids_2"):
        assert len(first[name]) and not set(first[name].tolist()) & set(second[name].tolist())
