"""Plans for workers, with places in the pool instead of keys and segments."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from ...pool.geometry import PoolGeometry
from ...pool.plans import CapturePlan, ComposePoint, RecordPlace, StoredBase, StreamPlan
from ...primitives.keys import Role, SegmentKey
from ...primitives.media import Media, rotary
from ...primitives.plan import CachedSegment, Part, PromptPlan
from .admission import Admission, OwnPrefix
from .entries import Entry
from .island_runs import Runs
from .segment_requests import SegmentRequests, SegmentWork


class WorkerView:
    """Makes the workers' plans of requests and records.  Changes nothing."""

    def __init__(self, geometry: PoolGeometry) -> None:
        self._geometry = geometry

    def slot_mapping(self, entry: Entry) -> np.ndarray:
        """Return token slots ``[columns]`` int64 of the record's K and V; zeros without attention layers."""
        page = self._geometry.page_tokens
        if not self._geometry.attention:
            return np.zeros(entry.columns, dtype=np.int64)
        starts = np.asarray(entry.pages, dtype=np.int64)[:, None] * page
        return (starts + np.arange(page)).reshape(-1)[: entry.columns]

    def place(self, entry: Entry, role: Role, behind: Entry | None = None) -> RecordPlace:
        """Return a record's place.  ``behind``: the record whose K and V the place already has."""
        return RecordPlace(
            entry.serial,
            entry.key,
            entry.slot,
            self.slot_mapping(entry),
            role is Role.LEADING,
            entry.hit_value.tokens,
            entry.hit_value.flops,
            None if behind is None else StoredBase((), behind.columns),
        )

    def stream(
        self,
        plan: PromptPlan,
        held: Mapping[SegmentKey, Entry],
        islands: Runs = (),
        *,
        with_prompt: bool = False,
    ) -> StreamPlan:
        """Return the stream plan of a composed request.  ``held``: its records, all resident; ``islands``:
        runs of linear layers; ``with_prompt``: whether to include the whole prompt."""
        points: list[ComposePoint] = []
        starts = _seen([s.start for s in plan.segments], plan.media).tolist()
        slots, kv_positions = [np.zeros(0, dtype=np.int64)], [np.zeros(0, dtype=np.int64)]
        for s, start in zip(plan.segments, starts, strict=True):
            entry = held[s.key]
            places = self.slot_mapping(entry)
            for part in s.parts:
                points.append(
                    ComposePoint(
                        part.at,
                        entry.slot,
                        part.stop - part.first,
                        replace_state=s.role is Role.LEADING,
                        applies=part is s.parts[-1],
                        shift=start - self._before(s),
                    )
                )
                slots.append(places[part.first - s.head : part.stop - s.head])
                kv_positions.append(_seen(s.offsets_of(part), self._placed(s)) + start)
        positions = _seen([*plan.positions, plan.n_logical], plan.media)
        return StreamPlan(
            positions=positions[:-1],
            n_logical=int(positions[-1]),
            points=tuple(points),
            slot_mapping=np.concatenate(slots),
            kv_positions=np.concatenate(kv_positions),
            use_transition=plan.method.use_transition,
            islands=islands,
            prompt=np.asarray(plan.prompt(), dtype=np.int64) if with_prompt else None,
            successors=_successors(plan),
        )

    def behind(self, work: SegmentWork) -> StreamPlan | None:
        """Return the stream plan of a segment request that reads its context or earlier stretches; ``None``
        if it reads neither."""
        segment, context, stretch = work.segment, work.segment.context, work.stretch
        points: list[ComposePoint] = []
        slots, kv_positions = list[np.ndarray](), list[np.ndarray]()
        if context is not None and work.context is not None:
            points.append(ComposePoint(0, work.context.slot, work.context.columns, replace_state=True))
            slots.append(self.slot_mapping(work.context))
            kv_positions.append(_seen(context.offsets_of(Part(0, 0, context.stop)), self._placed(context)))
        if stretch.base_slot is not None:
            columns, leading = stretch.first - segment.head, segment.role is Role.LEADING
            at = segment.prepended + segment.head
            points.append(ComposePoint(at, stretch.base_slot, columns, replace_state=leading))
            slots.append(self.slot_mapping(work.entry)[:columns])
            kv_positions.append(self._own_positions(segment, segment.head, stretch.first))
        if not points:
            return None
        return StreamPlan(
            positions=self._positions(work),
            n_logical=self._before(segment) + self._span(segment),
            points=tuple(points),
            slot_mapping=np.concatenate(slots),
            kv_positions=np.concatenate(kv_positions),
            use_transition=True,
        )

    def _positions(self, work: SegmentWork) -> np.ndarray:
        """Return the positions of a segment request's tokens, int64, behind the positions of its context."""
        before = self._before(work.segment)
        prepended = np.arange(before - work.segment.prepended, before, dtype=np.int64)
        own = [self._own_positions(work.segment, first, stop) for first, stop in work.ranges]
        return np.concatenate([prepended, *own])

    def _own_positions(self, segment: CachedSegment, first: int, stop: int) -> np.ndarray:
        """Return the positions of the segment's tokens ``[first, stop)`` in a segment request, int64."""
        offsets = segment.offsets_of(Part(0, first, stop))
        return self._before(segment) + _seen(offsets, self._placed(segment))

    def _before(self, segment: CachedSegment) -> int:
        """Return the position of the segment's first token in its segment request."""
        return segment.prepended + (0 if segment.context is None else self._span(segment.context))

    def _span(self, segment: CachedSegment) -> int:
        """Return the number of positions that the segment takes."""
        return int(_seen([segment.span], self._placed(segment))[0])

    @staticmethod
    def _placed(segment: CachedSegment) -> Media:
        """Return the segment's images, by offsets from the segment's start."""
        offsets = segment.offsets
        if offsets is None:
            return segment.media
        return tuple(m.moved(offsets[m.start] - m.start) for m in segment.media)

    def own(self, own: OwnPrefix, *, stored: RecordPlace | None) -> tuple[CapturePlan, ...]:
        """Return the capture plans of a request's own prefix; see :meth:`capture` for ``stored``."""
        places, resumed = self.slot_mapping(own.entry), own.base is not None
        positions = np.asarray(own.plan.positions, dtype=np.int64) if resumed else None
        return tuple(
            CapturePlan(
                lo=stretch.first - own.first,
                hi=stretch.stop - own.first,
                slot=stretch.target.slot,
                slot_mapping=places[stretch.first : stretch.stop],
                positions=positions,
                leading=True,
                has_context=resumed,
                serial=stretch.target.serial,
                stored=stored if stretch.target is own.entry else None,
            )
            for stretch in own.ahead
        )

    def capture(self, work: SegmentWork, *, stored: RecordPlace | None) -> CapturePlan:
        """Return a segment request's capture plan.  ``stored``: the place from which the store gets the
        record; ``None``: the record is not stored, or not complete with this request."""
        segment, entry, stretch = work.segment, work.entry, work.stretch
        lo, leading = segment.prepended + segment.head, segment.role is Role.LEADING
        resumed = stretch.base_slot is not None
        positions = None
        if segment.context is not None or segment.offsets is not None or segment.media or resumed:
            positions = self._positions(work)
        made = work.last or stretch.target is not entry
        return CapturePlan(
            lo=lo,
            hi=lo + stretch.stop - stretch.first,
            slot=stretch.slot,
            slot_mapping=self.slot_mapping(entry)[stretch.first - segment.head : stretch.stop - segment.head],
            positions=positions,
            leading=leading,
            has_context=segment.context is not None or resumed,
            base=None if leading else stretch.base_slot,
            # The blocks of earlier stretches stay reserved until the record is complete.
            serial=stretch.target.serial if made else 0,
            learned=segment.learned,
            successor=segment.tokens[stretch.stop] if stretch.stop < len(segment.tokens) else None,
            stored=stored,
        )


class RequestViews:
    """Makes the worker's plans of composed requests and segment requests.

    ``stored(segment, entry)``: returns how a complete record is stored; ``None`` without tiers."""

    def __init__(
        self,
        admission: Admission,
        segment_requests: SegmentRequests,
        view: WorkerView,
        stored: Callable[[CachedSegment, Entry], RecordPlace] | None,
    ) -> None:
        self._admission, self._segment_requests = admission, segment_requests
        self._view, self._stored_at = view, stored

    def stream_plan(self, request_id: str, *, with_prompt: bool = False) -> StreamPlan | None:
        """Return the stream plan of a composed request, or of a segment request that reads records, about to
        run; ``None`` for all other requests.  ``with_prompt``: include the whole prompt, as sampling or a
        drafter reads it."""
        composed = self._admission.requests.get(request_id)
        if composed is not None:
            plan, islands = composed.running, composed.islands
            if composed.own is not None and not plan.segments:
                return None
            return self._view.stream(plan, composed.held, islands, with_prompt=with_prompt)
        work = self._segment_requests.work_of(request_id)
        return None if work is None else self._view.behind(work)

    def captures(self, request_id: str) -> tuple[CapturePlan, ...]:
        """Return the capture plans of a request about to run: a segment request, or one that captures its own
        prefix; empty for all other requests."""
        if (work := self._segment_requests.work_of(request_id)) is not None:
            stored = self._stored(work.segment, work.entry) if work.last else None
            return (self._view.capture(work, stored=stored),)
        composed = self._admission.requests.get(request_id)
        if composed is None or (own := composed.own) is None:
            return ()
        return self._view.own(own, stored=self._stored(composed.segment(own.entry.key), own.entry))

    def _stored(self, segment: CachedSegment, entry: Entry) -> RecordPlace | None:
        """Return how a record goes to the store once it is complete; ``None``: the record is not stored."""
        return None if self._stored_at is None or entry.forgotten else self._stored_at(segment, entry)


def _successors(plan: PromptPlan) -> tuple[tuple[int, int], ...]:
    """Return the ``successors`` of :class:`StreamPlan`.  Of adjacent records the first one's token counts."""
    found: dict[int, int] = {}
    for s in plan.segments:
        for part in s.parts:
            if part.at > 0 and part.first < part.stop:
                found.setdefault(part.at - 1, s.tokens[part.first])
    return tuple(found.items())


def _seen(positions: Sequence[int], media: Media) -> np.ndarray:
    """Return the model's positions, int64, of tokens at ascending logical ``positions``: see
    :func:`~...primitives.media.rotary`."""
    return np.asarray(rotary(positions, media) if media else positions, dtype=np.int64)
