"""Errors, by whose fault they are. Each message says where, what, what is accepted and what to do.

Every error states what remains: unless a docstring says otherwise, nothing changed when it is raised.
"""

from __future__ import annotations


class HybridRecError(Exception):
    """Base of every error that hybridrec raises on purpose."""


class ConfigError(HybridRecError, ValueError):
    """A configuration, an argument or a combination of them cannot be honoured. Raised at construction."""


class IdError(HybridRecError, ValueError):
    """A batch cannot be used: wrong dtype, lengths that do not match, a feature that is missing."""


class CapacityError(HybridRecError, RuntimeError):
    """A batch needs more rows, slots or host memory than there are. The batch is refused on all ranks."""


class BackendError(HybridRecError, RuntimeError):
    """A device, a process group or a library below hybridrec is missing or cannot do what is needed."""


class StateError(HybridRecError, RuntimeError):
    """A call came at a time at which it is not legal, such as a second backward through one lookup."""
