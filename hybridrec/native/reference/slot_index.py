"""`SlotIndex`: which row is in which slot, for one table; pins, dirty flags and the order of last use.

Free slots are given out freed ones first, the last freed first, then ones that were never used, lowest first.
Victims are unpinned slots, the least recently used first: (number of the plan that used it last, order of use within
that plan).
"""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass


@dataclass
class Slot:
    """One slot of the device tier."""

    row: int = -1
    """-1: free."""
    pins: int = 0
    """Batches in flight that use it."""
    is_dirty: bool = False
    """The store's copy, if any, is stale."""
    last_use: tuple[int, int] = (0, 0)
    """(number of the plan, order of first occurrence within that batch)."""


class SlotIndex:
    """The slots of one table. Residency only: it never touches a value."""

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        """C."""
        self._slots: list[Slot] = []
        self._freed: list[int] = []
        self._slot_of_row: dict[int, int] = {}

    def __len__(self) -> int:
        """Rows that are in a slot."""
        return len(self._slot_of_row)

    def __getitem__(self, slot: int) -> Slot:
        return self._slots[slot]

    def slot_of(self, row: int) -> int:
        """-1: the row is in no slot."""
        return self._slot_of_row.get(row, -1)

    @property
    def pins(self) -> int:
        """Sum of the pins."""
        return sum(slot.pins for slot in self._slots)

    @property
    def num_pinned(self) -> int:
        """Slots with at least one pin."""
        return sum(slot.pins > 0 for slot in self._slots)

    def next_free(self, n: int) -> list[int]:
        """Up to n free slots, in the order in which `take` must be called. Changes nothing."""
        freed = self._freed[: -n - 1 : -1]
        used = len(self._slots)
        return freed + list(range(used, min(used + n - len(freed), self.num_slots)))

    def next_victims(self, n: int, in_use: Set[int]) -> list[int]:
        """Up to n slots that may be taken from their rows, best victim first. Changes nothing.

        Args:
            n: Wanted.
            in_use: Slots that the asking batch uses itself.
        """
        if n == 0:
            return []
        candidates = (s for s, slot in enumerate(self._slots) if slot.row >= 0 and not slot.pins and s not in in_use)
        return sorted(candidates, key=lambda s: self._slots[s].last_use)[:n]

    def take(self, slot: int, row: int) -> None:
        """Put a row into a free slot. The row's value is still to come."""
        if slot == len(self._slots):
            self._slots.append(Slot())
        elif self._freed and self._freed[-1] == slot:
            self._freed.pop()
        self._slots[slot].row, self._slots[slot].is_dirty = row, False
        self._slot_of_row[row] = slot

    def leave(self, slot: int) -> None:
        """Take the row out of a slot that another row will `take` at once."""
        del self._slot_of_row[self._slots[slot].row]
        self._slots[slot].row = -1

    def free(self, slot: int) -> None:
        """Take the row out of a slot and make the slot free."""
        self.leave(slot)
        self._slots[slot].is_dirty = False
        self._freed.append(slot)

    def dirty_slots(self) -> list[int]:
        """Slots whose row is newer than the store's copy."""
        return [s for s, slot in enumerate(self._slots) if slot.row >= 0 and slot.is_dirty]
