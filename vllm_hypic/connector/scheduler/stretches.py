"""Stretches: successive segment requests compute the record of a segment with checkpoints.

    tokens   [ head | stretch 1 | stretch 2 | ... | last stretch ] tail
    request 1   head   stretch 1                    -> record of the tokens before checkpoint 1
    request 2   head + record 1 -> stretch 2        -> record of what ends at checkpoint 2
    ...

Requests and boundaries are the same whether a segment is computed from its beginning or from a checkpoint in
the pool.  An incomplete record needs two slots for states, as a stretch reads the last states while it writes
the next ones.  Kept checkpoints have slots of their own, and share the record's pages for K and V.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ...primitives.checkpoints import Checkpoint
from ...primitives.plan import CachedSegment
from .directory import SegmentDirectory
from .entries import Entry, Need

LEAST_GAIN = 0.25
"""The least share of a checkpoint's tokens that must be missing in the pool to make a fetch worthwhile."""


@dataclass(frozen=True)
class Stretch:
    """Tokens ``[first, stop)`` of a segment.  ``base_slot``: the slot with the states of the tokens between
    its head and ``first``; ``None`` without such tokens.  ``slot``: the slot for the stretch's states.

    ``target``: the record itself, or a pinned checkpoint; ``base``: the pinned checkpoint with the states of
    ``base_slot``, if any.  ``kept``: tokens before each wanted checkpoint.  ``fetched``: comes from a tier.
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
    """Chooses the next stretch of a record.

    ``need(segment, stop)``: returns the need of a record of the segment's tokens before ``stop``;
    ``kept(segment)``: returns the token counts at which the segment's record should have checkpoints.
    """

    def __init__(
        self,
        directory: SegmentDirectory,
        need: Callable[[CachedSegment, int], Need],
        kept: Callable[[CachedSegment], frozenset[int]],
    ) -> None:
        self._directory, self._need, self._kept = directory, need, kept

    def begin(self, segment: CachedSegment, entry: Entry) -> Stretch:
        """Return the first stretch of a record, behind the last checkpoint in the pool, which it resumes."""
        kept = self._kept(segment)
        if (found := self._directory.deepest(segment.checkpoints, entry.resume_from)) is None:
            return self._next(segment, entry, segment.head, kept)
        checkpoint, base = found
        self._directory.resume(entry, base)
        return self._next(segment, entry, checkpoint.stop, kept, base.slot, base)

    def deeper(self, segment: CachedSegment) -> tuple[Checkpoint, ...]:
        """Return the checkpoints worth fetching, the last first: enough of their tokens stand behind the last
        checkpoint in the pool (:data:`LEAST_GAIN`)."""
        ends = (c.stop for c in reversed(segment.checkpoints) if self._directory.checkpoint_at(c.key))
        least = next(ends, 0) / (1 - LEAST_GAIN)
        return tuple(c for c in reversed(segment.checkpoints) if c.stop > least)

    def fetched(self, segment: CachedSegment, entry: Entry, checkpoint: Checkpoint) -> Stretch | None:
        """Return the stretch up to a checkpoint that a tier should fill; ``entry`` is still empty.  ``None``:
        the pool has or is making the checkpoint, or has no room."""
        made = self._directory.checkpoint(checkpoint.key, entry, self._need(segment, checkpoint.stop))
        if made is None:
            return None
        return Stretch(segment.head, checkpoint.stop, made.slot, made, frozenset(), fetched=True)

    def after(self, segment: CachedSegment, entry: Entry, done: Stretch) -> Stretch:
        """Return the stretch behind ``done``, which is complete."""
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
        # Slots alternate so that the last stretch writes its states to the record's final slot.
        second = entry.scratch_slot if len(ahead) % 2 else None
        slot = entry.slot if second is None else second.slot
        return Stretch(first, to.stop, slot, entry, kept, base_slot, base)
