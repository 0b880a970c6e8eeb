"""Whether later prompts continue earlier ones: the turns of a conversation do, a single question does not.

The next turn of a conversation may come late.  So an end without a continuation counts only after as many
evictions as would have evicted its record from pool and tiers.  A prompt that continues it later reverses
that count.
"""

from __future__ import annotations

from collections import OrderedDict

from ...primitives.keys import SegmentKey
from ...primitives.plan import CachedSegment
from .growing import GrowingDirectory

REMEMBERED = 10_000
"""The most ends without a continuation that are remembered.  Beyond this limit the oldest open end counts as
unused: with unlimited room no end would ever count."""
LEAST_ENDS = 20
"""The number of counted ends before which all records are kept."""
LEAST_SHARE = 0.25
"""The least share of recently counted ends that prompts must continue for more records to be kept."""
DECAY = 0.98
"""The factor by which each counted end reduces the weight of all earlier ends."""


class ReuseEstimator:
    """Counts ends of answers or prompts, whether or not the directory keeps their records, and how many of
    these ends later prompts continue."""

    def __init__(self, directory: GrowingDirectory) -> None:
        self._directory = directory
        self._open: OrderedDict[SegmentKey, int] = OrderedDict()
        """Ends that no prompt has continued, by key; the eviction count at which each counts as unused."""
        self._unused: OrderedDict[SegmentKey, None] = OrderedDict()
        """Ends that counted as unused, by key, the oldest first."""
        self._ended = self._used = 0.0
        self._counted = 0

    def add_end(self, key: SegmentKey) -> None:
        """Note that a prompt or answer ended whose record has, or would have, this key."""
        self._open.pop(key, None)
        self._open[key] = self._directory.leaves_at()
        if len(self._open) > REMEMBERED:
            self._count_unused()

    def observe(self, segment: CachedSegment) -> None:
        """Note that a prompt has this prefix, and so continues every end inside it."""
        for key in (*(c.key for c in segment.checkpoints), segment.key):
            if self._open.pop(key, None) is not None:
                self._count(1)
            elif key in self._unused:
                del self._unused[key]
                self._used += 1

    @property
    def worth_keeping(self) -> bool:
        """Whether a kept end is likely enough to be continued to be worth its room in the pool."""
        while self._open and next(iter(self._open.values())) <= self._directory.evictions:
            self._count_unused()
        return self._counted < LEAST_ENDS or self._used >= LEAST_SHARE * self._ended

    def _count_unused(self) -> None:
        key, _ = self._open.popitem(last=False)
        self._unused[key] = None
        if len(self._unused) > REMEMBERED:
            self._unused.popitem(last=False)
        self._count(0)

    def _count(self, used: int) -> None:
        self._counted += 1
        self._ended, self._used = 1 + DECAY * self._ended, used + DECAY * self._used
