"""`RemovalLog`: keys that left a table for good since a mark, for those who follow it by deltas."""

from __future__ import annotations


class RemovalLog:
    """Bounded: what does not fit is not dropped in silence, the log is lost as a whole."""

    def __init__(self, max_keys: int) -> None:
        self.host_bytes = 8 * max_keys
        """Taken at once; also of a lost log."""
        self.keys: list[int] = []
        self.is_whole = True
        """Whether there has been room."""
        self._max_keys = max_keys

    def add(self, key: int) -> None:
        """A key that no undo can bring back."""
        if len(self.keys) < self._max_keys:
            self.keys.append(key)
        else:
            self.is_whole = False
