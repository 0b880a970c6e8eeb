"""Pages of the public pool.  Several records may have one: those that were resumed, and their checkpoint."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable


class Pages:
    """Which pages are free, and how many records have each of the others."""

    def __init__(self, total: int) -> None:
        self.total = total
        self._free = list(range(total - 1, -1, -1))
        self._users = [0] * total

    @property
    def free(self) -> int:
        """How many pages nobody has."""
        return len(self._free)

    def take(self, count: int) -> tuple[int, ...]:
        """So many free pages, which have one user now."""
        taken = tuple(self._free.pop() for _ in range(count))
        self.use(taken)
        return taken

    def use(self, pages: Iterable[int]) -> None:
        """One more record has these."""
        for page in pages:
            self._users[page] += 1

    def leave(self, pages: Iterable[int]) -> None:
        """One record less has these."""
        for page in pages:
            self._users[page] -= 1
            if not self._users[page]:
                self._free.append(page)

    def freed(self, pages: Iterable[int], left: Counter[int]) -> int:
        """How many become free with a record that has ``pages``, after others have left theirs, which
        ``left`` counts."""
        return sum(left[page] + 1 == self._users[page] for page in pages)

    def check(self, used: Iterable[int]) -> None:
        """Raise ``RuntimeError`` unless exactly these are used, each so often as it is named."""
        users = Counter(used)
        if sorted([*users, *self._free]) != list(range(self.total)):
            raise RuntimeError("public pool: a page is lost, or used and free")
        if any(count != users[page] for page, count in enumerate(self._users)):
            raise RuntimeError("public pool: a page's users are miscounted")
