"""Space of the public pool: pages, slots, tenants' shares, and the choice of records to evict.

Several records may share a page: a checkpoint, and records resumed from it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from ...pool.plans import Space
from .entries import Entry


class Pages:
    """Tracks free pages, and the number of records that use each other page."""

    def __init__(self, total: int) -> None:
        self.total = total
        self._free = list(range(total - 1, -1, -1))
        self._users = [0] * total

    @property
    def free(self) -> int:
        """The number of free pages."""
        return len(self._free)

    def take(self, count: int) -> tuple[int, ...]:
        """Take ``count`` free pages, each with one user from now on, and return them."""
        taken = tuple(self._free.pop() for _ in range(count))
        self.use(taken)
        return taken

    def use(self, pages: Iterable[int]) -> None:
        """Count one more record as user of these pages."""
        for page in pages:
            self._users[page] += 1

    def leave(self, pages: Iterable[int]) -> None:
        """Count one record less as user of these pages, and free pages without users."""
        for page in pages:
            self._users[page] -= 1
            if not self._users[page]:
                self._free.append(page)

    def freed(self, pages: Iterable[int], left: Counter[int]) -> int:
        """Return how many of a record's ``pages`` become free when the record leaves.  ``left``: per page,
        the number of records that leave before."""
        return sum(left[page] + 1 == self._users[page] for page in pages)

    def check(self, used: Iterable[int]) -> None:
        """Raise ``RuntimeError`` unless exactly these pages are used, each as often as ``used`` names it."""
        users = Counter(used)
        if sorted([*users, *self._free]) != list(range(self.total)):
            raise RuntimeError("public pool: a page is lost, or both used and free")
        if any(count != users[page] for page, count in enumerate(self._users)):
            raise RuntimeError("public pool: a page's users are miscounted")


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


class TenantShares:
    """Counts the space of each tenant's held records.  A checkpoint counts as a part of its record, and of a
    growing record only its own pages count."""

    def __init__(self) -> None:
        self._held: dict[str, Space] = {}
        """Held space by tenant, without tenants that hold nothing."""

    def of(self, tenant: str) -> Space:
        return self._held.get(tenant, Space())

    def add(self, entry: Entry) -> None:
        """Add a record that is held from now on."""
        if not entry.is_checkpoint:
            self._held[entry.tenant] = self.of(entry.tenant) + entry.charged

    def remove(self, entry: Entry) -> None:
        """Subtract a record that is no longer held."""
        if entry.is_checkpoint:
            return
        left = self._held.pop(entry.tenant) - entry.charged
        if left.slots:  # every record has a slot
            self._held[entry.tenant] = left

    def lessen(self, entry: Entry, space: Space) -> None:
        """Subtract ``space`` that a held record no longer takes."""
        self._held[entry.tenant] -= space

    def check(self, entries: Iterable[Entry]) -> None:
        """Raise ``RuntimeError`` unless the counts are those of all ``entries``."""
        held: dict[str, Space] = {}
        for entry in entries:
            if entry.counted:
                held[entry.tenant] = held.get(entry.tenant, Space()) + entry.charged
        if held != self._held:
            raise RuntimeError("public pool: a tenant's share is miscounted")


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
