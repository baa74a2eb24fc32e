"""Step 6: quantised tables, and a file that is served with torch alone."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import torch
import torch.ao.quantization as quant
from torch import nn
from torchrec import EmbeddingBagCollection
from torchrec.fx import Tracer
from torchrec.modules.embedding_configs import QuantConfig
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.quant import EmbeddingBagCollection as QuantEmbeddingBagCollection

from examples.torchrec_tutorial import twins
from examples.torchrec_tutorial.tell import close, holds, same, say, title
from hybridrec import HashEmbeddingBagCollection
from hybridrec.inference import QuantHashEmbeddingBagCollection, freeze, load

SERVE = """
import sys, torch
tables, batch = torch.jit.load(sys.argv[1]), torch.load(sys.argv[2])
torch.save(tables(batch["values"], batch["lengths"]), sys.argv[3])
assert not {"hybridrec", "torchrec", "fbgemm_gpu"} & set(sys.modules)
"""
"""The whole server."""


def run(folder: Path) -> None:
    """Quantise, freeze, script, save, load.

    Args:
        folder: This rank's own.
    """
    title(6, "Quantised inference")
    ours, theirs = trained()
    quantised(ours, theirs)
    frozen_on_disk(ours, folder)
    served(ours, folder)


def trained() -> tuple[HashEmbeddingBagCollection, EmbeddingBagCollection]:
    """Both collections after a few batches."""
    ours, theirs = twins.hashed_bags(), twins.plain_bags()
    for collection in (ours, theirs):
        apply_optimizer_in_backward(torch.optim.SGD, collection.parameters(), {"lr": 0.1})
    for step in range(10):
        features = twins.batch(step)
        ours(features).values().square().sum().backward()
        theirs(twins.numbered(features)).values().square().sum().backward()
    return ours.eval(), theirs.eval()


def quantised(ours: HashEmbeddingBagCollection, theirs: EmbeddingBagCollection) -> None:
    """TorchRec's way, `quantize_dynamic`."""
    say("quantize_dynamic to 8 bits, of TorchRec's collection and of ours:")
    config = QuantConfig(
        activation=quant.PlaceholderObserver.with_args(dtype=torch.float),
        weight=quant.PlaceholderObserver.with_args(dtype=torch.qint8),
    )
    mapping: dict[type, type] = {
        EmbeddingBagCollection: QuantEmbeddingBagCollection,
        HashEmbeddingBagCollection: QuantHashEmbeddingBagCollection,
    }
    spec = {cls: config for cls in mapping}
    small = quant.quantize_dynamic(nn.ModuleDict({"ours": ours, "theirs": theirs}), spec, mapping=mapping)
    say(small["ours"].report)
    features = twins.all_ids()
    pools, expected = small["ours"](features), small["theirs"](twins.numbered(features))
    step = 2 * max(table.max_abs_error for table in small["ours"].report.tables)
    close("every row in 8 bits, beside TorchRec's", pools.values(), expected.values(), tolerance=step)
    close("every row in 8 bits, beside float32", pools.values(), ours(features).values(), tolerance=step)


def frozen_on_disk(ours: HashEmbeddingBagCollection, folder: Path) -> None:
    """Ours besides: `freeze` writes chunk by chunk, `load` maps the files."""
    say("\nfreeze(collection, path) and load(path): of tables that may be larger than the memory that is left.")
    freeze(ours, folder / "frozen", dtype="fp32")
    features = twins.batch(20)
    same("pools of what was loaded, in float32", load(folder / "frozen")(features).values(), ours(features).values())


def served(ours: HashEmbeddingBagCollection, folder: Path) -> None:
    """Traced, scripted, saved, and loaded by a process that has neither hybridrec nor TorchRec."""
    frozen = freeze(ours, dtype="int8")
    features = twins.batch(21)
    want = frozen(features).values()
    traced = torch.fx.GraphModule(frozen, Tracer().trace(frozen))
    same(
        "pools of the graph that torchrec.fx.Tracer and torch.jit.script make",
        torch.jit.script(traced)(features).values(),
        want,
    )
    files = [str(folder / name) for name in ("tables.pt", "batch.pt", "pools.pt")]
    torch.jit.script(frozen.tables).save(files[0])
    torch.save({"values": features.values(), "lengths": features.lengths()}, files[1])
    subprocess.run([sys.executable, "-c", SERVE, *files], check=True)
    same("pools of a process that imports torch alone", torch.load(files[2]), want)
    unknown = twins.KeyedJaggedTensor(
        keys=list(twins.FEATURES), values=torch.tensor([5, 6]), lengths=torch.ones(2).long()
    )
    expected = [
        ours.embedding_bags[twins.table_of(f)].read(torch.tensor([i]))
        for f, i in zip(twins.FEATURES, (5, 6), strict=True)
    ]
    same("an id that was never trained reads its initial row", frozen(unknown).values(), torch.cat(expected, 1))
    holds("the ids, not row numbers, are what is served", bool((features.values() < 0).any()))
