"""Missing records: fetches, awaits or computes the records that admitted requests miss.

missed -> fetched from a tier, awaited from another instance, or computed in stretches -> resident

For the scheduler's thread only.
"""

from __future__ import annotations

from ...pool.geometry import PoolGeometry
from ...primitives.keys import SegmentKey
from ...primitives.options import Transfer
from ...primitives.plan import CachedSegment
from ..metadata import LoadCount
from ..orders import NIXL, DeclineRecord, OrderQueue
from ..stats import HypicCounters
from .admission import Admission, ComposedRequest
from .delta_records import DeltaRecords
from .entries import Entry
from .fetched import FetchedCheckpoints
from .growing import GrowingDirectory
from .pending_loads import LoadBudget, PendingLoads
from .prefixes import Prefixes
from .retention import Retention
from .segment_requests import SegmentRequest, SegmentRequests, SegmentWork
from .stretches import Stretch, Stretches
from .worker_view import WorkerView


class MissingRecords:
    """Brings missing records into the pool, and counts hits and computed records in ``counters``.

    ``has_tiers``: records may be in tiers.  The requests, their orders and the directory belong to other
    classes, which this class calls.
    """

    def __init__(
        self,
        directory: GrowingDirectory,
        geometry: PoolGeometry,
        admission: Admission,
        segment_requests: SegmentRequests,
        prefixes: Prefixes,
        loads: PendingLoads,
        stretches: Stretches,
        view: WorkerView,
        retention: Retention,
        delta_records: DeltaRecords,
        orders: OrderQueue,
        counters: HypicCounters,
        *,
        has_tiers: bool,
    ) -> None:
        self._directory, self._geometry, self._admission = directory, geometry, admission
        self._segment_requests, self._prefixes, self._loads = segment_requests, prefixes, loads
        self._stretches, self._view, self._retention = stretches, view, retention
        self._delta_records, self._orders, self._counters = delta_records, orders, counters
        self._has_tiers = has_tiers
        self._fetched = FetchedCheckpoints(directory, stretches, loads, admission, segment_requests, view)

    def obtain(self, composed: ComposedRequest, reserved: list[Entry]) -> list[SegmentRequest]:
        """Start to fetch or await an admitted request's missing records, in their ``reserved`` places; return
        segment requests for all other ones."""
        started, budget = [], self._loads.budget()
        self._counters.segments_hit += len(composed.wanted) - len(reserved)
        for entry in reserved:
            if composed.outdated:
                self._directory.discard(entry.key)
            segment = composed.segment(entry.key)
            if not composed.outdated and self._start_load(entry, segment, composed.transfer, budget):
                composed.undecided.add(entry.key)
            else:
                composed.fresh.add(entry.key)
                started += self._compute(segment, entry, composed.request_id, composed.priority)
        self._decline(composed)
        if not composed.undecided:
            self._count(composed)
        return started

    def _start_load(
        self, entry: Entry, segment: CachedSegment, transfer: Transfer, budget: LoadBudget
    ) -> bool:
        """Order the record from a tier or another instance; return false if neither may have it."""
        awaited = entry.key in transfer.remote and budget.take(entry.space)
        remote_s = transfer.remote_deadline_s if awaited else None
        fallback_keys = self._fetched.wanted(segment) if self._has_tiers else ()
        place = self._view.place(entry, segment.role, behind=entry.resume_from)
        return self._loads.start(place, entry.space, remote_s, fallback_keys)

    def _compute(
        self,
        segment: CachedSegment,
        entry: Entry,
        owner: str,
        priority: int,
        done: Stretch | None = None,
    ) -> list[SegmentRequest]:
        """Return a request for the record's next stretch, behind ``done``; empty if ``owner`` captures it."""
        if segment.is_prefix:
            self._begun(entry, self._prefixes.begin(owner, segment, entry, priority))
            if done is not None:
                self._directory.release([done.target])  # the owner has a pin of its own
            return []
        if done is None:
            stretch = self._stretches.begin(segment, entry)
        else:
            stretch = self._stretches.after(segment, entry, done)
        if done is None or done.fetched:
            self._begun(entry, stretch.first - segment.head)
        context = None
        if segment.context is not None:
            # A separate pin, as the request that needs the segment may end before the segment is computed.
            context = self._admission.requests[owner].held[segment.context.key]
            self._directory.pin(context)
            self._admission.urge(context, priority)
        return [self._segment_requests.start(SegmentWork(segment, entry, context, stretch), owner, priority)]

    def _begun(self, entry: Entry, resumed: int) -> None:
        """Count a record that is computed from now on, except ``resumed`` tokens from a checkpoint."""
        self._counters.segments_computed += 1
        self._counters.tokens_resumed += resumed
        self._admission.resumed(entry, resumed)

    def compute_incomplete(self) -> list[SegmentRequest]:
        """Start the missing stretches of records for which requests still wait, and free the places of all
        other incomplete records; return the segment requests."""
        started = []
        for incomplete in self._segment_requests.take_incomplete():
            entry, done = incomplete.entry, incomplete.done
            owners = self._admission.holders(entry)
            followers = self._segment_requests.behind(entry)
            undecided = [c for c in owners if entry.key in c.undecided]
            for composed in undecided:
                composed.fresh.add(entry.key)
            waiting = [c.priority for c in owners] + [f.priority for f in followers]
            if owners:
                segment = owners[0].segment(entry.key)
                if segment.is_prefix:
                    owners[0].fresh.add(entry.key)  # the owner itself computes the prefix
                started += self._compute(segment, entry, owners[0].request_id, min(waiting), done)
            elif followers:
                first = followers[0]
                started += self._compute(first.context, entry, first.request_id, min(waiting), done)
            else:
                self._directory.abort(entry)
                if done is not None and done.target is not entry:
                    self._directory.release([done.target])
            for composed in undecided:
                self._decide(composed, entry.key)
        return started

    def _decline(self, composed: ComposedRequest) -> None:
        """Order the workers to decline records that other instances send but no request here awaits."""
        if not composed.transfer.remote:
            return
        for key in (composed.transfer.remote & composed.wanted.keys()) - self._loads.awaited():
            self._orders.submit(DeclineRecord(key, composed.held[key].slot))

    def _count(self, composed: ComposedRequest) -> None:
        """Count the request's reused and computed tokens, once no record is undecided."""
        reused = composed.hits.total()
        computed = composed.plan.n_logical - reused
        self._counters.tokens_reused += reused
        self._counters.tokens_computed += computed
        self._counters.count(composed.mode, tokens_reused=reused, tokens_computed=computed)

    def arrived(self, serial: int, count: LoadCount) -> bool:
        """Count ranks that received or missed their parts of a record; the last rank decides its load.
        Return whether the load has ended."""
        load = self._loads.reported(serial, count)
        if load is None:
            return False
        entry = self._directory.of_serial(serial)
        assert entry is not None, f"record {serial} arrived, but nothing is reserved for it"
        if not load.found:
            self._counters.segments_not_received += load.remote
            self._retention.not_stored(load.key)
            if serial in self._fetched:
                self._fetched.ended(serial, None)
            elif not self._fetched.start(entry, load.count.fallback_keys or ()):
                self._segment_requests.compute_later(entry)
            return True
        if load.sent:
            self._counters.segments_received += 1
            self._counters.segments_received_nixl += load.count.route == NIXL
        else:
            self._retention.stored([load.key])
            self._delta_records.loaded(load.key)
            self._counters.segments_loaded += 1
        self._directory.shrink(serial, load.count.transition_blocks, self._geometry.transition_block_bytes)
        if serial in self._fetched:
            self._fetched.ended(serial, self._loads.source(load))
            return True
        self._directory.commit(entry)
        self._admission.came(entry, self._loads.source(load))
        for composed in self._admission.holders(entry):
            if entry.key in composed.undecided:
                self._counters.segments_hit += 1
                self._decide(composed, entry.key)
        return True

    def _decide(self, composed: ComposedRequest, key: SegmentKey) -> None:
        """Note that a request's record is a hit or a miss; count the request after its last record."""
        composed.undecided.discard(key)
        if not composed.undecided:
            self._count(composed)

    def ended(self, work: SegmentWork, *, completed: bool) -> None:
        """End a segment request: commit its stretch if ``completed``, else abort it; queue remaining work."""
        directory, stretch = self._directory, work.stretch
        directory.release(entry for entry in (work.context, stretch.base) if entry is not None)
        checkpoint = None if stretch.target is work.entry else stretch.target
        if not completed:
            if checkpoint is not None:
                directory.release([checkpoint])
            for entry in (checkpoint, work.entry):
                # Another record may wait for the checkpoint, which is also a whole record of its own.
                if entry is not None and directory.abort(entry):
                    self._segment_requests.compute_later(entry)
        elif work.last:
            self._delta_records.complete(work.segment, work.entry, stretch.base)
        else:
            if checkpoint is not None:
                directory.commit(checkpoint)
            self._segment_requests.compute_later(work.entry, stretch)

    def pinned(self) -> list[Entry]:
        """Return the checkpoints on their way from tiers, each of which is pinned."""
        return self._fetched.pinned()
