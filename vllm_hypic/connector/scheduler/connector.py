"""Scheduler half: admits requests, keeps the directory, and decides which requests may run.

Life of a composed request here: ``planner.plan`` -> :meth:`SchedulerConnector.admit` (tokens become the
stream) -> :meth:`~SchedulerConnector.pump` (pins its records; fetches, awaits or computes missing records)
-> :meth:`~SchedulerConnector.ready` -> :meth:`.RequestViews.stream_plan` on its first step ->
:meth:`~SchedulerConnector.finished` (unpin).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cached_property

from ...config.engine import HypicConfig
from ...pool.geometry import PoolGeometry
from ...primitives.keys import Namespace, SegmentKey
from ...primitives.options import NO_TRANSFER, Transfer
from ...primitives.plan import CachedSegment, PromptPlan
from ...primitives.tokens import PrimitiveIds
from ...store.totals import append_stats
from ..metadata import HypicMetadata, LoadCount, WorkerReport
from ..orders import NIXL, OUTDATED, DeclineRecord, OrderQueue
from ..stats import HypicCounters
from .admission import Admission, ComposedRequest
from .delta_records import DeltaRecords
from .entries import Entry
from .fetched import FetchedCheckpoints
from .generated_prefixes import GeneratedPrefixes
from .growing import GrowingDirectory
from .island_runs import IslandRuns, whole_runs
from .pending_loads import LoadBudget, PendingLoads
from .pending_pushes import PendingPushes
from .placement import PrefixPlacement, SegmentPlacement
from .planning import NO_TOKENIZER, Planner, PlanningTexts
from .prefixes import Prefixes
from .request_views import RequestViews
from .retention import Retention
from .saves import Saves
from .segment_requests import SegmentRequest, SegmentRequests, SegmentWork
from .stretches import Stretch, Stretches
from .worker_view import WorkerView


class SchedulerConnector:
    """Manages the requests, the directory and the records on their way of one engine."""

    def __init__(
        self,
        config: HypicConfig,
        geometry: PoolGeometry,
        namespace: Namespace,
        max_model_len: int,
        primitive_ids: Callable[[], PrimitiveIds],
        prefill_flops: Callable[[int], float] = float,
        ranks: int = 1,
        texts: PlanningTexts = NO_TOKENIZER,
        island_runs: Callable[[], IslandRuns] | None = None,
        reads_successors: bool = False,
        keeps_answers: bool = False,
    ) -> None:
        """``prefill_flops(tokens)``: FLOPs of a segment's prefill.  ``ranks``: number of workers, each with a
        part of every record.  ``texts``: gives planning the tokenizer's texts.  ``island_runs``: makes
        the cutter of islands for linear layers, once the engine runs; ``None`` without linear layers.
        ``reads_successors``: some layers read each token's successor, too.  ``keeps_answers``: the engine
        captures answers, too."""
        self.config, self.geometry, self.ranks = config, geometry, ranks
        self._make_island_runs = island_runs
        self.directory = GrowingDirectory.of(config, geometry)
        self.planner = Planner(
            config,
            geometry,
            namespace,
            max_model_len,
            primitive_ids,
            prefill_flops,
            self.directory,
            texts,
            reads_successors,
        )
        self._orders = OrderQueue()
        self.retention = Retention(config, geometry, namespace, self.directory, self._orders)
        self.segment_requests = SegmentRequests(config.dummy_token)
        segments = SegmentPlacement(config, geometry, prefill_flops)
        need, has_tiers, self._view = self.planner.need, bool(config.store.tiers), WorkerView(geometry)
        self._stretches = Stretches(self.directory, need, segments.kept)
        self.admission = Admission(self.directory, self.segment_requests, config.max_tenant_fraction)
        prefixes = PrefixPlacement(config, geometry, prefill_flops)
        self.prefixes = Prefixes(self.directory, self.admission, need, prefixes, self._complete)
        awaited = 0.0 if config.segment_parallel is None else config.segment_parallel.max_awaited_fraction
        share = self.directory.total.part(awaited)
        self.loads = PendingLoads(self._orders, tiers=config.store.tiers, ranks=ranks, share=share)
        self._pushes, self._saves = PendingPushes(self._orders, ranks), Saves(ranks)
        self.delta_records = DeltaRecords(self.directory, self._view, self._orders, geometry, prefill_flops)
        self._fetched = FetchedCheckpoints(
            self.directory, self._stretches, self.loads, self.admission, self.segment_requests, self._view
        )
        stored, grown = self.delta_records if has_tiers else None, self.planner.need_grown
        self.generated = GeneratedPrefixes(
            self.directory, self.admission, grown, prefixes, stored, on=keeps_answers
        )
        self.views = RequestViews(self.admission, self.segment_requests, self._view, stored)
        self.counters, self._evictions = HypicCounters(), 0
        self._held: set[str] = set()
        self._ended_early = False
        """A request ended early since the last :meth:`take_unwanted`."""
        self._news = False
        """A load has ended since the last :meth:`pump`."""
        self.worker_unfinished = False
        """Workers are copying records, and need steps even when no request runs."""

    @property
    def namespace(self) -> Namespace:
        """Namespace and generation of the records that new requests use."""
        return self.planner.namespace

    def reset(self, generation: str) -> None:
        """Begin a new ``generation`` of records, as the weights may have changed.

        Requests admitted earlier keep the old generation's records.  New requests, tiers and other instances
        never see these records, and each leaves with its last request.
        """
        self.planner.namespace = replace(self.namespace, generation=generation)
        self.retention.reset(self.namespace)
        for composed in self.admission.requests.values():
            composed.outdated = True

    def name_weights(self, name: str) -> None:
        """Begin the generation ``name`` of weights; empty: the weights with which the engine started.

        Engines with the same name compute equal keys.  A call with the present name changes nothing.
        """
        if name != self.namespace.generation:
            self.reset(name)

    # -- admission -----------------------------------------------------------------------------

    def admit(
        self,
        request_id: str,
        plan: PromptPlan,
        transfer: Transfer = NO_TRANSFER,
        *,
        tenant: str = "",
        mode: str = "separators",
        priority: int = 0,
    ) -> None:
        """Take a planned request in; the request then waits until its records are resident.

        ``priority``: requests with smaller values get room sooner.  ``tenant``: its requests share one part
        of the pool.  ``mode``: the way in which the request's segments were found.
        """
        wanted = {s.key: self.planner.need(s) for s in plan.records}
        islands = () if self.island_runs is None else self.island_runs.of(plan)
        self.admission.add(
            ComposedRequest(request_id, plan, wanted, transfer, tenant, priority, mode, islands)
        )
        if plan.segments and plan.segments[0].is_prefix:
            self.prefixes.asked(plan.segments[0])
        self.counters.requests += 1
        self.counters.count(mode, requests=1)
        self.counters.segments_queried += len(wanted)
        self.counters.seam_tokens += sum(s.head + s.tail for s in plan.segments)
        self.counters.island_tokens += sum(s.columns - s.reused for s in plan.segments if len(s.parts) > 1)

    def pump(self) -> list[SegmentRequest]:
        """Give waiting requests room, start to fetch or await their missing records, and return requests for
        the segments to compute."""
        self._news = False
        self.retention.drop_expired()
        self.loads.give_up_late()
        started = self._compute_incomplete()
        for composed, reserved in self.admission.admitted():
            self.counters.segments_hit += len(composed.wanted) - len(reserved)
            started += self._obtain(composed, reserved)
            self._decline(composed)
            if not composed.undecided:
                self._count(composed)
        if self.admission.no_room or self.admission.full:
            self.counters.pool_waits += 1
            self.generated.give_up(None if self.admission.no_room else self.admission.full)
            self.loads.give_up_unoffered()
        return started

    def _obtain(self, composed: ComposedRequest, reserved: list[Entry]) -> list[SegmentRequest]:
        """Start to fetch or await a request's missing records; return segment requests for all other ones."""
        started, budget = [], self.loads.budget()
        for entry in reserved:
            if composed.outdated:
                self.directory.discard(entry.key)
            segment = composed.segment(entry.key)
            if not composed.outdated and self._start_load(entry, segment, composed.transfer, budget):
                composed.undecided.add(entry.key)
            else:
                composed.fresh.add(entry.key)
                started += self._compute(segment, entry, composed.request_id, composed.priority)
        return started

    def _start_load(self, entry: Entry, segment: CachedSegment, way: Transfer, budget: LoadBudget) -> bool:
        awaited = entry.key in way.remote and budget.take(entry.space)
        remote_s = way.remote_deadline_s if awaited else None
        fallback_keys = self._fetched.wanted(segment) if self.config.store.tiers else ()
        place = self._view.place(entry, segment.role, behind=entry.resume_from)
        return self.loads.start(place, entry.space, remote_s, fallback_keys)

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
            self._begun(entry, self.prefixes.begin(owner, segment, entry, priority))
            if done is not None:
                self.directory.release([done.target])  # the owner has a pin of its own
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
            context = self.admission.requests[owner].held[segment.context.key]
            self.directory.pin(context)
            self.admission.urge(context, priority)
        return [self.segment_requests.start(SegmentWork(segment, entry, context, stretch), owner, priority)]

    def _begun(self, entry: Entry, resumed: int) -> None:
        """Count a record that is computed from now on, except ``resumed`` tokens from a checkpoint."""
        self.counters.segments_computed += 1
        self.counters.tokens_resumed += resumed
        self.admission.resumed(entry, resumed)

    def _compute_incomplete(self) -> list[SegmentRequest]:
        """Start the missing stretches of records for which requests still wait, and free the places of all
        other incomplete records; return the segment requests."""
        started = []
        for incomplete in self.segment_requests.take_incomplete():
            entry, done = incomplete.entry, incomplete.done
            owners = self.admission.holders(entry)
            followers = self.segment_requests.behind(entry)
            undecided = [c for c in owners if entry.key in c.undecided]
            for composed in undecided:
                composed.fresh.add(entry.key)
            waiting = [c.priority for c in owners] + [f.priority for f in followers]
            if owners:
                segment = owners[0].segment(entry.key)
                started += self._compute(segment, entry, owners[0].request_id, min(waiting), done)
            elif followers:
                first = followers[0]
                started += self._compute(first.context, entry, first.request_id, min(waiting), done)
            else:
                self.directory.abort(entry)
                if done is not None and done.target is not entry:
                    self.directory.release([done.target])
            for composed in undecided:
                self._decide(composed, entry.key)
        return started

    def _decline(self, composed: ComposedRequest) -> None:
        """Order the workers to decline records that other instances send but no request here awaits."""
        if not composed.transfer.remote:
            return
        for key in (composed.transfer.remote & composed.wanted.keys()) - self.loads.awaited():
            self._orders.submit(DeclineRecord(key, composed.held[key].slot))

    def _count(self, composed: ComposedRequest) -> None:
        """Count the request's reused and computed tokens, once no record is undecided."""
        reused = composed.hits.total()
        computed = composed.plan.n_logical - reused
        self.counters.tokens_reused += reused
        self.counters.tokens_computed += computed
        self.counters.count(composed.mode, tokens_reused=reused, tokens_computed=computed)

    # -- scheduling ----------------------------------------------------------------------------

    @property
    def awaits_records(self) -> bool:
        """Whether the engine can only wait for records on their way: workers copy no records, and no load
        has ended since the last :meth:`pump`."""
        return bool(self.loads) and not self._news and not self.worker_unfinished

    @property
    def only_loads_matter(self) -> bool:
        """Whether arriving records alone require the next step: no record is, or may be, on its way to other
        instances or tiers."""
        return not (self._pushes or self.config.store.tiers)

    def is_internal(self, request_id: str) -> bool:
        return request_id in self.segment_requests

    def is_private(self, request_id: str) -> bool:
        """Whether a request never runs, or its tokens in vLLM begin no prompt (a stream, a segment)."""
        composed = request_id in self.admission.requests
        return composed or request_id in self._held or self.is_internal(request_id)

    def plan_of(self, request_id: str) -> PromptPlan | None:
        composed = self.admission.requests.get(request_id)
        return None if composed is None else composed.running

    @cached_property
    def island_runs(self) -> IslandRuns | None:
        """The cutter of islands into runs; ``None`` without linear layers."""
        return None if self._make_island_runs is None else self._make_island_runs()

    def pass_end(self, request_id: str, end: int) -> int:
        """Return the index, at most ``end``, at which a pass over the stream ends: in no island."""
        composed = self.admission.requests.get(request_id)
        return end if composed is None else whole_runs(composed.islands, end)

    def hits(self, request_id: str) -> Counter[str]:
        """See :attr:`.ComposedRequest.hits`."""
        composed = self.admission.requests.get(request_id)
        return Counter() if composed is None else composed.hits

    def ready(self, request_id: str) -> bool:
        """Whether the request may be scheduled now."""
        return request_id not in self._held and self.resident(request_id)

    def hold(self, request_id: str) -> None:
        """Never let this request be scheduled (warm-up prompts, refused ones)."""
        self._held.add(request_id)

    def unhold(self, request_id: str) -> None:
        self._held.discard(request_id)

    def resident(self, request_id: str) -> bool:
        """Whether every record that the request reads is resident; true for requests without records."""
        composed = self.admission.requests.get(request_id)
        if composed is None:
            work = self.segment_requests.work_of(request_id)
            return work is None or work.context is None or work.context.resident
        return composed.resident

    def over(self, request_id: str) -> bool:
        """Whether a request that is never scheduled can end: its records are resident, and delivered if the
        request asks for a delivery.

        The first call with all records resident starts the delivery.
        """
        composed = self.admission.requests.get(request_id)
        if composed is None:
            return True
        if not self.resident(request_id):
            return False
        to = composed.transfer.push_to
        if to is None:
            return True
        if not self._pushes.started(request_id) and composed.outdated:
            self._pushes.refuse(request_id, OUTDATED)
        elif not self._pushes.started(request_id):
            entries = [composed.held[key] for key in {s.key: None for s in composed.plan.segments}]
            places = [self._view.place(e, composed.segment(e.key).role) for e in entries]
            self._pushes.start(request_id, places, to, composed.transfer.push_deadline_s)
        return self._pushes.over(request_id)

    def push_fault(self, request_id: str) -> str | None:
        """Return why a record was not delivered; ``None`` without a failed delivery."""
        return self._pushes.fault(request_id)

    def finished(self, request_id: str, *, completed: bool, tokens: Sequence[int] = ()) -> None:
        """Release all that a finished request holds.  ``completed``: the request ran to its end (a segment
        request has filled its stretch); ``tokens``: see :meth:`.GeneratedPrefixes.end`."""
        self._ended_early |= not completed
        self.generated.end(request_id, tokens)
        work = self.segment_requests.end(request_id)
        if work is not None:
            self._ended(work, completed=completed)
            return
        composed = self.admission.end(request_id)
        if composed is not None:
            for entry in self.prefixes.end(composed):
                self.segment_requests.compute_later(entry)
            self._pushes.forget(request_id)
            if composed.undecided:
                self.loads.give_up_unwanted(self.admission.held)

    def _ended(self, work: SegmentWork, *, completed: bool) -> None:
        """End a segment request: commit its stretch if ``completed``, else abort it; queue remaining work."""
        directory, stretch = self.directory, work.stretch
        directory.release(entry for entry in (work.context, stretch.base) if entry is not None)
        checkpoint = None if stretch.target is work.entry else stretch.target
        if not completed:
            if checkpoint is not None:
                directory.release([checkpoint])
            for entry in (checkpoint, work.entry):
                # Another record may wait for the checkpoint, which is also a whole record of its own.
                if entry is not None and directory.abort(entry):
                    self.segment_requests.compute_later(entry)
        elif work.last:
            self._complete(work.segment, work.entry, stretch.base)
        else:
            if checkpoint is not None:
                directory.commit(checkpoint)
            self.segment_requests.compute_later(work.entry, stretch)

    def _complete(self, segment: CachedSegment, entry: Entry, base: Entry | None) -> None:
        """Commit a whole record, whose last stretch was computed behind ``base``."""
        self.directory.commit(entry)
        if self.config.store.tiers:
            self.delta_records.completed(segment, entry, base)

    def take_unwanted(self) -> list[str]:
        """Return segment requests whose records no request needs any more; empty if no request ended early
        since the last call.  Call again after these end: segment requests wait for records, too."""
        if not self._ended_early:
            return []
        self._ended_early = False
        return self.segment_requests.unwanted(self.admission.pending_keys())

    # -- the worker ----------------------------------------------------------------------------

    def instruct(self, metadata: HypicMetadata) -> None:
        """Put the slots and orders that came up since the last step into the worker's ``metadata``."""
        metadata.dropped_slots, metadata.taken_slots = self.directory.slots.take_news()
        self.delta_records.order_checkpoints()
        self.retention.order_late_deletes()
        metadata.orders = self._orders.take()

    def absorb(self, report: WorkerReport) -> None:
        """Take in the workers' report of a step."""
        self.worker_unfinished = report.unfinished > 0
        for serial, transition_blocks in report.transition_blocks.items():
            self.directory.shrink(serial, transition_blocks, self.geometry.transition_block_bytes)
        for serial in report.at_store:
            self.loads.at_store(serial)
        for serial, count in report.loads.items():
            self._arrived(serial, count)
        stored = self._saves.reported(report.saved)
        self.retention.stored(stored)
        self.delta_records.stored(stored)
        for number, faults in report.pushed.items():
            if (fault := self._pushes.reported(number, faults)) is not None:
                self.counters.segments_pushed += not fault
                self.counters.segments_unpushed += bool(fault)
        if report.store is not None:
            self.retention.absorb(report.store)
            self.counters.store = append_stats(self.counters.store, report.store)

    def _arrived(self, serial: int, count: LoadCount) -> None:
        """Count ranks that received or missed their parts of a record; the last rank decides its load."""
        load = self.loads.reported(serial, count)
        if load is None:
            return
        self._news = True
        entry = self.directory.of_serial(serial)
        assert entry is not None, f"record {serial} arrived, but nothing is reserved for it"
        if not load.found:
            self.counters.segments_not_received += load.remote
            self.retention.not_stored(load.key)
            if serial in self._fetched:
                self._fetched.ended(serial, None)
            elif not self._fetched.start(entry, load.count.fallback_keys or ()):
                self.segment_requests.compute_later(entry)
            return
        if load.sent:
            self.counters.segments_received += 1
            self.counters.segments_received_nixl += load.count.route == NIXL
        else:
            self.retention.stored([load.key])
            self.delta_records.loaded(load.key)
            self.counters.segments_loaded += 1
        self.directory.shrink(serial, load.count.transition_blocks, self.geometry.transition_block_bytes)
        if serial in self._fetched:
            self._fetched.ended(serial, self.loads.source(load))
            return
        self.directory.commit(entry)
        self.admission.came(entry, self.loads.source(load))
        for composed in self.admission.holders(entry):
            if entry.key in composed.undecided:
                self.counters.segments_hit += 1
                self._decide(composed, entry.key)

    def _decide(self, composed: ComposedRequest, key: SegmentKey) -> None:
        """Note that a request's record is a hit or a miss; count the request after its last record."""
        composed.undecided.discard(key)
        if not composed.undecided:
            self._count(composed)

    # -- reports -------------------------------------------------------------------------------

    def take_counters(self) -> HypicCounters:
        """Return and reset the counters since the last call, with the pool's present levels."""
        counters, self.counters = self.counters, HypicCounters()
        directory = self.directory
        counters.evictions = directory.evictions - self._evictions
        self._evictions = directory.evictions
        counters.pool_bytes_used = self.geometry.bytes_of(directory.used)
        counters.pool_bytes_capacity = self.geometry.nbytes
        counters.records = len(directory)
        counters.pinned = directory.pinned
        counters.waiting = sum(not self.resident(r) for r in self.admission.requests)
        return counters
