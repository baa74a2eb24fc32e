"""Which core serves: the compiled one, or the reference where it is missing.

``HYBRIDREC_CORE=reference`` or ``compiled`` forces one, for debugging.
"""

from __future__ import annotations

import functools
import importlib
import logging
import os
from types import ModuleType
from typing import Literal, get_args

from hybridrec.errors import BackendError, ConfigError

logger = logging.getLogger("hybridrec")

CoreName = Literal["compiled", "reference"]
ENVIRONMENT_VARIABLE = "HYBRIDREC_CORE"


@functools.cache
def compiled_core() -> ModuleType | None:
    """The module `hybridrec._native`; None if it was not built.

    Raises:
        BackendError: It was built, but cannot be loaded here.
    """
    try:
        return importlib.import_module("hybridrec._native")
    except ModuleNotFoundError as e:
        if e.name != "hybridrec._native":
            raise
        return None
    except ImportError as e:
        raise BackendError(
            f"hybridrec._native was built but cannot be loaded: {e}. Reinstall hybridrec on this machine, or set "
            f"{ENVIRONMENT_VARIABLE}=reference to go on without it, slower."
        ) from e


def require_compiled_core() -> ModuleType:
    """The module `hybridrec._native`.

    Raises:
        BackendError: It was not built.
    """
    module = compiled_core()
    if module is None:
        raise BackendError(
            "the C++ core hybridrec._native was not built. Install a C++20 compiler and reinstall hybridrec, or set "
            f"{ENVIRONMENT_VARIABLE}=reference to go on without it, slower."
        )
    return module


def has_compiled_core() -> bool:
    """Whether the C++ core was built. Not whether it serves: see `core_description`."""
    return compiled_core() is not None


@functools.cache
def serving_core() -> CoreName:
    """The core that serves this process; decided at the first call.

    Raises:
        ConfigError: The environment variable names no core.
        BackendError: It names the compiled core, which is missing.
    """
    forced = os.environ.get(ENVIRONMENT_VARIABLE, "")
    if forced not in ("", *get_args(CoreName)):
        raise ConfigError(f"{ENVIRONMENT_VARIABLE}={forced!r}: there is no such core. Use 'compiled' or 'reference'.")
    if forced == "reference":
        return "reference"
    if forced == "compiled" or has_compiled_core():
        require_compiled_core()
        return "compiled"
    logger.warning(
        "The C++ core of hybridrec is not built: its numpy reference serves. Results are the same bit for bit, tables "
        "are much slower. Install a C++20 compiler (Debian, Ubuntu: build-essential) and reinstall hybridrec."
    )
    return "reference"


def core_description() -> str:
    """What serves, for logs and benchmark headers."""
    return "compiled core" if serving_core() == "compiled" else "numpy reference core"
