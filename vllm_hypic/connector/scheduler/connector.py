"""Scheduler half: the only class of this folder that the engine's scheduler and vLLM's connector call.

Life of a composed request here: :meth:`SchedulerConnector.plan` -> :meth:`~SchedulerConnector.admit` (tokens
become the stream) -> :meth:`~SchedulerConnector.begin_pass` (pins its records; fetches, awaits or computes
missing records) -> :meth:`~SchedulerConnector.ready` -> :meth:`~SchedulerConnector.introduce` on its first
step -> :meth:`~SchedulerConnector.finished` (unpin).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from ...config.engine import HypicConfig
from ...pool.geometry import PoolGeometry
from ...primitives.keys import Namespace, SegmentKey
from ...primitives.options import NO_TRANSFER, FoundSegments, RequestSpec, Transfer
from ...primitives.plan import PromptPlan
from ...primitives.tokens import PrimitiveIds
from ...segment_parallel.description import Description
from ...store.totals import append_stats
from ..metadata import HypicMetadata, WorkerReport
from ..orders import OUTDATED, Order, OrderQueue, PushRecord, SaveRecord
from ..stats import HypicCounters
from .admission import Admission, ComposedRequest
from .delta_records import DeltaRecords
from .entries import Lookup
from .generated_prefixes import NO_DRAFTS, GeneratedPrefixes
from .growing import GrowingDirectory
from .island_runs import IslandRuns, whole_runs
from .missing_records import MissingRecords
from .outgoing import PendingPushes, Saves
from .pending_loads import PendingLoads
from .placement import PrefixPlacement, SegmentPlacement
from .planning import NO_TOKENIZER, Planner, PlanningTexts, PlanRequest
from .prefixes import Prefixes
from .retention import RecordState, Retention
from .segment_requests import SegmentRequest, SegmentRequests
from .stretches import Stretches
from .worker_view import RequestViews, WorkerView


@dataclass(frozen=True)
class PassStart:
    """Changes that the engine's scheduler makes before it schedules a pass."""

    segment_requests: list[SegmentRequest]
    """New requests, for the segments to compute."""
    restarted: Mapping[str, PromptPlan]
    """New plans of requests that have not run, by request id: their own prefixes are captured as they run."""
    raised: Mapping[str, int]
    """New priorities by request id, as more urgent requests wait for these requests' records."""


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
        self.admission = Admission(self.directory, self.segment_requests, config.max_tenant_fraction)
        self.delta_records = DeltaRecords(
            self.directory, self._view, self._orders, geometry, prefill_flops, has_tiers=has_tiers
        )
        prefixes = PrefixPlacement(config, geometry, prefill_flops)
        self.prefixes = Prefixes(self.directory, self.admission, need, prefixes, self.delta_records.complete)
        awaited = 0.0 if config.segment_parallel is None else config.segment_parallel.max_awaited_fraction
        share = self.directory.total.part(awaited)
        self.loads = PendingLoads(self._orders, tiers=config.store.tiers, ranks=ranks, share=share)
        self._pushes, self._saves = PendingPushes(self._orders, ranks), Saves(ranks)
        stored, grown = self.delta_records if has_tiers else None, self.planner.need_grown
        self.generated = GeneratedPrefixes(
            self.directory, self.admission, grown, prefixes, stored, on=keeps_answers
        )
        place = None if stored is None else stored.place
        self.views = RequestViews(self.admission, self.segment_requests, self._view, place)
        self.counters, self._evictions = HypicCounters(), 0
        self.missing = MissingRecords(
            self.directory,
            geometry,
            self.admission,
            self.segment_requests,
            self.prefixes,
            self.loads,
            Stretches(self.directory, need, segments.kept),
            self._view,
            self.retention,
            self.delta_records,
            self._orders,
            self.counters,
            has_tiers=has_tiers,
        )
        self._held: set[str] = set()
        self._ended_early = False
        """A request ended early since the last :meth:`take_unwanted`."""
        self._news = False
        """A load has ended since the last :meth:`begin_pass`."""
        self.worker_unfinished = False
        """Workers are copying records, and need steps even when no request runs."""

    @property
    def ids(self) -> PrimitiveIds:
        """Ids of the primitives; the first use loads the tokenizer."""
        return self.planner.ids

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

    def plan(self, request: PlanRequest) -> PromptPlan | None:
        """Return the plan of a request; ``None``: vLLM computes it as any ordinary request.  Changes nothing.
        Raises ``LinkError`` or ``PromptError`` if the request asks for something impossible."""
        plan = self.planner.plan(request)
        return self.planner.plan_prefix(request) if plan is None and request.may_record_prefix() else plan

    def spec(self, extra_args: Mapping[str, Any] | None, n_tokens: int) -> RequestSpec:
        """See :meth:`.Planner.spec`."""
        return self.planner.spec(extra_args, n_tokens)

    def count_found(self, found: FoundSegments) -> None:
        """Count the pieces of a prompt in which the front end looked for segments, by their outcomes."""
        self.counters.count(found.mode, **found.counts)

    def admit(
        self,
        request_id: str,
        plan: PromptPlan,
        transfer: Transfer = NO_TRANSFER,
        *,
        tenant: str = "",
        mode: str = "separators",
        priority: int = 0,
        max_tokens: int | None = None,
    ) -> None:
        """Take a planned request in; the request then waits until its records are resident.

        ``priority``: requests with smaller values get room sooner.  ``tenant``: its requests share one part
        of the pool.  ``mode``: the way in which the request's segments were found.  ``max_tokens``: the most
        tokens that the request may generate; ``None``: unknown.
        """
        wanted = {s.key: self.planner.need(s) for s in plan.records}
        islands = () if self.island_runs is None else self.island_runs.of(plan)
        self.admission.add(
            ComposedRequest(request_id, plan, wanted, transfer, tenant, priority, mode, islands)
        )
        if plan.segments and plan.segments[0].is_prefix:
            self.prefixes.asked(plan.segments[0])
            if max_tokens is not None:
                self.generated.expect(request_id, max_tokens)
        self.counters.requests += 1
        self.counters.count(mode, requests=1)
        self.counters.segments_queried += len(wanted)
        self.counters.seam_tokens += sum(s.head + s.tail for s in plan.segments)
        self.counters.island_tokens += sum(s.columns - s.reused for s in plan.segments if len(s.parts) > 1)

    def begin_pass(self) -> PassStart:
        """Give waiting requests room, and start to fetch, await or compute their missing records."""
        self._news = False
        self.retention.drop_expired()
        self.loads.give_up_late()
        started = self.missing.compute_incomplete()
        for composed, reserved in self.admission.admitted():
            started += self.missing.obtain(composed, reserved)
        if self.admission.no_room or self.admission.full:
            self.counters.pool_waits += 1
            self.generated.give_up(None if self.admission.no_room else self.admission.full)
            self.loads.give_up_unoffered()
        return PassStart(started, self.prefixes.take_begun(), self.admission.take_raised())

    # -- scheduling ----------------------------------------------------------------------------

    @property
    def awaits_records(self) -> bool:
        """Whether the engine can only wait for records on their way: workers copy no records, and no load
        has ended since the last :meth:`begin_pass`."""
        return bool(self.loads) and not self._news and not self.worker_unfinished

    @property
    def only_loads_matter(self) -> bool:
        """Whether arriving records alone require the next step: no record is, or may be, on its way to other
        instances or tiers."""
        return not (self._pushes or self.config.store.tiers)

    def is_internal(self, request_id: str) -> bool:
        return request_id in self.segment_requests

    def requesters_of(self, segment_requests: Iterable[str]) -> set[str]:
        """Return the requests that hold the records of these segment requests; other ids are ignored."""
        works = filter(None, map(self.segment_requests.work_of, segment_requests))
        return {composed.request_id for work in works for composed in self.admission.holders(work.entry)}

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

    def limit_pass(self, request_id: str, begin: int, end: int, *, generates: bool) -> int:
        """Return the token index, at most ``end``, at which a request's pass ends: in no island, and not
        where a draft ends a page.  ``generates``: the whole prompt is computed."""
        if generates:
            end = self.generated.pass_end(request_id, begin, end)
        composed = self.admission.requests.get(request_id)
        return end if composed is None else whole_runs(composed.islands, end)

    def end_pass(self, passes: Iterable[tuple[str, int, int]]) -> None:
        """Complete the records of prefixes that a finished pass has computed; ``passes``: as :func:`.passes`
        yields them."""
        if self.config.prefix != "stock":
            for request_id, _, end in passes:
                self.prefixes.passed(request_id, end)

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
            self.missing.ended(work, completed=completed)
            return
        composed = self.admission.end(request_id)
        if composed is not None:
            for entry in self.prefixes.end(composed):
                self.segment_requests.compute_later(entry)
            self._pushes.forget(request_id)
            if composed.undecided:
                self.loads.give_up_unwanted(self.admission.held)

    def take_unwanted(self) -> list[str]:
        """Return segment requests whose records no request needs any more; empty if no request ended early
        since the last call.  Call again after these end: segment requests wait for records, too."""
        if not self._ended_early:
            return []
        self._ended_early = False
        return self.segment_requests.unwanted(self.admission.pending_keys())

    # -- the worker ----------------------------------------------------------------------------

    @property
    def needs_step(self) -> bool:
        """Whether the workers need a step even when no request runs."""
        return self.retention.has_orders or self.delta_records.waits or self.worker_unfinished

    def instruct(
        self,
        metadata: HypicMetadata,
        passes: Iterable[tuple[str, int, int]] = (),
        drafts: Mapping[str, Sequence[int]] = NO_DRAFTS,
    ) -> None:
        """Put the slots and orders that came up since the last step into the worker's ``metadata``, and new
        captures of answers in the coming ``passes``, which end in ``drafts``."""
        metadata.grown = self.generated.scheduled(passes, drafts)
        metadata.dropped_slots, metadata.taken_slots = self.directory.slots.take_news()
        self.delta_records.order_checkpoints()
        self.retention.order_late_deletes()
        metadata.orders = [order for order in self._orders.take() if not self._has_left(order)]

    def _has_left(self, order: Order) -> bool:
        """Whether the order copies a record that has left the pool since the order came up.  By the time of
        the copy, another record may be in its place."""
        if not isinstance(order, SaveRecord | PushRecord):
            return False
        return self.directory.of_serial(order.place.serial) is None

    def introduce(self, metadata: HypicMetadata, request_id: str, *, with_prompt: bool) -> None:
        """Put the plans of a request about to run into ``metadata``; see :class:`.RequestViews`."""
        if (stream := self.views.stream_plan(request_id, with_prompt=with_prompt)) is not None:
            metadata.streams[request_id] = stream
        if captures := self.views.captures(request_id):
            metadata.captures[request_id] = captures

    def absorb(self, report: WorkerReport) -> None:
        """Take in the workers' report of a step."""
        self.worker_unfinished = report.unfinished > 0
        for serial, transition_blocks in report.transition_blocks.items():
            self.directory.shrink(serial, transition_blocks, self.geometry.transition_block_bytes)
        for serial in report.at_store:
            self.loads.at_store(serial)
        for serial, count in report.loads.items():
            self._news |= self.missing.arrived(serial, count)
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

    # -- reports -------------------------------------------------------------------------------

    def drop_expired(self) -> None:
        """Drop the records whose expiry time has passed, as the next pass would."""
        self.retention.drop_expired()

    def record_state(self, key: SegmentKey) -> RecordState:
        """Return the state of the record that users know by ``key``.  Changes nothing."""
        return self.retention.record_state(key)

    def watch_records(self) -> None:
        """Let :meth:`take_changes` report changes from now on."""
        self.directory.watch()

    def take_changes(self) -> Mapping[SegmentKey, Lookup]:
        """Return the new states of records that came, went or began since the last call."""
        return self.directory.take_changes()

    def describe(self, instance: str, models: tuple[str, ...], max_model_len: int) -> Description | None:
        """Return what a router needs to plan as this engine does; ``None`` without segment parallelism."""
        return self.planner.describe(instance, models, max_model_len, self.ranks)

    def take_counters(self) -> HypicCounters:
        """Return and reset the counters since the last call, with the pool's present levels."""
        counters, directory = self.counters.take(), self.directory
        counters.evictions = directory.evictions - self._evictions
        self._evictions = directory.evictions
        counters.pool_bytes_used = self.geometry.bytes_of(directory.used)
        counters.pool_bytes_capacity = self.geometry.nbytes
        counters.records = len(directory)
        counters.pinned = directory.pinned
        counters.waiting = sum(not self.resident(r) for r in self.admission.requests)
        return counters
