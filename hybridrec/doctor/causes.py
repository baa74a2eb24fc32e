"""Why an import fails, in one sentence, and what to do about it: libraries that are missing or too new."""

from __future__ import annotations

import re
from dataclasses import dataclass

AUTOLOAD_VARIABLE = "TORCH_DEVICE_BACKEND_AUTOLOAD"
"""torch imports the extensions of devices by itself unless this is 0."""
_AUTOLOAD = re.compile(r"Failed to load the backend extension: (\w+)")
_MISSING_LIBRARY = re.compile(r"(lib[\w.+-]+?\.so[.\d]*): cannot open shared object file")
_UNDEFINED = re.compile(r"undefined symbol|undefined reference|version `[^']+' not found")
_TOOLKITS = {
    r"libhccl|libascend|libacl|libge_|libgraph|libruntime|libop_plugin|libmsprofiler|libplatform": (
        "CANN",
        "Source set_env.sh of the CANN toolkit in this shell (install CANN 9.1 if there is none)",
    ),
    r"libcuda\.so|libnvidia-ml": (
        "the driver of the GPU",
        "Install the GPU's driver, so that nvidia-smi lists it (in a container, start it with the GPU)",
    ),
}
"""First letters of a library -> whose it is, and how it gets there."""


@dataclass(frozen=True, kw_only=True)
class Cause:
    """One sentence each."""

    problem: str
    remedy: str
    is_autoload: bool
    """Whether it was torch itself that tried: then ``import torch`` works with `AUTOLOAD_VARIABLE` 0."""


def cause_of(error: BaseException, *, install_hint: str) -> Cause | None:
    """What stands behind an exception of an import; None if that is not known.

    Args:
        error: With the exceptions that caused it.
        install_hint: How to install a whole stack.
    """
    text = " ".join(_chain(error))
    autoload = _AUTOLOAD.search(text)
    who = autoload[1] if autoload else "an installed library"
    without = f", or export {AUTOLOAD_VARIABLE}=0 to train without {who}" if autoload else ""
    missing = _MISSING_LIBRARY.search(text)
    if missing:
        for pattern, (owner, how) in _TOOLKITS.items():
            if re.match(pattern, missing[1]):
                problem = f"{who} needs {missing[1]} of {owner}, which is not found in this shell."
                return Cause(problem=problem, remedy=f"{how}{without}.", is_autoload=autoload is not None)
    if _UNDEFINED.search(text):
        problem = f"{who} was compiled for another version of torch than the one that is installed."
        remedy = f"{install_hint.rstrip('.')}{without}."
        return Cause(problem=problem, remedy=remedy, is_autoload=autoload is not None)
    if autoload:
        problem = f"{who} cannot be imported: {_chain(error)[-1].splitlines()[0]}"
        remedy = f"Mend what it names{without}."
        return Cause(problem=problem, remedy=remedy, is_autoload=True)
    return None


def _chain(error: BaseException) -> list[str]:
    """Texts of an exception and of those that caused it, the first cause last."""
    texts: list[str] = []
    current: BaseException | None = error
    while current is not None and len(texts) < 8:
        texts.append(str(current) or repr(current))
        current = current.__cause__ or current.__context__
    return texts
