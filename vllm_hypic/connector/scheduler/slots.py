"""Slots of the public pool: places for the states of one record each."""

from __future__ import annotations

from ...pool.plans import Space
from .pages import Pages


class Slots:
    """Tracks free slots, and the pages of used slots' states.  ``each``: the number of ``pages`` per slot; 0
    if states have a memory of their own."""

    def __init__(self, total: int, pages: Pages, each: int = 0) -> None:
        self.total, self._pages, self._each = total, pages, each
        self._free = list(range(total - 1, -1, -1))
        self._lies_in: dict[int, tuple[int, ...]] = {}
        self._taken: dict[int, tuple[int, ...]] = {}
        self._dropped: list[int] = []

    @property
    def free(self) -> int:
        """The number of free slots."""
        return len(self._free)

    @property
    def space(self) -> Space:
        """The space that one slot takes."""
        return Space(self._each, 1)

    def take(self) -> int:
        """Take and return a free slot.  The caller must have made room for the slot's pages."""
        slot = self._free.pop()
        if self._each:
            self._lies_in[slot] = self._taken[slot] = self._pages.take(self._each)
        return slot

    def leave(self, slot: int) -> None:
        """Free ``slot`` and the pages of its record's states."""
        self._free.append(slot)
        self._dropped.append(slot)
        self._pages.leave(reversed(self._lies_in.pop(slot, ())))
        self._taken.pop(slot, None)

    def take_news(self) -> tuple[list[int], dict[int, tuple[int, ...]]]:
        """Return the slots freed since the last call, and the state pages, by slot, of slots taken since and
        still in use.  The latter is empty if states have a memory of their own."""
        news = self._dropped, self._taken
        self._dropped, self._taken = [], {}
        return news

    def check(self, used: list[int]) -> list[int]:
        """Raise ``RuntimeError`` unless exactly these slots are used, each once; return their state pages."""
        if sorted([*used, *self._free]) != list(range(self.total)):
            raise RuntimeError("public pool: a slot is lost or owned twice")
        if self._each and sorted(self._lies_in) != sorted(used):
            raise RuntimeError("public pool: a used slot has no state pages, or a free slot has some")
        return [page for pages in self._lies_in.values() for page in pages]
