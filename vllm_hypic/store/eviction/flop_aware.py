"""Recency and worth in one score, after Marconi: ``recency + alpha * FLOPs saved per byte``."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from ..worth import Worth
from .held import Floats, HeldTable


class FlopAwarePolicy:
    """Evicts the lowest score; both terms are normalised to 0..1 over the held objects.

    With ``alpha`` 0 this is least recently used.
    """

    def __init__(self, alpha: float = 0.0) -> None:
        self.alpha = alpha
        self._held = HeldTable()
        self._now = 0

    def added(self, key: str, worth: Worth) -> None:
        self._held.put(key, self._tick(), worth)

    def resized(self, key: str, worth: Worth) -> None:
        self._held.resize(key, worth)

    def hit(self, key: str) -> None:
        self._held.touch(key, self._tick())

    def removed(self, key: str, *, evicted: bool) -> None:
        self._held.drop(key)

    def missed(self, key: str, worth: Worth) -> None:
        pass

    def worst_first(self) -> Iterator[str]:
        return self._held.ascending(self._scores())

    def admits(self, key: str, worth: Worth, victims: list[str]) -> bool:
        return True

    def close(self) -> None:
        pass

    def _tick(self) -> int:
        self._now += 1
        return self._now

    def _scores(self) -> Floats:
        recency = _normalised(self._held.column("used"))
        if not self.alpha:
            return recency
        return recency + self.alpha * _normalised(self._held.column("density"))


def _normalised(values: Floats) -> Floats:
    """From 0 (least) to 1 (greatest); equal values are all 0."""
    if not len(values):
        return values
    low, high = values.min(), values.max()
    return (values - low) / (high - low) if high > low else np.zeros_like(values)
