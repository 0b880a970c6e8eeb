"""The interface of eviction policies: bookkeeping only, no bytes, no clock but the order of calls."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

from ..cache_value import CacheValue


class EvictionPolicy(Protocol):
    """Says which objects should go first.  Not thread-safe: its owner locks.  Keys are any strings."""

    def added(self, key: str, value: CacheValue) -> None:
        """The object is held from now on; counts as its use.  A key that is held: its value changes."""

    def resized(self, key: str, value: CacheValue) -> None:
        """The object's value is another from now on; no use of it.  Unknown keys are ignored."""

    def hit(self, key: str) -> None:
        """The object was used.  Unknown keys are ignored."""

    def removed(self, key: str, *, evicted: bool) -> None:
        """The object is gone: ``evicted`` for want of room, or else deleted, expired, lost."""

    def missed(self, key: str, value: CacheValue) -> None:
        """The object was asked for and not there; told before ``admits`` and ``added`` of the same asking.

        For policies that learn from what they lost: an object refused now may be let in next time.
        """

    def worst_first(self) -> Iterator[str]:
        """All held keys, in the order of eviction.  Changes nothing.

        ``RuntimeError`` when the policy is changed before the walk ends: collect victims, then remove them.
        """

    def admits(self, key: str, value: CacheValue, victims: list[str]) -> bool:
        """Whether the object deserves the place of ``victims`` (none: there is room).  Changes nothing."""
