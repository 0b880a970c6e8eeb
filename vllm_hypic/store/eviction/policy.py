"""Eviction policies: their interface, the policy LRU, and policies by name.

Policies only keep books, without bytes; the order of calls is the clock.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from typing import Literal, Protocol, get_args

from ..protocol import CacheValue
from .flop_aware import Admission, FlopAwarePolicy


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


class LruPolicy:
    """Evicts the object with the oldest last use."""

    def __init__(self) -> None:
        self._held: OrderedDict[str, None] = OrderedDict()  # least recently used first

    def added(self, key: str, value: CacheValue) -> None:
        self._held[key] = None
        self._held.move_to_end(key)

    def resized(self, key: str, value: CacheValue) -> None:
        pass

    def hit(self, key: str) -> None:
        if key in self._held:
            self._held.move_to_end(key)

    def removed(self, key: str, *, evicted: bool) -> None:
        self._held.pop(key, None)

    def missed(self, key: str, value: CacheValue) -> None:
        pass

    def worst_first(self) -> Iterator[str]:
        return iter(self._held)

    def admits(self, key: str, value: CacheValue, victims: list[str]) -> bool:
        return True


PolicyName = Literal["lru", "flop-aware"]


def make_policy(name: PolicyName, admission: Admission = "cache-value") -> EvictionPolicy:
    """Return a new policy for one tier.  Raises ``ValueError`` for a name that is not allowed.

    ``lru`` ignores cache values and admits every object, whatever ``admission`` says.
    """
    for what, value, allowed in (
        ("eviction", name, get_args(PolicyName)),
        ("admission", admission, get_args(Admission)),
    ):
        if value not in allowed:
            raise ValueError(f"{what}={value!r}: expected {' or '.join(allowed)}")
    return LruPolicy() if name == "lru" else FlopAwarePolicy(admission)
