"""Admission: requests hold room in the pool, wait for it, or are raised.  For the scheduler's thread only."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator, Set
from dataclasses import dataclass, field

from ...pool.plans import Space
from ...primitives.keys import SegmentKey
from ...primitives.options import Transfer
from ...primitives.plan import CachedSegment, PromptPlan
from .directory import SegmentDirectory
from .entries import Entry, Need
from .island_runs import Runs
from .pending_loads import POOL
from .queue import PendingQueue
from .segment_requests import SegmentRequests


@dataclass(frozen=True)
class PrefixStretch:
    """Tokens ``[first, stop)`` of a prefix.  ``target``: takes the states behind these tokens; the prefix's
    record, or a pinned checkpoint."""

    first: int
    stop: int
    target: Entry


@dataclass(frozen=True)
class OwnPrefix:
    """The prefix that a request captures into the record at the place ``entry``.

    ``plan``: the plan that the request runs, behind ``base``, which stays pinned until the request ends;
    ``ahead``: incomplete stretches, ascending.
    """

    entry: Entry
    plan: PromptPlan
    base: Entry | None
    ahead: deque[PrefixStretch]

    @property
    def first(self) -> int:
        """Number of the prefix's tokens that the request does not compute."""
        return 0 if self.base is None else self.base.columns

    def makes(self, entry: Entry) -> bool:
        """Whether the request has yet to complete this record."""
        return any(stretch.target is entry for stretch in self.ahead)


@dataclass
class ComposedRequest:
    """A request with records.  Only the scheduler side and its :class:`Admission` write it."""

    request_id: str
    plan: PromptPlan
    wanted: dict[SegmentKey, Need]
    transfer: Transfer
    tenant: str
    priority: int
    """The request's priority, or that of a more urgent request that waits for its room; smaller is sooner."""
    mode: str = "separators"
    """The way in which the request's segments were found."""
    islands: Runs = ()
    """Stream indices whose tokens leave no state in linear layers, as ranges ``[begin, end)``."""
    acquired: bool = False
    outdated: bool = False
    """Whether the request was planned for an earlier generation of weights."""
    held: dict[SegmentKey, Entry] = field(default_factory=dict)
    """The records that the request holds: those of ``wanted`` once acquired, and its prefix's base."""
    fresh: set[SegmentKey] = field(default_factory=set)
    """Keys of the records that were missing, and are computed for this request."""
    resumed: dict[SegmentKey, int] = field(default_factory=dict)
    """Number of tokens that a checkpoint spared for each record computed for this request."""
    sources: dict[SegmentKey, str] = field(default_factory=dict)
    """Sources of records, or of their checkpoints, that arrived for the request: see
    :meth:`.PendingLoads.source`."""
    undecided: set[SegmentKey] = field(default_factory=set)
    """Keys of the records requested from the store or other instances, which may still have to be
    computed."""
    own: OwnPrefix | None = None
    """The prefix that the request captures while it runs."""

    @property
    def running(self) -> PromptPlan:
        """The plan that the request runs: its own, or the remaining part if it captures its prefix."""
        return self.plan if self.own is None else self.own.plan

    @property
    def resident(self) -> bool:
        """Whether every record that the request reads is in the pool."""
        made = None if self.own is None else self.own.entry
        return self.acquired and all(entry.resident or entry is made for entry in self.held.values())

    @property
    def hits(self) -> Counter[str]:
        """Number of prompt tokens read from records that were not computed for this request, by source."""
        found: Counter[str] = Counter()
        for segment in self.plan.segments:
            if segment.key not in self.fresh:
                found[self.sources.get(segment.key, POOL)] += segment.reused
        for key, reused in {s.key: s.reused for s in self.plan.segments}.items():
            # The request recomputes islands even where a checkpoint covers them.
            found[self.sources.get(key, POOL)] += min(reused, self.resumed.get(key, 0))
        return +found

    def segment(self, key: SegmentKey) -> CachedSegment:
        return next(s for s in self.plan.records if s.key == key)


class Admission:
    """Gives room to the composed requests of one engine that have not ended.

    Each request waits for room for all its records at once, and holds the room until it ends.
    ``max_tenant_fraction``: the share of the pool for all requests of a tenant together.
    """

    def __init__(
        self,
        directory: SegmentDirectory,
        segment_requests: SegmentRequests,
        max_tenant_fraction: float,
    ) -> None:
        self._directory, self._segment_requests = directory, segment_requests
        unlimited = max_tenant_fraction == 1
        self._tenant_share = None if unlimited else directory.total.part(max_tenant_fraction)
        self.requests: dict[str, ComposedRequest] = {}
        self._pending = PendingQueue(self._held_share)
        self._holders: dict[int, dict[str, ComposedRequest]] = {}
        """The requests that hold each record, by the record's serial number."""
        self.no_room = False
        """Whether a request found no room in the pool in the last iteration of :meth:`admitted`."""
        self.full: set[str] = set()
        """Tenants with a request that found no room in the tenant's share in that iteration."""
        self._raised: dict[str, int] = {}
        self._least_urgent = 0
        """An upper bound of the priorities of the requests that hold room."""

    def add(self, request: ComposedRequest) -> None:
        """Add a new request, which waits for room."""
        self.requests[request.request_id] = request
        self._pending.add(request.request_id, request.tenant, request.priority)

    def end(self, request_id: str) -> ComposedRequest | None:
        """Forget and return a request, and unpin its records; ``None`` if it is no composed request."""
        request = self.requests.pop(request_id, None)
        if request is not None:
            self._pending.discard(request_id)
            for entry in request.held.values():
                del self._holders[entry.serial][request_id]
                if not self._holders[entry.serial]:
                    del self._holders[entry.serial]
            self._directory.release(request.held.values())
        return request

    def hold(self, request: ComposedRequest, entry: Entry) -> None:
        """Let the request hold this record, which was pinned for it, until the request ends."""
        request.held[entry.key] = entry
        self._holders.setdefault(entry.serial, {})[request.request_id] = request

    def holders(self, entry: Entry) -> list[ComposedRequest]:
        """Return the requests that hold this record, in the order in which they began to."""
        return list(self._holders.get(entry.serial, {}).values())

    def came(self, entry: Entry, source: str) -> None:
        """Note the ``source`` of a record, or of its checkpoint, in all requests that hold the record."""
        for request in self.holders(entry):
            request.sources[entry.key] = source

    @property
    def held(self) -> Set[int]:
        """Serial numbers of the records that requests hold."""
        return self._holders.keys()

    def pending_keys(self) -> set[SegmentKey]:
        """Return the keys of the records that requests without room want."""
        return {key for request_id in self._pending for key in self.requests[request_id].wanted}

    def admitted(self) -> Iterator[tuple[ComposedRequest, list[Entry]]]:
        """Pin the records of waiting requests, in the queue's order; yield each request that got room, and
        its newly reserved entries.

        No request overtakes one that waits for room in the pool, so none starves.  A request that waits for
        room in its tenant's share lets other tenants pass.  Every plan fits the empty pool and the share, so
        no request waits for ever.
        """
        self.no_room, self.full = False, set()
        for request_id in self._pending.in_turn():
            request = self.requests[request_id]
            if not self._within_share(request):
                self._raise_holders(request.priority, request.tenant)
                self.full.add(request.tenant)
                continue
            reserved = self._directory.acquire(request.wanted, request.tenant, self._bases(request))
            if reserved is None:
                self._raise_holders(request.priority)
                self.no_room = True
                break
            self._pending.discard(request_id)
            request.acquired = True
            for key in request.wanted:
                self.hold(request, self._directory.get(key))
            self._least_urgent = max(self._least_urgent, request.priority)
            for entry in request.held.values():
                self.urge(entry, request.priority)
            yield request, reserved

    def _bases(self, request: ComposedRequest) -> dict[SegmentKey, Entry]:
        """Return checkpoints from which records can be resumed, by the record's key; empty if other instances
        may send records, as these come whole."""
        if request.transfer.remote or request.outdated:
            return {}
        found = ((s.key, self._directory.deepest(s.checkpoints)) for s in request.plan.records)
        return {key: at[1] for key, at in found if at is not None}

    def _held_share(self, tenant: str) -> float:
        return self._directory.held_by(tenant).largest_share(self._directory.total)

    def _within_share(self, request: ComposedRequest) -> bool:
        """Whether the tenant stays within its share with this request's records, too."""
        return self.within_share(request.tenant, self._directory.would_hold(request.wanted))

    def within_share(self, tenant: str, more: Space) -> bool:
        """Whether the tenant stays within its share with ``more`` space."""
        share = self._tenant_share
        return share is None or share.covers(self._directory.held_by(tenant) + more)

    def resumed(self, entry: Entry, tokens: int) -> None:
        """Note how many tokens of a record in the making come from a checkpoint."""
        for request in self.holders(entry):
            if entry.key in request.fresh:
                request.resumed[entry.key] = tokens

    def urge(self, entry: Entry, priority: int) -> None:
        """Raise the requests that compute this record to ``priority``, that of a waiting request."""
        if entry.resident or priority >= self._least_urgent:
            return
        self._raised.update(dict.fromkeys(self._segment_requests.urge(entry, priority), priority))
        for request in self.requests.values():
            if request.own is not None and request.own.makes(entry) and request.priority > priority:
                request.priority = self._raised[request.request_id] = priority

    def _raise_holders(self, priority: int, tenant: str | None = None) -> None:
        """Raise the requests that hold room (of ``tenant``, or all) to ``priority``, as a request of that
        priority waits for room."""
        if priority >= self._least_urgent:
            return
        for request in self.requests.values():
            if request.acquired and request.priority > priority and tenant in (None, request.tenant):
                request.priority = self._raised[request.request_id] = priority
        for entry in self._segment_requests.entries():
            if tenant in (None, entry.tenant):
                self.urge(entry, priority)
        if tenant is None:
            self._least_urgent = priority

    def take_raised(self) -> dict[str, int]:
        """Return the new priorities of requests, segment requests included, that were raised since the last
        call."""
        raised, self._raised = self._raised, {}
        return raised
