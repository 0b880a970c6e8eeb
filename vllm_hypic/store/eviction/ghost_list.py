"""A bounded memory of accesses to objects that are not held; the oldest entries are forgotten first."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass


@dataclass(frozen=True)
class Ghost:
    """The time of an object's ``latest`` access, and of the access before, if remembered.

    ``open``: the latest access was a miss, and the object has not come yet.
    """

    latest: int
    before: int | None
    open: bool


class GhostList:
    """The last accesses of at most ``limit`` objects; each call that adds an access gives the limit."""

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
