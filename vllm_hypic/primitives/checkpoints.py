"""Checkpoints: boundaries inside a segment from which its record can be resumed.

A segment with checkpoints is computed in stretches from boundary to boundary.  Each goes on from the record
of the tokens before it, whether that was made just now or is there because another segment begins alike: both
are one computation, so a record that was resumed has the bits of one that was not.  Which checkpoints are
kept changes what is computed again, never what is answered.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

from .keys import SegmentKey, packed
from .media import Media, described

LEAST_TOKENS = 16
"""Tokens of the last stretch, at least: further than any convolution reaches."""


@dataclass(frozen=True)
class Checkpoint:
    """The record of a segment's tokens before ``stop``, without a tail."""

    stop: int
    key: SegmentKey


@dataclass(frozen=True)
class CheckpointRule:
    """See :func:`boundaries` and :func:`checkpoints`."""

    every: int = 0
    successors: bool = False


def boundaries(head: int, stop: int, every: int, media: Media = ()) -> list[int]:
    """Where an interior ``[head, stop)`` has checkpoints: every so many tokens from its beginning (0: none),
    but in no image and not just before its end."""
    if not every:
        return []
    found = range(head + every, stop - LEAST_TOKENS + 1, every)
    return [at for at in found if not any(medium.cut_by(at) for medium in media)]


def may_have_checkpoints(tokens: int, every: int) -> bool:
    """Whether a segment of so many tokens is long enough for one."""
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
    """The checkpoints at ``ends``.  Keys are chained, so all together take as long as one of the segment.

    ``origin``: key of what all segments have in common that may share them, computed alike; ``successors``:
    the last row before a checkpoint has read the token behind it, so that its key tells that, too.
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
