"""A policy that evicts the least recently used object: all objects have equal worth, all newcomers enter."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator

from ..cache_value import CacheValue


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
