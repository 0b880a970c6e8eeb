"""Segment requests: internal requests that compute missing records.  The scheduler's thread only."""

from __future__ import annotations

from dataclasses import dataclass

from ...primitives.keys import SegmentKey
from ...primitives.plan import CachedSegment


@dataclass(frozen=True)
class SegmentRequest:
    """A segment to be computed on behalf of ``for_request``: what it is computed behind, and its tokens up to
    the interior's end.  ``waits``: for the record of its context."""

    request_id: str
    token_ids: list[int]
    for_request: str
    waits: bool = False


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
        self._segments: dict[str, CachedSegment] = {}
        self._lost: list[SegmentKey] = []
        self.started = 0
        """Segment requests since the engine's start."""

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._segments

    def start(self, segment: CachedSegment, owner: str) -> SegmentRequest:
        """A new request for a record that is reserved in the pool."""
        self.started += 1
        request_id = f"hypic-segment-{segment.key[:16]}-{self.started}"
        self._segments[request_id] = segment
        dummy = segment.tokens[0] if self._dummy_token is None else self._dummy_token
        tokens = [*([dummy] * segment.dummies), *segment.anchor, *segment.tokens[: segment.stop]]
        return SegmentRequest(request_id, tokens, owner, waits=segment.context is not None)

    def behind(self, context: SegmentKey) -> Follower | None:
        """A request whose segment is computed behind this record; ``None``: there is none."""
        for request_id, segment in self._segments.items():
            if segment.context is not None and segment.context.key == context:
                return Follower(request_id, segment.context)
        return None

    def segment_of(self, request_id: str) -> CachedSegment | None:
        return self._segments.get(request_id)

    def end(self, request_id: str) -> CachedSegment | None:
        """Forget a request; its segment, or ``None`` when it was none of ours."""
        return self._segments.pop(request_id, None)

    def compute_later(self, key: SegmentKey) -> None:
        """A reserved record did not come, or its request died: :meth:`take_lost` tells of it."""
        self._lost.append(key)

    def take_lost(self) -> list[SegmentKey]:
        """Reserved records since the last call that nobody computes or sends."""
        lost, self._lost = self._lost, []
        return lost
