"""A bounded memory of when objects that are not held were asked for: the oldest are forgotten."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass


@dataclass(frozen=True)
class Ghost:
    """The ``latest`` time of asking, and the one before, if remembered.

    ``open``: the latest asking was a miss whose object has not come yet.
    """

    latest: int
    before: int | None
    open: bool


class GhostList:
    """At most ``limit`` names, but never fewer than the owner's ``at_least``."""

    def __init__(self) -> None:
        self._seen: OrderedDict[str, Ghost] = OrderedDict()

    def __len__(self) -> int:
        return len(self._seen)

    def get(self, key: str) -> Ghost | None:
        return self._seen.get(key)

    def missed(self, key: str, now: int, limit: int) -> None:
        """The object was asked for and is not there; beyond ``limit`` names the oldest is forgotten."""
        old = self._seen.pop(key, None)
        self._keep(key, Ghost(now, old.latest if old else None, open=True), limit)

    def evicted(self, key: str, used: int, limit: int) -> None:
        """The object was held until now, and last used at ``used``."""
        self._keep(key, Ghost(used, None, open=False), limit)

    def forget(self, key: str) -> None:
        self._seen.pop(key, None)

    def _keep(self, key: str, ghost: Ghost, limit: int) -> None:
        self._seen[key] = ghost
        while len(self._seen) > limit:
            self._seen.popitem(last=False)
