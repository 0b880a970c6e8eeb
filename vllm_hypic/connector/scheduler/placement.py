"""Which checkpoints of a record are kept.  It changes what is computed again, never what is answered."""

from __future__ import annotations

from collections import OrderedDict

from ...primitives.plan import CachedSegment

_REMEMBERED = 100_000
"""Boundaries of segments that were computed last."""


class CheckpointPlacement:
    """Keeps checkpoints where segments have parted before, just before a record's end, and between.

    ``most``: checkpoints of a record; ``None``: all, where they are without states.
    """

    def __init__(self, most: int | None) -> None:
        self._most = most
        self._seen: OrderedDict[str, None] = OrderedDict()

    def kept(self, segment: CachedSegment) -> frozenset[int]:
        """Where the record, which is about to be computed, should have checkpoints."""
        parts_at = self._overlap(segment)
        self._remember(segment)
        stops = [checkpoint.stop for checkpoint in segment.checkpoints]
        if segment.is_prefix:
            # Elsewhere it ends the computation of a stretch for nothing, and its end is one as well.
            return frozenset({parts_at} & set(stops))
        if self._most is None or len(stops) <= self._most:
            return frozenset(stops)
        spread = {stops[-1 - i * len(stops) // self._most] for i in range(self._most)}
        return frozenset(spread | ({parts_at} & set(stops)))

    def _overlap(self, segment: CachedSegment) -> int:
        """Tokens with which another segment has begun."""
        return next((c.stop for c in reversed(segment.checkpoints) if c.key in self._seen), 0)

    def _remember(self, segment: CachedSegment) -> None:
        for key in (*(c.key for c in segment.checkpoints), segment.key):
            self._seen[key] = None
            self._seen.move_to_end(key)
        while len(self._seen) > _REMEMBERED:
            self._seen.popitem(last=False)
