"""A policy with recency and cache value in one score, after Marconi (arXiv 2411.19379)."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from ..protocol import CacheValue
from .ranking import Ranking, grade

Admission = Literal["cache-value", "always"]
ALPHA = 1.0
"""Weight of cache value against recency: see :mod:`.ranking`."""
PATIENCE = 1000
"""A number of accesses.  :meth:`FlopAwarePolicy.admits` assumes at most this number since a newcomer's last
access, and exactly this number if no earlier access is known.  A larger value admits fewer objects."""
LEAST_GHOSTS = 4096
GHOSTS_PER_HELD = 8


@dataclass(frozen=True)
class Ghost:
    """The time of an object's ``latest`` access, and of the access before, if remembered.

    ``open``: the latest access was a miss, and the object has not come yet.
    """

    latest: int
    before: int | None
    open: bool


class GhostList:
    """The last accesses of at most ``limit`` objects that are not held; the oldest are forgotten first.

    Each call that adds an access gives the limit.
    """

    def __init__(self) -> None:
        self._seen: OrderedDict[str, Ghost] = OrderedDict()

    def __len__(self) -> int:
        return len(self._seen)

    def get(self, key: str) -> Ghost | None:
        return self._seen.get(key)

    def missed(self, key: str, now: int, limit: int) -> None:
        """Note a miss of the object at time ``now``; beyond ``limit`` names, forget the oldest."""
        old = self._seen.pop(key, None)
        self._keep(key, Ghost(now, old.latest if old else None, open=True), limit)

    def evicted(self, key: str, used: int, limit: int) -> None:
        """Note that the object has left, and that its last use was at time ``used``."""
        self._keep(key, Ghost(used, None, open=False), limit)

    def forget(self, key: str) -> None:
        self._seen.pop(key, None)

    def _keep(self, key: str, ghost: Ghost, limit: int) -> None:
        self._seen[key] = ghost
        while len(self._seen) > limit:
            self._seen.popitem(last=False)


class FlopAwarePolicy:
    """Evicts by the score of :mod:`.ranking`; admits an object that should save more than its victims.

    The expected saving of an object is its FLOPs over the time since its last access.  The last access of a
    newcomer is the access before the current miss.  ``admission`` "always" admits every object.

    Time is the number of accesses and additions so far: no two uses are at the same time.
    """

    def __init__(
        self, admission: Admission = "cache-value", alpha: float = ALPHA, patience: float = PATIENCE
    ) -> None:
        self._admission, self._alpha, self._patience = admission, alpha, patience
        self._ranking = Ranking()
        self._values: dict[str, CacheValue] = {}
        self._ghosts = GhostList()
        self._now = 0

    def added(self, key: str, value: CacheValue) -> None:
        self._ghosts.forget(key)
        if key in self._values:
            self.resized(key, value)
            self.hit(key)
            return
        self._values[key] = value
        self._now += 1
        self._ranking.put(key, grade(value), self._now)

    def resized(self, key: str, value: CacheValue) -> None:
        if key in self._values:
            self._values[key] = value
            self._ranking.regrade(key, grade(value))

    def hit(self, key: str) -> None:
        if key in self._values:
            self._now += 1
            self._ranking.touch(key, self._now)

    def removed(self, key: str, *, evicted: bool) -> None:
        if self._values.pop(key, None) is None:
            return
        if evicted:
            self._ghosts.evicted(key, self._ranking.used(key), self._ghosts_limit())
        self._ranking.drop(key)

    def missed(self, key: str, value: CacheValue) -> None:
        self._now += 1
        self._ghosts.missed(key, self._now, self._ghosts_limit())

    def worst_first(self) -> Iterator[str]:
        return self._ranking.worst_first(self._now, self._alpha)

    def admits(self, key: str, value: CacheValue, victims: list[str]) -> bool:
        seen = self._ghosts.get(key)
        # Without a recorded miss, the owner does not report misses: nothing is known of the newcomer.
        if not victims or self._admission == "always" or seen is None:
            return True
        last = seen.before if seen.open else seen.latest
        age = self._patience if last is None else min(self._patience, self._age(last))
        lost = sum(self._values[v].flops / self._age(self._ranking.used(v)) for v in victims)
        return value.flops >= lost * age

    def _age(self, time: int) -> int:
        return max(1, self._now - time)

    def _ghosts_limit(self) -> int:
        return max(LEAST_GHOSTS, GHOSTS_PER_HELD * len(self._values))
