"""Who registered the kernels of FBGEMM's operators, as torch's dispatcher tells it.

The dispatcher's dump is text for people and promised by nobody. If its form moved, `registrations` fails by name.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass
from typing import Any

import torch

from hybridrec.errors import BackendError

_NAMESPACES = ("fbgemm::", "fb::")
_LINE = re.compile(r"^(?P<key>\w+)(\[alias\])?(?P<old> \(inactive\))?: registered at (?P<source>.*?):\d+ ::", re.M)
_SCHEMA = re.compile(r"^debug: registered at (?P<source>.*?):\d+", re.M)
_ROOT = re.compile(r"^.*?/fbgemm_gpu/")


@dataclass(frozen=True, kw_only=True)
class Registration:
    """One kernel of one operator."""

    operator: str
    key: str
    """Dispatch key: a device, Autograd, Meta."""
    source: str
    """File that registered it, on the machine that built it; of Python code, on this one."""
    is_foreign: bool
    """Whether that file belongs neither to FBGEMM nor to torch."""
    replaces: str
    """Source of the kernel for the same key that was there before; empty if there was none."""


def registrations() -> list[Registration]:
    """All kernels of FBGEMM's operators that are in force. FBGEMM must be imported.

    Raises:
        BackendError: torch's dispatcher does not tell them in the form that is known.
    """
    dispatcher: Any = torch._C
    try:
        names = [n for n in dispatcher._dispatch_get_all_op_names() if n.startswith(_NAMESPACES)]
        dumps = {name: dispatcher._dispatch_dump(name) for name in names}
    except AttributeError as e:
        raise BackendError(f"torch {torch.__version__}: {e}; hybridrec cannot see who registered operators.") from e
    defined = {name: match["source"] for name, text in dumps.items() if (match := _SCHEMA.search(text))}
    if not defined:
        raise BackendError(f"torch {torch.__version__}: no operator of FBGEMM is registered, or none says by whom.")
    roots = Counter(match[0] for source in defined.values() if (match := _ROOT.match(source)))
    ours = [root for root, _ in roots.most_common(1)]
    found = []
    for name, text in dumps.items():
        lines = list(_LINE.finditer(text))
        old = {line["key"]: line["source"] for line in reversed(lines) if line["old"]}
        for line in lines:
            if not line["old"]:
                source = line["source"]
                is_foreign = not (source.startswith(tuple(ours)) or "/fbgemm_gpu/" in source or _is_torchs(source))
                found.append(
                    Registration(
                        operator=name,
                        key=line["key"],
                        source=source,
                        is_foreign=is_foreign,
                        replaces=old.get(line["key"], ""),
                    )
                )
    return found


def _is_torchs(source: str) -> bool:
    """Torch's own files, its Python ones (FBGEMM's fake kernels are registered through them) or compiled ones."""
    return source.startswith(tuple(torch.__path__)) or "/aten/src/" in source or "/torch/csrc/" in source


def loaded_libraries() -> list[str]:
    """Libraries that were loaded to register operators, FBGEMM's and torch's own left out."""
    known = ("/fbgemm_gpu/", "/torch/", "/torchrec/")
    return sorted(path for path in torch.ops.loaded_libraries if not any(part in path for part in known))
