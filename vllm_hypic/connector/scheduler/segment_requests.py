"""Segment requests: internal requests that compute missing records.  The scheduler's thread only."""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass

from ...primitives.keys import SegmentKey
from ...primitives.plan import CachedSegment
from .directory import Entry


@dataclass(frozen=True)
class SegmentRequest:
    """A segment to be computed on behalf of ``for_request``: what it is computed behind, and its tokens up to
    the interior's end.  ``waits``: for the record of its context."""

    request_id: str
    token_ids: list[int]
    for_request: str
    waits: bool = False


@dataclass(frozen=True)
class SegmentWork:
    """What a segment request does: it fills ``entry`` with the record of ``segment``, behind the record
    ``context``, if that has one."""

    segment: CachedSegment
    entry: Entry
    context: Entry | None


@dataclass(frozen=True)
class Follower:
    """A segment request that is computed behind the record of ``context``."""

    request_id: str
    context: CachedSegment


class SegmentRequests:
    """The segment requests of one engine that have not ended.

    ``dummy_token`` stands before segments whose link method wants dummies; ``None``: their own first token.
    """

    def __init__(self, dummy_token: int | None) -> None:
        self._dummy_token = dummy_token
        self._segments: dict[str, SegmentWork] = {}
        self._lost: list[Entry] = []
        self.started = 0
        """Segment requests since the engine's start."""

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._segments

    def start(self, work: SegmentWork, owner: str) -> SegmentRequest:
        """A new request for a record that is reserved in the pool."""
        self.started += 1
        segment = work.segment
        request_id = f"hypic-segment-{segment.key[:16]}-{self.started}"
        self._segments[request_id] = work
        dummy = segment.tokens[0] if self._dummy_token is None else self._dummy_token
        tokens = [*([dummy] * segment.dummies), *segment.anchor, *segment.tokens[: segment.stop]]
        return SegmentRequest(request_id, tokens, owner, waits=segment.context is not None)

    def behind(self, context: Entry) -> Follower | None:
        """A request whose segment is computed behind this record; ``None``: there is none."""
        for request_id, work in self._segments.items():
            if work.context is context and work.segment.context is not None:
                return Follower(request_id, work.segment.context)
        return None

    def work_of(self, request_id: str) -> SegmentWork | None:
        """What a request does; ``None`` when it is none of ours."""
        return self._segments.get(request_id)

    def unwanted(self, wanted: Set[SegmentKey]) -> list[str]:
        """The requests whose records nobody has pinned, and that are none of ``wanted``."""
        works = self._segments.items()
        return [r for r, work in works if not work.entry.pins and work.segment.key not in wanted]

    def end(self, request_id: str) -> SegmentWork | None:
        """Forget a request; what it did, or ``None`` when it was none of ours."""
        return self._segments.pop(request_id, None)

    def compute_later(self, entry: Entry) -> None:
        """A reserved record did not come, or its request died: :meth:`take_lost` tells of it."""
        self._lost.append(entry)

    def take_lost(self) -> list[Entry]:
        """Reserved records since the last call that nobody computes or sends."""
        lost, self._lost = self._lost, []
        return lost
