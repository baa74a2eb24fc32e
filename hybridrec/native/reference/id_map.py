"""`IdMap`: key -> row number and score, for one table.

A row number is in one of three conditions: *live* (its key is in the map), *reserved* (dropped by
``full_policy="evict"``, so that an undo can bring it back), or free. Numbers are given out freed ones first, the last
freed first, then ones that were never used, lowest first.
"""

from __future__ import annotations

from collections.abc import Iterator

MAX_ROWS = 2**32 - 1
"""Row numbers are uint32 and the highest means "none"."""


class IdMap:
    """Which key has which row. Keys are int64, every value is ordinary."""

    def __init__(self) -> None:
        self._row_of_key: dict[int, int] = {}
        self._freed: list[int] = []
        self.key_of_row: list[int] = []
        self.score_of_row: list[int] = []
        """Ordinal of the last batch that used the row."""

    def __len__(self) -> int:
        """Live rows."""
        return len(self._row_of_key)

    @property
    def num_numbers(self) -> int:
        """Row numbers that were ever given out."""
        return len(self.key_of_row)

    def find(self, key: int) -> int | None:
        """The row of a live key."""
        return self._row_of_key.get(key)

    def next_numbers(self, n: int) -> list[int]:
        """The row numbers that the next n inserts will get. Changes nothing."""
        freed = self._freed[: -n - 1 : -1]
        return freed + list(range(self.num_numbers, self.num_numbers + n - len(freed)))

    def insert(self, key: int, score: int) -> int:
        """Give a new key the next row number."""
        if self._freed:
            row = self._freed.pop()
            self.key_of_row[row], self.score_of_row[row] = key, score
        else:
            row = self.num_numbers
            self.key_of_row.append(key)
            self.score_of_row.append(score)
        self._row_of_key[key] = row
        return row

    def drop(self, row: int) -> None:
        """Live -> reserved."""
        del self._row_of_key[self.key_of_row[row]]

    def restore(self, row: int) -> None:
        """Reserved -> live, under the key and with the score that it had."""
        self._row_of_key[self.key_of_row[row]] = row

    def free(self, row: int) -> None:
        """Reserved -> free."""
        self._freed.append(row)

    def is_free(self, row: int) -> bool:
        """Whether a row number that was given out once is free again."""
        return row in self._freed

    def live_rows(self) -> Iterator[int]:
        """Row numbers of live keys, in no particular order."""
        return iter(self._row_of_key.values())
