"""Whether prompts go on from where others ended: a conversation does, what is asked once does not."""

from __future__ import annotations

from collections import OrderedDict

from ...primitives.keys import SegmentKey
from ...primitives.plan import CachedSegment

REMEMBERED = 10_000
"""Answers of which it is known that none has gone on from them yet."""
LEAST_ANSWERS = 20
"""Before so many have ended all are kept."""
LEAST_SHARE = 0.25
"""The share of the answers that ended lately which prompts must have gone on from, so that more are kept."""
DECAY = 0.98
"""What an answer counts less for each that ends later."""


class Continuations:
    """Counts answers, or prompts, kept or not, and how many of them were gone on from."""

    def __init__(self) -> None:
        self._open: OrderedDict[SegmentKey, None] = OrderedDict()
        self._ended = self._used = 0.0
        self._total = 0

    def ended(self, key: SegmentKey) -> None:
        """What ended would be the record ``key``."""
        self._total += 1
        self._ended, self._used = 1 + DECAY * self._ended, DECAY * self._used
        self._open[key] = None
        if len(self._open) > REMEMBERED:
            self._open.popitem(last=False)

    def asked(self, segment: CachedSegment) -> None:
        """A prompt has this prefix."""
        for key in (*(c.key for c in segment.checkpoints), segment.key):
            if key in self._open:
                del self._open[key]
                self._used += 1

    @property
    def likely(self) -> bool:
        """Whether the end of one is worth its place."""
        return self._total < LEAST_ANSWERS or self._used >= LEAST_SHARE * self._ended
