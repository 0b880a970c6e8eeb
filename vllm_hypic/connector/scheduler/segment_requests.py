"""Segment requests: internal requests that compute missing records.  For the scheduler's thread only."""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass

from ...primitives.keys import SegmentKey
from ...primitives.media import Media, Medium
from ...primitives.plan import CachedSegment
from .entries import Entry
from .stretches import Stretch


@dataclass(frozen=True)
class SegmentRequest:
    """A request that computes a segment for ``for_request``.  ``token_ids``: dummies, anchor and computed
    tokens, at most up to the interior's end; ``priority``: that of the most urgent waiting request;
    ``waits``: whether it waits for its context's record; ``media``: images, by indices of ``token_ids``."""

    request_id: str
    token_ids: list[int]
    for_request: str
    priority: int = 0
    waits: bool = False
    media: Media = ()


@dataclass(frozen=True)
class SegmentWork:
    """The work of a segment request: the stretch that it computes for the record of ``segment``.  ``entry``:
    the record's place; ``context``: the record of the segment's context, if any."""

    segment: CachedSegment
    entry: Entry
    context: Entry | None
    stretch: Stretch

    @property
    def last(self) -> bool:
        """Whether the record is complete after this stretch."""
        return self.stretch.stop == self.segment.stop

    @property
    def ranges(self) -> list[tuple[int, int]]:
        """Ranges ``[begin, end)`` of the segment's tokens that are computed: its head and the stretch."""
        first, stop = self.stretch.first, self.stretch.stop
        return [(0, stop)] if self.stretch.base_slot is None else [(0, self.segment.head), (first, stop)]


@dataclass(frozen=True)
class Incomplete:
    """A reserved record that no request computes and no instance sends.  ``done``: the stretch behind which
    it must be continued; ``None``: from its first token."""

    entry: Entry
    done: Stretch | None = None


@dataclass(frozen=True)
class Follower:
    """A segment request that is computed behind the record of ``context``."""

    request_id: str
    context: CachedSegment
    priority: int


class SegmentRequests:
    """Tracks the segment requests of one engine that have not ended.

    ``dummy_token``: stands before segments of link methods with dummies; ``None``: the segment's first token.
    """

    def __init__(self, dummy_token: int | None) -> None:
        self._dummy_token = dummy_token
        self._segments: dict[str, SegmentWork] = {}
        self._priorities: dict[str, int] = {}
        self._computed_by: dict[int, str] = {}
        """Requests by the serial numbers of the entries that they fill."""
        self._incomplete: list[Incomplete] = []
        self.started = 0
        """Number of segment requests since the engine's start."""

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._segments

    def start(self, work: SegmentWork, owner: str, priority: int) -> SegmentRequest:
        """Return a new request for a stretch of a record that is reserved in the pool."""
        self.started += 1
        segment = work.segment
        request_id = f"hypic-segment-{segment.key[:16]}-{self.started}"
        self._segments[request_id] = work
        self._priorities[request_id] = priority
        self._computed_by[work.entry.serial] = request_id
        dummy = segment.tokens[0] if self._dummy_token is None else self._dummy_token
        tokens = [*([dummy] * segment.dummies), *segment.anchor]
        media: list[Medium] = []
        for first, stop in work.ranges:
            inside = [m for m in segment.media if first <= m.start and m.stop <= stop]
            media += [m.moved(len(tokens) - first) for m in inside]
            tokens += segment.tokens[first:stop]
        return SegmentRequest(request_id, tokens, owner, priority, segment.context is not None, tuple(media))

    def behind(self, context: Entry) -> list[Follower]:
        """Return the requests that compute their segments behind the record ``context``."""
        return [
            Follower(request_id, work.segment.context, self._priorities[request_id])
            for request_id, work in self._segments.items()
            if work.context is context and work.segment.context is not None
        ]

    def urge(self, entry: Entry, priority: int) -> list[str]:
        """Raise the request that computes the record, and the one that computes its context, to ``priority``.
        Returns the requests that were less urgent before."""
        request_id = self._computed_by.get(entry.serial)
        if request_id is None or self._priorities[request_id] <= priority:
            return []
        self._priorities[request_id] = priority
        context = self._segments[request_id].context
        return [request_id, *([] if context is None else self.urge(context, priority))]

    def entries(self) -> list[Entry]:
        """Return the records that segment requests compute."""
        return [work.entry for work in self._segments.values()]

    def work_of(self, request_id: str) -> SegmentWork | None:
        """Return the request's work; ``None`` if it is no segment request."""
        return self._segments.get(request_id)

    def unwanted(self, wanted: Set[SegmentKey]) -> list[str]:
        """Return the requests whose records no request has pinned, and whose keys ``wanted`` lacks."""
        works = self._segments.items()
        return [r for r, work in works if not work.entry.pins and work.segment.key not in wanted]

    def end(self, request_id: str) -> SegmentWork | None:
        """Forget a request and return its work; ``None`` if it is no segment request."""
        work = self._segments.pop(request_id, None)
        if work is not None:
            del self._priorities[request_id], self._computed_by[work.entry.serial]
        return work

    def compute_later(self, entry: Entry, done: Stretch | None = None) -> None:
        """Queue a reserved record for :meth:`take_incomplete`: it did not arrive, its request died, or tokens
        behind the stretch ``done`` are left to compute."""
        self._incomplete.append(Incomplete(entry, done))

    def take_incomplete(self) -> list[Incomplete]:
        """Return and clear the queue of reserved records that no request computes and no instance sends."""
        found, self._incomplete = self._incomplete, []
        return found
