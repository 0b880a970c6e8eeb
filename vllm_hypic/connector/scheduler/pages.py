"""Pages of the public pool.  Several records may share a page: a checkpoint, and records resumed from it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable


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
