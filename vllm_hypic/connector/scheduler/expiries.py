"""Expiry times of records; a heap finds expired records without a scan of all records."""

from __future__ import annotations

import heapq
from collections.abc import ItemsView

from ...primitives.keys import SegmentKey

_SLACK = 64


class Expiries:
    """Expiry times, in Unix time, by record.  For the scheduler's thread only."""

    def __init__(self) -> None:
        self._at: dict[SegmentKey, float] = {}
        self._soonest: list[tuple[float, SegmentKey]] = []
        """A heap of present and replaced times, at most twice as many as present ones plus ``_SLACK``."""

    def items(self) -> ItemsView[SegmentKey, float]:
        """Return all records and their times."""
        return self._at.items()

    def set(self, key: SegmentKey, at: float | None) -> None:
        """Replace the record's time; ``None``: the record never expires."""
        if at is None:
            self._at.pop(key, None)
            return
        self._at[key] = at
        heapq.heappush(self._soonest, (at, key))
        if len(self._soonest) > 2 * len(self._at) + _SLACK:
            self._soonest = [(at, key) for key, at in self._at.items()]
            heapq.heapify(self._soonest)

    def take_due(self, now: float) -> list[SegmentKey]:
        """Forget and return the records whose time is at or before ``now``."""
        due = []
        while self._soonest and self._soonest[0][0] <= now:
            at, key = heapq.heappop(self._soonest)
            if self._at.get(key) == at:
                del self._at[key]
                due.append(key)
        return due
