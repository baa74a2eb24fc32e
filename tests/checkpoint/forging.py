"""Snapshots that somebody changed who could hash them anew, and all of a model's state, bit for bit."""

from __future__ import annotations

import hashlib
import io
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torchrec.distributed.types import ShardedTensor

from hybridrec.checkpoint.manifest import MANIFEST, digest_of
from hybridrec.distributed.model_parts import dense_tensors, hashed_collections, sharded_modules


def forge_manifest(folder: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    """What a manifest says is changed, and hashed anew."""
    content = json.loads((folder / MANIFEST).read_bytes())
    del content["sha256"]
    change(content)
    (folder / MANIFEST).write_text(json.dumps(content | {"sha256": digest_of(content)}))


def forge(folder: Path, name: str, data: bytes) -> None:
    """Replace a file, and say so in the manifest: what everybody can do who can write there."""
    (folder / name).write_bytes(data)

    def tell(part: Any) -> None:
        if isinstance(part, dict) and part.get("name") == name and "sha256" in part:
            part |= {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
        for inside in part.values() if isinstance(part, dict) else part if isinstance(part, list) else ():
            tell(inside)

    forge_manifest(folder, tell)


def forge_values(folder: Path, name: str, change: Callable[[Any], Any]) -> None:
    """Change what a file of `torch.save` holds: in place, or by what ``change`` returns."""
    values = torch.load(folder / name, weights_only=True)
    found = change(values)
    buffer = io.BytesIO()
    torch.save(values if found is None else found, buffer)
    forge(folder, name, buffer.getvalue())


def bits_of(model: nn.Module, optimizer: Any) -> dict[str, Any]:
    """All that a snapshot has, as this rank has it now: name -> value, tensors as bytes."""
    found: dict[str, Any] = {"random": bits(torch.get_rng_state())}
    for path, module in hashed_collections(model).items():
        found |= flat(f"rows.{path}", module.state_dict())
        found[f"ordinal.{path}"] = module.lookup.log.group.ordinal, module.lookup.log.committed
        found[f"broken.{path}"] = module.lookup.log.broken
    for path, module in sharded_modules(model):
        found |= flat(f"sharded.{path}", module.state_dict())
    found |= flat("dense", dict(dense_tensors(model)))
    for part in (optimizer, *(inside for _, inside in getattr(optimizer, "optimizers", ()))):
        found |= flat(f"optimizer.{type(part).__name__}", part.state_dict())
        found |= flat(f"rates.{id(part)}", [[g["lr"], g.get("betas")] for g in part.param_groups])
    return found


def flat(name: str, value: Any) -> dict[str, Any]:
    """Everything in nested dicts and lists by its path."""
    if isinstance(value, dict):
        return {k: v for key, inside in value.items() for k, v in flat(f"{name}.{key}", inside).items()}
    if isinstance(value, list | tuple):
        return {k: v for i, inside in enumerate(value) for k, v in flat(f"{name}[{i}]", inside).items()}
    if isinstance(value, ShardedTensor):
        return {f"{name}{s.metadata.shard_offsets}": bits(s.tensor) for s in value.local_shards()}
    return {name: bits(value) if isinstance(value, Tensor) else value}


def bits(tensor: Tensor) -> tuple[str, tuple[int, ...], bytes]:
    data = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    return str(tensor.dtype), tuple(tensor.shape), data.numpy().tobytes()


def files_in(folder: Path) -> Iterator[str]:
    """Every file of a folder by its path in it, in order."""
    return (str(path.relative_to(folder)) for path in sorted(folder.rglob("*")) if path.is_file())
