"""Checkpoints: boundaries inside a segment from which a computation of its record resumes.

A segment with checkpoints is computed in stretches from boundary to boundary.  Each stretch starts from the
record of the tokens before it.  That record is new, or another segment with the same beginning left it.
Both cases run the same computation, so a resumed record equals a record that was computed at once, bit by
bit.  The choice of kept checkpoints changes the amount of recomputation, never an answer.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

from .keys import SegmentKey, packed
from .media import Media, described

LEAST_TOKENS = 16
"""Least number of tokens in the last stretch: more than any convolution reads."""


@dataclass(frozen=True)
class Checkpoint:
    """A record of a segment's tokens before ``stop``, without a seam window at its tail."""

    stop: int
    key: SegmentKey


@dataclass(frozen=True)
class CheckpointRule:
    """Arguments ``every`` of :func:`boundaries` and ``successors`` of :func:`checkpoints`."""

    every: int = 0
    successors: bool = False


def boundaries(head: int, stop: int, every: int, media: Media = ()) -> list[int]:
    """Return the token indices of an interior ``[head, stop)`` at which checkpoints stand.

    Checkpoints are ``every`` tokens apart (0: no checkpoints).  No checkpoint cuts an image, or lies
    closer than :data:`LEAST_TOKENS` to the interior's end."""
    if not every:
        return []
    found = range(head + every, stop - LEAST_TOKENS + 1, every)
    return [at for at in found if not any(medium.cut_by(at) for medium in media)]


def may_have_checkpoints(tokens: int, every: int) -> bool:
    """Whether a segment of ``tokens`` tokens is long enough for a checkpoint."""
    return 0 < every <= tokens - LEAST_TOKENS


def checkpoints(
    origin: SegmentKey,
    ends: Sequence[int],
    tokens: Sequence[int],
    offsets: Sequence[int] | None = None,
    media: Media = (),
    *,
    successors: bool = False,
) -> tuple[Checkpoint, ...]:
    """Return the checkpoints at ``ends``.  Keys are chained, so all keys together cost as much as one.

    ``origin``: key of the properties that segments must share to share checkpoints.  ``successors``: the last
    row before a checkpoint reads the token behind it, so the checkpoint's key covers that token, too.
    """
    found, first, key = [], 0, bytes.fromhex(origin)
    for stop in ends:
        digest = hashlib.sha256(key)
        digest.update(packed(tokens[first:stop]))
        if successors:
            digest.update(packed(tokens[stop : stop + 1]))
        if offsets is not None:
            digest.update(packed(offsets[first:stop]))
        inside = tuple(medium for medium in media if first <= medium.start < stop)
        if inside:
            digest.update(repr(described(inside)).encode())
        key, first = digest.digest(), stop
        found.append(Checkpoint(stop, SegmentKey(key.hex())))
    return tuple(found)
