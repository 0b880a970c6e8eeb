"""The choice of records to evict from the pool."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from ...pool.plans import Space
from .entries import Entry
from .pages import Pages


@dataclass
class Victims:
    """Collects records to evict for ``need``; ``free``: the free space without these records."""

    need: Space
    free: Space
    entries: list[Entry] = field(default_factory=list)
    _left: Counter[int] = field(default_factory=Counter)
    """Number of collected records that have each page."""

    @property
    def enough(self) -> bool:
        return self.free.covers(self.need)

    def choose(self, able: Iterable[Entry], pages: Pages) -> None:
        """Collect records of ``able``, the first ones first, until enough space is free.

        Records that free nothing of the lacking kind of space come last; for example, if pages lack, records
        that share all their pages.
        """
        passed = []
        for entry in able:
            if self.enough:
                return
            if not self._take(entry, pages, only_of_use=True):
                passed.append(entry)
        # A passed record may free pages once another record with the same pages is collected.
        for only_of_use in (True, False):
            passed = [e for e in passed if not self._take(e, pages, only_of_use=only_of_use)]

    def _take(self, entry: Entry, pages: Pages, *, only_of_use: bool) -> bool:
        if self.enough:
            return False
        shared = len(entry.pages) - pages.freed(entry.pages, self._left)
        gain = entry.space - Space(shared)
        if only_of_use and not (self.need - self.free).shares(gain):
            return False
        self._left.update(entry.pages)
        self.free += gain
        self.entries.append(entry)
        return True
