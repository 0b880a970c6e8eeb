"""Records on their way to the store: each rank copies its part at its own pace.

The scheduler's thread only.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping

from ...primitives.keys import SegmentKey

_REMEMBERED = 4096
"""Records that some ranks handed to the store; others may never do so."""


class Saves:
    """``ranks``: workers that each have a part of every record, and hand it to the store once."""

    def __init__(self, ranks: int) -> None:
        self._ranks = ranks
        self._parts: OrderedDict[int, int] = OrderedDict()
        """How many parts of a record the store was handed, by its number; of some, not of all."""

    def reported(self, saved: Mapping[tuple[int, SegmentKey], int]) -> list[SegmentKey]:
        """Some ranks say that they handed parts of these records over; returns those that are whole now."""
        whole = []
        for (serial, key), parts in saved.items():
            parts += self._parts.pop(serial, 0)
            if parts >= self._ranks:
                whole.append(key)
                continue
            self._parts[serial] = parts
            if len(self._parts) > _REMEMBERED:
                self._parts.popitem(last=False)
        return whole
