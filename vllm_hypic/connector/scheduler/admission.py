"""Who holds room in the pool, who waits for it, and who must hurry for them.  The scheduler's thread only."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Set
from dataclasses import dataclass, field

from ...pool.plans import Space
from ...primitives.keys import SegmentKey
from ...primitives.options import Transfer
from ...primitives.plan import CachedSegment, PromptPlan
from .arrivals import POOL
from .directory import SegmentDirectory
from .entries import Entry, Need
from .island_runs import Runs
from .own_prefix import OwnPrefix
from .queue import PendingQueue
from .segment_requests import SegmentRequests


@dataclass
class ComposedRequest:
    """A request with records; written by the scheduler side and its :class:`Admission` only."""

    request_id: str
    plan: PromptPlan
    wanted: dict[SegmentKey, Need]
    transfer: Transfer
    tenant: str
    priority: int
    """The smaller, the sooner: the request's own, or that of a more urgent one that waits for its room."""
    mode: str = "separators"
    """How its segments were found."""
    islands: Runs = ()
    """Rows of the stream from which linear layers keep no state."""
    acquired: bool = False
    outdated: bool = False
    """Planned for a generation that is over."""
    held: dict[SegmentKey, Entry] = field(default_factory=dict)
    """The records of ``wanted``, once they are acquired."""
    fresh: set[SegmentKey] = field(default_factory=set)
    """Records that this request itself had to have computed."""
    resumed: dict[SegmentKey, int] = field(default_factory=dict)
    """Tokens of records that were made for it which a checkpoint had."""
    sources: dict[SegmentKey, str] = field(default_factory=dict)
    """Where records came from, or their checkpoints, that came for it: see :meth:`.Arrivals.source`."""
    undecided: set[SegmentKey] = field(default_factory=set)
    """Records that this request asked the store or other instances for, and that may yet have to be
    computed."""
    own: OwnPrefix | None = None
    """The record that it captures itself while it runs."""

    @property
    def running(self) -> PromptPlan:
        """The plan that it runs: its own, or what is left of that where it captures its prefix."""
        return self.plan if self.own is None else self.own.plan

    @property
    def resident(self) -> bool:
        """Whether every record that it reads is there."""
        made = None if self.own is None else self.own.entry
        return self.acquired and all(entry.resident or entry is made for entry in self.held.values())

    @property
    def hits(self) -> Counter[str]:
        """Prompt tokens read from records that it did not have to have computed, by where these came from."""
        found: Counter[str] = Counter()
        for segment in self.plan.segments:
            if segment.key not in self.fresh:
                found[self.sources.get(segment.key, POOL)] += segment.reused
        for key, reused in {s.key: s.reused for s in self.plan.segments}.items():
            # Islands are computed again, whatever a checkpoint had of them.
            found[self.sources.get(key, POOL)] += min(reused, self.resumed.get(key, 0))
        return +found

    def segment(self, key: SegmentKey) -> CachedSegment:
        return next(s for s in self.plan.records if s.key == key)


class Admission:
    """The composed requests of one engine that have not ended.

    Each waits until it is given room for all its records at once, and holds that until it ends.
    ``max_tenant_fraction``: of the pool, for a tenant's requests together.
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
        """The requests that hold each record, by its serial."""
        self.no_room = False
        """Whether a request found no room in the pool when :meth:`admitted` was last gone through."""
        self.full: set[str] = set()
        """Tenants of which one found none in their share, then."""
        self._raised: dict[str, int] = {}
        self._least_urgent = 0
        """No request that holds room has a larger priority."""

    def add(self, request: ComposedRequest) -> None:
        """A request has come, and waits for room."""
        self.requests[request.request_id] = request
        self._pending.add(request.request_id, request.tenant, request.priority)

    def end(self, request_id: str) -> ComposedRequest | None:
        """Forget a request, and unpin its records; ``None`` when it was none of ours."""
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
        """Until it ends the request holds this record, which was pinned for it."""
        request.held[entry.key] = entry
        self._holders.setdefault(entry.serial, {})[request.request_id] = request

    def holders(self, entry: Entry) -> list[ComposedRequest]:
        """The requests that hold this record, in the order in which they came to it."""
        return list(self._holders.get(entry.serial, {}).values())

    def came(self, entry: Entry, source: str) -> None:
        """The record, or a checkpoint of it, has come from there for the requests that hold it."""
        for request in self.holders(entry):
            request.sources[entry.key] = source

    @property
    def held(self) -> Set[int]:
        """Serials of the records that requests hold."""
        return self._holders.keys()

    def pending_keys(self) -> set[SegmentKey]:
        """Keys of the records that requests without room want."""
        return {key for request_id in self._pending for key in self.requests[request_id].wanted}

    def admitted(self) -> Iterator[tuple[ComposedRequest, list[Entry]]]:
        """Pin the records of waiting requests in the queue's order: who got room now, and the entries that
        are newly reserved for it.

        Nobody overtakes a request that waits for room, so it cannot starve; one that waits for room in its
        tenant's share lets other tenants go on.  Every plan fits the empty pool, and the share, so none waits
        for ever.
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
        """Checkpoints with which records begin that the request lacks, if they cannot come from another
        instance: what comes from there is whole."""
        if request.transfer.remote or request.outdated:
            return {}
        found = ((s.key, self._directory.deepest(s.checkpoints)) for s in request.plan.records)
        return {key: at[1] for key, at in found if at is not None}

    def _held_share(self, tenant: str) -> float:
        return self._directory.held_by(tenant).largest_share(self._directory.total)

    def _within_share(self, request: ComposedRequest) -> bool:
        """Whether the request's tenant would have no more than its share with this request's records, too."""
        return self.within_share(request.tenant, self._directory.would_hold(request.wanted))

    def within_share(self, tenant: str, more: Space) -> bool:
        """Whether the tenant would have no more than its share with so much more."""
        share = self._tenant_share
        return share is None or share.covers(self._directory.held_by(tenant) + more)

    def resumed(self, entry: Entry, tokens: int) -> None:
        """So many tokens of a record that is being made are those of a checkpoint."""
        for request in self.holders(entry):
            if entry.key in request.fresh:
                request.resumed[entry.key] = tokens

    def urge(self, entry: Entry, priority: int) -> None:
        """A request of this priority waits for the record: who computes it is as urgent from now on."""
        if entry.resident or priority >= self._least_urgent:
            return
        self._raised.update(dict.fromkeys(self._segment_requests.urge(entry, priority), priority))
        for request in self.requests.values():
            if request.own is not None and request.own.makes(entry) and request.priority > priority:
                request.priority = self._raised[request.request_id] = priority

    def _raise_holders(self, priority: int, tenant: str | None = None) -> None:
        """A request of this priority waits for room: who holds some, of ``tenant`` or all, is as urgent from
        now on."""
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
        """New priorities of requests, segment requests among them, that became more urgent since the last
        call."""
        raised, self._raised = self._raised, {}
        return raised
