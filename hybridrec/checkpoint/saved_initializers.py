"""How a snapshot says what initial rows were made of. Needs no model."""

from __future__ import annotations

import ast
import functools
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from hybridrec.checkpoint.files import verify
from hybridrec.checkpoint.manifest import MANIFEST, FileEntry, read_manifest
from hybridrec.checkpoint.small_files import read_dense
from hybridrec.checkpoint.snapshot import latest, resolve
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


def saved_init_fn(
    path: str | Path,
    table: str,
    otherwise: Callable[[Tensor], Any] | None = None,
    *,
    collection: str | None = None,
) -> Callable[[Tensor], Any]:
    """An ``init_fn`` that gives the rows which that of a saved table gave, on any version of torch.

    What an ``init_fn`` draws may have other bits on another version of torch; `load` refuses the snapshot then. With
    this one in the table's config new ids begin as they did in the run that was saved.

    Args:
        path: A snapshot, or a folder of them: the newest.
        table: Its name.
        otherwise: What to use where ``path`` has no snapshot yet.
        collection: Path of its collection in the model; needed where two have a table of this name.

    Returns:
        For ``init_fn`` of the config of a table of this name, dim and seed.

    Raises:
        ConfigError: There is no such table, two collections have one, or it began without an ``init_fn``.
        StateError: There is no snapshot, and no ``otherwise``; or it is damaged: names the file.
    """
    if otherwise is not None and latest(path) is None and not (Path(path) / MANIFEST).is_file():
        return otherwise
    folder = resolve(path)
    banks = read_banks(folder, read_manifest(folder).dense)
    found = [of[table] for name, of in banks.items() if table in of and collection in (None, name)]
    if len(found) != 1:
        names = [(name, one) for name, of in banks.items() for one in of]
        what = "no table" if not found else f"{len(found)} tables"
        raise ConfigError(
            f"saved_init_fn: {folder} has {what} {table!r} with an init_fn. (collection, table) of those that it has: "
            f"{names}. Pass one of them; for others pass the initializer= that they had."
        )
    return functools.partial(_copy_of_bank, found[0].clone(), table)


def _copy_of_bank(bank_ND: Tensor, table: str, rows_ND: Tensor) -> Tensor:
    if rows_ND.shape != bank_ND.shape:
        raise ConfigError(
            f"saved_init_fn: table {table!r} was saved with {list(bank_ND.shape)} initial rows, {list(rows_ND.shape)} "
            "are wanted. Use it for a table of the same embedding_dim."
        )
    return rows_ND.copy_(bank_ND)


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
