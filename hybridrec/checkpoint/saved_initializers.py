"""How a snapshot says what initial rows were made of. Needs no model."""

from __future__ import annotations

import ast
from collections.abc import Mapping
from pathlib import Path

from torch import Tensor

from hybridrec.checkpoint.files import verify
from hybridrec.checkpoint.manifest import FileEntry
from hybridrec.checkpoint.small_files import read_dense
from hybridrec.errors import ConfigError
from hybridrec.store.initializer import Bank, Constant, Normal, Uniform

_KINDS = {kind.__name__: kind for kind in (Uniform, Normal, Constant)}
Banks = Mapping[str, Mapping[str, Tensor]]
"""Collection -> table -> float32 [n, D]: initial rows to choose from, of tables that have an ``init_fn``."""


def needs_bank(text: str) -> bool:
    """Whether an initializer of a manifest is a `Bank`: it has a digest there, and its rows elsewhere."""
    return text.startswith(f"{Bank.__name__}(")


def read_banks(folder: Path, dense: FileEntry) -> Banks:
    """Those of a snapshot.

    Args:
        folder: Of the snapshot.
        dense: The file that holds them.

    Raises:
        StateError: The file is missing, cut, altered or something else; names it.
    """
    verify(folder, dense)
    banks: Banks = read_dense(folder / dense.name, mmap=True)["banks"]
    return banks


def initializer_of(text: str, bank_ND: Tensor | None, table: str, remedy: str) -> Uniform | Normal | Constant | Bank:
    """What ``"Uniform(low=-0.1, high=0.1)"`` stands for; nothing is run.

    Args:
        text: An initializer's ``repr``, which is what a manifest holds.
        bank_ND: float32 [n, D]: what `read_banks` has of the table; None: nothing.
        table: Its name, for the message.
        remedy: What to do, for the message.

    Raises:
        ConfigError: It is of no known kind, or the rows of a bank are missing.
    """
    if needs_bank(text):
        if bank_ND is None:
            raise ConfigError(f"table {table!r} has an init_fn, whose rows the snapshot does not have. {remedy}")
        return Bank(bank_ND.numpy())
    try:
        call = ast.parse(text, mode="eval").body
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and call.func.id in _KINDS and not call.args:
            return _KINDS[call.func.id](**{str(k.arg): ast.literal_eval(k.value) for k in call.keywords})
    except (SyntaxError, ValueError, TypeError):
        pass
    raise ConfigError(f"table {table!r}: initial rows {text!r} are not known to this version. {remedy}")
