"""The small files of a snapshot or delta: what is neither rows nor sharded tensors. Needs no model.

Nothing in them is run. Their hash tells that nobody altered them since, not that a writer of snapshots made them: what
they hold is looked at before anything is done with it.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hybridrec.backend import HOST
from hybridrec.errors import HybridRecError, StateError


def encoded(value: Any) -> memoryview:
    """Tensors and plain values as a file's contents."""
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getbuffer()


def read_dense(path: Path, *, mmap: bool = False) -> dict[str, Any]:
    """What all ranks have alike.

    Args:
        path: Of a file that was verified.
        mmap: Whether tensors stay on disk until they are used.

    Returns:
        ``model``: name -> tensor; ``optimizer``: see `contents.optimizer_state`, or None; ``banks``: collection ->
        table -> float32 [n, D]; ``gradient_order``: see `distributed.gradient_order.gradient_order`.

    Raises:
        StateError: It holds something else; names the file.
    """
    values = _values(path, ("model", "optimizer"), mmap)
    banks = values.setdefault("banks", {})
    _require(path, _is_dict(values["model"], _is_tensor), "what it has of the model are not tensors by name")
    is_optimizer = values["optimizer"] is None or _is_dict(values["optimizer"], lambda part: isinstance(part, dict))
    _require(path, is_optimizer, "what it has of the optimizer are not its parts by name")
    _require(
        path, _is_dict(banks, lambda tables: _is_dict(tables, _is_bank)), "its initial rows are not float32 [n, D]"
    )
    order = values.setdefault("gradient_order", {})
    _require(path, _is_dict(order, _is_order), "its order of gradients is not names of parameters by module")
    return values


def read_own(path: Path) -> dict[str, Any]:
    """What one rank has for itself.

    Args:
        path: Of a file that was verified.

    Returns:
        ``extra``: the user's; ``random``: type of a device -> state of its generator, uint8 [n]; ``rates``: sharded
        table -> learning rate; ``steps``: module -> steps of its optimizers.

    Raises:
        StateError: It holds something else; names the file.
    """
    values = _values(path, ("extra", "random", "rates"), mmap=False)
    steps = values.setdefault("steps", {})
    _require(path, _is_dict(values["random"], _is_random_state), "its states of generators are not uint8 [n] by device")
    _require(path, _is_dict(values["rates"], is_number), "its learning rates are not numbers by table")
    _require(path, _is_dict(steps, _is_step), "its steps of optimizers are not numbers by module")
    return values


@contextmanager
def describing(path: Path) -> Iterator[None]:
    """What is wrong inside with a file's contents is a `StateError` that names the file."""
    try:
        yield
    except HybridRecError:
        raise
    except Exception as e:  # what is forged raises about anything
        raise _forged(path, f"{type(e).__name__}: {e}") from e


def is_plain(value: Any) -> bool:
    """Whether it is a tensor of values in host memory, neither sparse nor quantized."""
    return _is_tensor(value) and value.layout == torch.strided and not value.is_quantized


def is_number(value: Any) -> bool:
    """A number, or a tensor of one."""
    if isinstance(value, Tensor):
        return is_plain(value) and value.numel() == 1
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_tensor(value: Any) -> bool:
    return type(value) is Tensor and value.device == HOST


def _is_random_state(value: Any) -> bool:
    return is_plain(value) and value.dtype == torch.uint8 and value.dim() == 1


def _is_step(value: Any) -> bool:
    return type(value) is int and 0 <= value < 2**63


def _is_bank(value: Any) -> bool:
    return is_plain(value) and value.dtype == torch.float32 and value.dim() == 2


def _is_order(value: Any) -> bool:
    if not isinstance(value, dict) or value.keys() != {"buckets", "is_between", "with_gradient"}:
        return False
    groups = [value["with_gradient"], *([] if value["buckets"] is None else [value["buckets"]])]
    if not all(isinstance(group, list) for group in groups):
        return False
    names = [value["with_gradient"], *(value["buckets"] or [])]
    return all(isinstance(one, list) and all(isinstance(name, str) for name in one) for one in names)


def _is_dict(value: Any, is_right: Callable[[Any], bool]) -> bool:
    return isinstance(value, dict) and all(isinstance(k, str) and is_right(v) for k, v in value.items())


def _values(path: Path, keys: tuple[str, ...], mmap: bool) -> dict[str, Any]:
    with describing(path):
        values = torch.load(path, map_location=HOST, weights_only=True, mmap=mmap)
    _require(path, isinstance(values, dict) and set(keys) <= values.keys(), f"it has no {sorted(keys)}")
    return dict(values)


def _require(path: Path, is_right: bool, problem: str) -> None:
    if not is_right:
        raise _forged(path, problem)


def _forged(path: Path, problem: str) -> StateError:
    return StateError(f"{path} is damaged or forged: {problem}. Load an older snapshot.")
