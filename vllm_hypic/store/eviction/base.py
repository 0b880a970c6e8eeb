"""The interface of eviction policies: bookkeeping only, without bytes; the order of calls is the clock."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

from ..cache_value import CacheValue


class EvictionPolicy(Protocol):
    """Decides which objects leave first.  Not thread-safe: its owner locks.  Keys are any strings."""

    def added(self, key: str, value: CacheValue) -> None:
        """Add the object, or change the value of a held object.  Both count as a use."""

    def resized(self, key: str, value: CacheValue) -> None:
        """Change the object's value; this is no use of the object.  Unknown keys are ignored."""

    def hit(self, key: str) -> None:
        """Note a use of the object.  Unknown keys are ignored."""

    def removed(self, key: str, *, evicted: bool) -> None:
        """Forget the object: ``evicted`` for want of room, or else deleted, expired or lost."""

    def missed(self, key: str, value: CacheValue) -> None:
        """Note a miss: an absent object was requested.  The owner calls this before ``admits`` and ``added``.

        A policy may learn from misses: an object that is refused now may be admitted next time.
        """

    def worst_first(self) -> Iterator[str]:
        """Yield all held keys in the order of eviction.  Changes nothing.

        Raises ``RuntimeError`` when the policy changes before the walk ends: collect all victims first.
        """

    def admits(self, key: str, value: CacheValue, victims: list[str]) -> bool:
        """Return whether the object deserves the place of ``victims`` (none: free room).  Changes nothing."""
