"""Which records leave for others."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from ...pool.plans import Space
from .entries import Entry
from .pages import Pages


@dataclass
class Victims:
    """Records that are to be evicted for ``need``, and what is ``free`` without them."""

    need: Space
    free: Space
    entries: list[Entry] = field(default_factory=list)
    _left: Counter[int] = field(default_factory=Counter)
    """How many of them have each page."""

    @property
    def enough(self) -> bool:
        return self.free.covers(self.need)

    def choose(self, able: Iterable[Entry], pages: Pages) -> None:
        """Take of these, the first ones first, until there is enough.

        Passed by, unless all others are too little, are those that give nothing of what is short: where
        pages are, records whose pages others have, too.
        """
        passed = []
        for entry in able:
            if self.enough:
                return
            if not self._take(entry, pages, only_of_use=True):
                passed.append(entry)
        # Who was passed by may be of use once another has gone that had the same pages.
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
