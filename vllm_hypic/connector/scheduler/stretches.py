"""Stretches: how the record of a segment with checkpoints is computed, one segment request after the other.

    tokens   [ head | stretch 1 | stretch 2 | ... | last stretch ] tail
    request 1   head   stretch 1                    -> record of what ends at checkpoint 1
    request 2   head + record 1 -> stretch 2        -> record of what ends at checkpoint 2
    ...

Requests and boundaries are the same whether a segment is computed from its beginning or from a checkpoint
that is here.  A record in the making needs two places for states, as the last one is read while the next
is made; checkpoints that are kept have places of their own.  K and V go where the record has them, and
checkpoints share its pages.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ...primitives.checkpoints import Checkpoint
from ...primitives.plan import CachedSegment
from .directory import SegmentDirectory
from .entries import Entry, Need

LEAST_GAIN = 0.25
"""A checkpoint is fetched if so much of its tokens, at least, would have to be computed without it."""


@dataclass(frozen=True)
class Stretch:
    """Tokens ``[first, stop)`` of a segment, behind its head where ``base_slot`` has the record of those
    before.  States go to ``slot``.

    ``target``: the record itself, or a checkpoint, which is pinned; ``base``: a pinned checkpoint, if the
    tokens before are one's.  ``kept``: where the record should have checkpoints.  ``fetched``: it came
    from a tier.
    """

    first: int
    stop: int
    slot: int
    target: Entry
    kept: frozenset[int]
    base_slot: int | None = None
    base: Entry | None = None
    fetched: bool = False


class Stretches:
    """Says what is computed next of a record.

    ``need(segment, stop)``: what the record of a segment's tokens before ``stop`` takes; ``kept``: says where
    records should have checkpoints.
    """

    def __init__(
        self,
        directory: SegmentDirectory,
        need: Callable[[CachedSegment, int], Need],
        kept: Callable[[CachedSegment], frozenset[int]],
    ) -> None:
        self._directory, self._need, self._kept = directory, need, kept

    def begin(self, segment: CachedSegment, entry: Entry) -> Stretch:
        """From the last checkpoint that is here."""
        kept = self._kept(segment)
        if (found := self._directory.deepest(segment.checkpoints, entry.base)) is None:
            return self._next(segment, entry, segment.head, kept)
        checkpoint, base = found
        self._directory.resume(entry, base)
        return self._next(segment, entry, checkpoint.stop, kept, base.slot, base)

    def deeper(self, segment: CachedSegment) -> tuple[Checkpoint, ...]:
        """Checkpoints that are worth fetching, the last first: enough of their tokens are behind the last one
        that is here."""
        ends = (c.stop for c in reversed(segment.checkpoints) if self._directory.checkpoint_at(c.key))
        least = next(ends, 0) / (1 - LEAST_GAIN)
        return tuple(c for c in reversed(segment.checkpoints) if c.stop > least)

    def fetched(self, segment: CachedSegment, entry: Entry, checkpoint: Checkpoint) -> Stretch | None:
        """Up to a checkpoint of ``entry``, still empty, that is to come from a tier; ``None``: it is being
        made, or there is no room."""
        made = self._directory.checkpoint(checkpoint.key, entry, self._need(segment, checkpoint.stop))
        if made is None:
            return None
        return Stretch(segment.head, checkpoint.stop, made.slot, made, frozenset(), fetched=True)

    def after(self, segment: CachedSegment, entry: Entry, done: Stretch) -> Stretch:
        """Behind ``done``, which is complete."""
        self._directory.leave_base(entry)
        base = None if done.target is entry else done.target
        kept = self._kept(segment) if done.fetched else done.kept
        return self._next(segment, entry, done.stop, kept, done.slot, base)

    def _next(
        self,
        segment: CachedSegment,
        entry: Entry,
        first: int,
        kept: frozenset[int],
        base_slot: int | None = None,
        base: Entry | None = None,
    ) -> Stretch:
        ahead = [c for c in segment.checkpoints if c.stop > first]
        if not ahead:
            return Stretch(first, segment.stop, entry.slot, entry, kept, base_slot, base)
        to = ahead[0]
        if to.stop in kept:
            made = self._directory.checkpoint(to.key, entry, self._need(segment, to.stop))
            if made is not None:
                return Stretch(first, to.stop, made.slot, made, kept, base_slot, base)
        # By turns, so that the last goes where the record stays.
        second = entry.spare if len(ahead) % 2 else None
        slot = entry.slot if second is None else second.slot
        return Stretch(first, to.stop, slot, entry, kept, base_slot, base)
