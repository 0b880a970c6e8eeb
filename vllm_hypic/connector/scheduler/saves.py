"""Records on their way to the store: each rank copies its part at its own pace.

For the scheduler's thread only.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping

from ...primitives.keys import SegmentKey

_REMEMBERED = 4096
"""The most records remembered with parts of some ranks; the other ranks may never store their parts."""


class Saves:
    """Counts stored parts of records.  ``ranks``: number of workers; each stores its part once."""

    def __init__(self, ranks: int) -> None:
        self._ranks = ranks
        self._parts: OrderedDict[int, int] = OrderedDict()
        """Number of stored parts, by serial number, for records with missing parts."""

    def reported(self, saved: Mapping[tuple[int, SegmentKey], int]) -> list[SegmentKey]:
        """Count the parts that ranks report as stored; return the keys of records that are whole now."""
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
