"""Plans that the worker gets for requests about to run.  For the scheduler's thread only."""

from __future__ import annotations

from ...pool.plans import CapturePlan, RecordPlace, StreamPlan
from ...primitives.plan import CachedSegment
from .admission import Admission
from .delta_records import DeltaRecords
from .entries import Entry
from .segment_requests import SegmentRequests
from .worker_view import WorkerView


class RequestViews:
    """Makes the worker's plans of composed requests and segment requests.  ``shared``: decides how records
    are stored; ``None`` without tiers."""

    def __init__(
        self,
        admission: Admission,
        segment_requests: SegmentRequests,
        view: WorkerView,
        delta_records: DeltaRecords | None,
    ) -> None:
        self._admission, self._segment_requests = admission, segment_requests
        self._view, self._delta_records = view, delta_records

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
        return (
            None
            if self._delta_records is None or entry.forgotten
            else self._delta_records.place(segment, entry)
        )
