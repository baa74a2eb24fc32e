"""Parts of snapshots that are not what a writer makes, their hash being right: refused before anything changes."""

from __future__ import annotations

import dataclasses
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torchrec.distributed import DistributedModelParallel
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper
from torchrec.optim.optimizers import in_backward_optimizer_filter

from hybridrec import HybridRecError, checkpoint
from hybridrec.checkpoint.manifest import read_manifest
from tests.checkpoint.forging import bits_of, files_in, forge, forge_manifest, forge_values
from tests.checkpoint.mixed import build, train
from tests.ranks import RankPools

Forge = Callable[[Path], Any]
CUT = {"h": "column_wise", "k": "row_wise"}
"""How the hashed tables are sharded."""
OWN = "ranks/00000.pt"


def own(change: Callable[[dict[str, Any]], Any]) -> Forge:
    return lambda folder: forge_values(folder, OWN, change)


def dense(change: Callable[[dict[str, Any]], Any]) -> Forge:
    return lambda folder: forge_values(folder, "dense.pt", change)


def leaf(values: dict[str, Any]) -> dict[str, Any]:
    """The part of the optimizer that trains the dense part."""
    return values["optimizer"][""] if "" in values["optimizer"] else list(values["optimizer"].values())[-1]


def groups_of(values: dict[str, Any]) -> list[dict[str, Any]]:
    part = leaf(values)
    return part["groups"] if "groups" in part else part["state"]["param_groups"]


def states_of(values: dict[str, Any]) -> dict[Any, dict[str, Any]]:
    part = leaf(values)
    return part["state"] if "groups" in part else part["state"]["state"]


def first_state(values: dict[str, Any]) -> dict[str, Any]:
    return next(iter(states_of(values).values()))


def a_model_tensor(values: dict[str, Any], tensor: Any) -> None:
    values["model"][next(iter(values["model"]))] = tensor(values["model"][next(iter(values["model"]))])


OF_OPTIMIZERS: dict[str, tuple[Forge, str]] = {
    "an optimizer of no parts": (dense(lambda v: v.update(optimizer=[1, 2])), "dense.pt"),
    "a part without a state": (dense(lambda v: leaf(v).pop("state")), "dense.pt"),
    "a part of no kind": (dense(lambda v: leaf(v).pop("kind")), "dense.pt"),
    "a state of another shape": (dense(lambda v: first_state(v).update(exp_avg=torch.ones(3, 3, 3))), "exp_avg"),
    "a state that is no number": (dense(lambda v: first_state(v).update(exp_avg_sq="a")), "exp_avg_sq"),
    "states that are no dict": (dense(lambda v: states_of(v).update(dict.fromkeys(states_of(v), 7))), "dense.pt"),
    "a state of nobody": (dense(lambda v: states_of(v).update({99: {}, "99": {}})), "dense.pt|99"),
    "a learning rate that is none": (dense(lambda v: groups_of(v)[0].update(lr="fast")), "'lr' is 'fast'"),
    "betas of three": (dense(lambda v: groups_of(v)[0].update(betas=(0.1, 0.2, 0.3))), "'betas' is"),
    "a group of nothing": (dense(lambda v: groups_of(v)[0].pop("params")), "dense.pt"),
}


def without_its_end(folder: Path) -> None:
    """Another id in the last column."""
    name = next(n for n in reversed(list(files_in(folder))) if "h%5b%" in n and n.endswith(".rows"))
    rows = sum(f.rows for f in read_manifest(folder).files() if f.name == name)
    data = bytearray((folder / name).read_bytes())
    last = int.from_bytes(data[8 * rows - 8 : 8 * rows], "little", signed=True)
    data[8 * rows - 8 : 8 * rows] = (last + 1).to_bytes(8, "little", signed=True)
    forge(folder, name, bytes(data))


def later_score(folder: Path) -> None:
    """The first row of the last column was used at another time."""
    name = next(n for n in reversed(list(files_in(folder))) if "h%5b%" in n and n.endswith(".rows"))
    rows = sum(f.rows for f in read_manifest(folder).files() if f.name == name)
    data = bytearray((folder / name).read_bytes())
    data[8 * rows] ^= 3
    forge(folder, name, bytes(data))


def zeros_in_a_part(folder: Path) -> None:
    """What torch shards cannot be read any more."""
    name = next(n for n in files_in(folder) if n.endswith(".distcp"))
    forge(folder, name, bytes((folder / name).stat().st_size))


def swapped_parts(folder: Path) -> None:
    """Tensors that are in the place of others, of another shape."""
    metadata = pickle.loads((folder / "sharded/.metadata").read_bytes())
    (a, info), *others = metadata.storage_data.items()
    b, other = next((k, v) for k, v in others if v.length != info.length)
    swapped = metadata.storage_data | {a: other, b: info}
    forge(folder, "sharded/.metadata", pickle.dumps(dataclasses.replace(metadata, storage_data=swapped)))


def part_without_a_place(folder: Path) -> None:
    metadata = pickle.loads((folder / "sharded/.metadata").read_bytes())
    kept = dict(list(metadata.storage_data.items())[1:])
    forge(folder, "sharded/.metadata", pickle.dumps(dataclasses.replace(metadata, storage_data=kept)))


def collection(content: dict[str, Any], **changes: Any) -> None:
    content["collections"][0] |= changes


FORGERIES: dict[str, tuple[Forge, str]] = OF_OPTIMIZERS | {
    "no values by name": (own(lambda v: [v]), OWN),
    "nothing of the user's": (own(lambda v: v.pop("extra")), OWN),
    "no state of a generator": (own(lambda v: v.update(random={})), OWN),
    "half a state of a generator": (own(lambda v: v.update(random={k: s[:9] for k, s in v["random"].items()})), OWN),
    "another state of a generator": (
        own(lambda v: v.update(random={k: s * 0 + 9 for k, s in v["random"].items()})),
        OWN,
    ),
    "floats for a generator": (own(lambda v: v.update(random={k: s * 1.0 for k, s in v["random"].items()})), OWN),
    "generators that are none": (own(lambda v: v.update(random=torch.ones(3))), OWN),
    "rates that are none": (own(lambda v: v.update(rates=dict.fromkeys(v["rates"], "fast"))), OWN),
    "rates of nothing": (own(lambda v: v.update(rates=[0.1])), OWN),
    "steps below zero": (own(lambda v: v.update(steps=dict.fromkeys(v["steps"], -1))), OWN),
    "steps beyond all numbers": (own(lambda v: v.update(steps=dict.fromkeys(v["steps"], 2**70))), OWN),
    "steps that are none": (own(lambda v: v.update(steps=dict.fromkeys(v["steps"], "a"))), OWN),
    "no model": (dense(lambda v: v.pop("model")), "dense.pt"),
    "a model without names": (dense(lambda v: v.update(model=list(v["model"].values()))), "dense.pt"),
    "a sparse parameter": (
        dense(lambda v: a_model_tensor(v, lambda t: t.to_sparse())),
        "torch.sparse_coo in the snapshot",
    ),
    "a parameter that is a number": (dense(lambda v: a_model_tensor(v, lambda t: 3)), "dense.pt"),
    "initial rows that are none": (dense(lambda v: v.update(banks={"hashed": {"h": 1}})), "dense.pt"),
    "an order of nothing": (dense(lambda v: v.update(gradient_order={"": {"buckets": [["a"]]}})), "order of gradients"),
    "an order of numbers": (
        dense(lambda v: v.update(gradient_order={"": {"buckets": [[1]], "is_between": False, "with_gradient": []}})),
        "order of gradients",
    ),
    "another id in a column": (without_its_end, "do not have the same ids"),
    "another score in a column": (later_score, "do not have the same ids"),
    "parts of zeros": (zeros_in_a_part, "sharded is damaged or forged"),
    "parts in other places": (swapped_parts, "sharded is damaged or forged"),
    "a part without a place": (part_without_a_place, "sharded is damaged or forged"),
    "ranks without files": (lambda f: forge_manifest(f, lambda c: c.update(ranks=c["ranks"][1:])), "manifest.json"),
    "an ordinal below zero": (lambda f: forge_manifest(f, lambda c: collection(c, ordinal=-1)), "manifest.json"),
    "an ordinal beyond all": (lambda f: forge_manifest(f, lambda c: collection(c, ordinal=2**32)), "manifest.json"),
    "a step that is no number": (lambda f: forge_manifest(f, lambda c: c.update(step="3")), "manifest.json"),
    "steps that are no number": (
        lambda f: forge_manifest(f, lambda c: collection(c, batches_committed=1.5)),
        "manifest.json",
    ),
}


OF_SAME_W = ("no state of a generator", "half a state of a generator", "another state of a generator")
"""Generators go on where W is the same only: elsewhere their states are not put back."""


def with_adam(dmp: DistributedModelParallel, kind: str) -> Any:
    """Adam has no state before its first step: nothing that a saved one could be compared with."""
    rest = dict(in_backward_optimizer_filter(dmp.named_parameters()))
    if kind == "torch":
        return torch.optim.Adam(rest.values(), lr=0.1)
    return CombinedOptimizer([dmp.fused_optimizer, KeyedOptimizerWrapper(rest, lambda p: torch.optim.Adam(p, lr=0.1))])


def save_for_forgers(path: Path, kind: str, hashed: dict[str, str]) -> None:
    dmp, _ = build(hashed=hashed)
    optimizer = with_adam(dmp, kind)
    train(dmp, optimizer, range(3))
    checkpoint.save(path, dmp, optimizer, extra={"rank": dist.get_rank()})


def load_forged(path: Path, kind: str, hashed: dict[str, str], names: list[str]) -> dict[str, str]:
    """What is said of each copy of a snapshot; the model must stay as it is. Then the true one is loaded."""
    dmp, _ = build(hashed=hashed)
    train(dmp, with_adam(dmp, kind), range(1))
    optimizer, said = with_adam(dmp, kind), {}
    before = bits_of(dmp, optimizer)
    for name in names:
        try:
            checkpoint.load(path / name, dmp, optimizer)
            said[name] = "it was loaded"
        except HybridRecError as e:
            said[name] = f"{type(e).__name__}: {e}"
        after = bits_of(dmp, optimizer)
        changed = [key for key in before.keys() | after.keys() if before.get(key) != after.get(key)]
        if changed:
            said[name] += f" CHANGED {sorted(changed)[:3]}"
            break  # the rest would be compared with a model that is something else
    else:
        checkpoint.load(path / "true", dmp, optimizer)
        if bits_of(dmp, optimizer) == before:
            raise AssertionError("what is true was not loaded")
    return said


@pytest.mark.parametrize(
    ("before", "after", "kind", "names"),
    [(2, 2, "keyed", FORGERIES), (2, 1, "keyed", FORGERIES), (1, 1, "torch", OF_OPTIMIZERS)],
    ids=["two ranks", "two ranks on one", "an optimizer of torch"],
)
def test_what_is_forged_is_refused_before_anything_changes(
    pools: RankPools, tmp_path: Path, before: int, after: int, kind: str, names: dict[str, Any]
) -> None:
    hashed = CUT if before == 2 else {"h": "table_wise", "k": "row_wise"}
    pools[before].run(save_for_forgers, tmp_path / "saved", kind, hashed)
    (folder,) = (tmp_path / "saved").glob("step_*")
    folder.rename(tmp_path / "true")
    names = {n: v for n, v in names.items() if before == after or n not in OF_SAME_W}
    for name, (change, _) in names.items():
        shutil.copytree(tmp_path / "true", tmp_path / name)
        change(tmp_path / name)
    now = hashed if before == after else {"h": "table_wise", "k": "row_wise"}
    first, *others = pools[after].run(load_forged, tmp_path, kind, now, list(names))
    assert all(other == first for other in others)
    wrong = {n: first[n] for n, (_, words) in names.items() if n in first and not is_told(first[n], words)}
    assert len(first) == len(names) or wrong
    assert wrong == {}


def is_told(said: str, words: str) -> bool:
    return "Error: " in said and "CHANGED" not in said and any(word in said for word in words.split("|"))
