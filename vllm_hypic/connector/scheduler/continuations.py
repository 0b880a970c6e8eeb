"""Whether prompts go on from where others ended: a conversation does, what is asked once does not.

Who goes on may take a while: an end that nobody has gone on from yet says nothing while its record would
be in the pool or a tier.  It counts against once so many others have left that it would have, too, until
somebody goes on from it after all.
"""

from __future__ import annotations

from collections import OrderedDict

from ...primitives.keys import SegmentKey
from ...primitives.plan import CachedSegment
from .growing import GrowingDirectory

REMEMBERED = 10_000
"""Ends of which it is known that nobody has gone on from them.  One more that has not counted yet does so:
room without end would teach nothing."""
LEAST_ENDS = 20
"""Before so many have counted all are kept."""
LEAST_SHARE = 0.25
"""The share of those that counted lately which prompts must have gone on from, so that more are kept."""
DECAY = 0.98
"""What an end counts less for each that counts later."""


class Continuations:
    """Counts ends of answers, or of prompts, kept in the directory or not, and how many of them were gone on
    from."""

    def __init__(self, directory: GrowingDirectory) -> None:
        self._directory = directory
        self._open: OrderedDict[SegmentKey, int] = OrderedDict()
        """Ends that nobody has gone on from, by key; the evictions at which each counts against."""
        self._unused: OrderedDict[SegmentKey, None] = OrderedDict()
        """Ends that counted against, by key, the oldest first."""
        self._ended = self._used = 0.0
        self._counted = 0

    def ended(self, key: SegmentKey) -> None:
        """What ended would be the record ``key``."""
        self._open.pop(key, None)
        self._open[key] = self._directory.leaves_at()
        if len(self._open) > REMEMBERED:
            self._count_unused()

    def asked(self, segment: CachedSegment) -> None:
        """A prompt has this prefix."""
        for key in (*(c.key for c in segment.checkpoints), segment.key):
            if self._open.pop(key, None) is not None:
                self._count(1)
            elif key in self._unused:
                del self._unused[key]
                self._used += 1

    @property
    def likely(self) -> bool:
        """Whether the end of one is worth its place."""
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
