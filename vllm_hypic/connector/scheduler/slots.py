"""Slots of the public pool: places for the states of one record each."""

from __future__ import annotations

from ...pool.plans import Space
from .pages import Pages


class Slots:
    """Which slots are free, and the pages that the states of the others lie in, where they have no memory of
    their own: ``each`` of them takes so many of ``pages``."""

    def __init__(self, total: int, pages: Pages, each: int = 0) -> None:
        self.total, self._pages, self._each = total, pages, each
        self._free = list(range(total - 1, -1, -1))
        self._lies_in: dict[int, tuple[int, ...]] = {}
        self._taken: dict[int, tuple[int, ...]] = {}
        self._dropped: list[int] = []

    @property
    def free(self) -> int:
        """How many nobody has."""
        return len(self._free)

    @property
    def space(self) -> Space:
        """What one takes."""
        return Space(self._each, 1)

    def take(self) -> int:
        """A free one, for whose pages there is room."""
        slot = self._free.pop()
        if self._each:
            self._lies_in[slot] = self._taken[slot] = self._pages.take(self._each)
        return slot

    def leave(self, slot: int) -> None:
        """Free ``slot``, and the pages that the states of its record lay in."""
        self._free.append(slot)
        self._dropped.append(slot)
        self._pages.leave(reversed(self._lies_in.pop(slot, ())))
        self._taken.pop(slot, None)

    def take_news(self) -> tuple[list[int], dict[int, tuple[int, ...]]]:
        """Slots that were left since the last call, and those of all that were taken since, and are not left,
        whose states lie in pages, and in which."""
        news = self._dropped, self._taken
        self._dropped, self._taken = [], {}
        return news

    def check(self, used: list[int]) -> list[int]:
        """Raise ``RuntimeError`` unless exactly these are used, each once; the pages that they take."""
        if sorted([*used, *self._free]) != list(range(self.total)):
            raise RuntimeError("public pool: a slot is lost or owned twice")
        if self._each and sorted(self._lies_in) != sorted(used):
            raise RuntimeError("public pool: a slot's pages are lost")
        return [page for pages in self._lies_in.values() for page in pages]
