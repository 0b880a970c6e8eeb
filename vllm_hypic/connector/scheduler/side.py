"""Scheduler half: admits requests, keeps the directory, says who may run.

Life of a composed request here: :meth:`admit` (plan, tokens become the stream) -> :meth:`pump`
(pins its records, has the missing ones fetched from the store or computed by segment requests) ->
:meth:`ready` -> :meth:`stream_plan` on its first step -> :meth:`finished` (unpin).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace

import numpy as np

from ...config.engine import HypicConfig
from ...pool.geometry import PoolGeometry
from ...pool.plans import CapturePlan, ComposePoint, RecordPlace, Space, StreamPlan
from ...primitives.keys import Namespace, Role, SegmentKey
from ...primitives.options import NO_TRANSFER, Transfer, link_of_request, transfer_of_request
from ...primitives.plan import CachedSegment, PoolLimits, PromptPlan, build_plan, parse_prompt
from ...primitives.policies import LinkError, ModelTraits
from ...primitives.tokens import PrimitiveIds
from ...store.cache_value import CacheValue
from ...store.eviction import make_policy
from ...store.shared import shared_tiers
from ...store.totals import append_stats
from ..metadata import NIXL, HypicMetadata, LoadCount, WorkerReport
from ..stats import HypicCounters
from .directory import Entry, Lookup, Need, SegmentDirectory
from .loads import Loads
from .pushes import Pushes
from .retention import Upkeep


@dataclass(frozen=True)
class Ask:
    """What the planner needs to know of a request."""

    token_ids: list[int]
    extra_args: dict | None
    salt: str | None
    lora: str | None


@dataclass(frozen=True)
class SegmentJob:
    """A segment that must be computed by an internal request, on behalf of ``for_request``: what it is
    computed behind, and its tokens up to the interior's end."""

    request_id: str
    token_ids: list[int]
    for_request: str


@dataclass
class _Composed:
    """A request with records; written by :class:`SchedulerSide` only."""

    plan: PromptPlan
    wanted: dict[SegmentKey, Need]
    acquired: bool = False
    fresh: set[SegmentKey] = field(default_factory=set)
    """Records that this request itself had to have computed."""
    undecided: set[SegmentKey] = field(default_factory=set)
    """Records that this request asked the store or other instances for, and that may yet have to be
    computed."""
    transfer: Transfer = NO_TRANSFER

    @property
    def hit_tokens(self) -> int:
        return sum(s.columns for s in self.plan.segments if s.key not in self.fresh)

    def role_of(self, key: SegmentKey) -> Role:
        return next(s.role for s in self.plan.segments if s.key == key)


@dataclass(frozen=True)
class _Capture:
    """A segment request under way."""

    key: SegmentKey
    segment: CachedSegment


class SchedulerSide:
    """Plans, directory and internal segment requests of one engine."""

    def __init__(
        self,
        config: HypicConfig,
        geometry: PoolGeometry,
        namespace: Namespace,
        max_model_len: int,
        primitive_ids: Callable[[], PrimitiveIds],
        prefill_flops: Callable[[int], float] = float,
        ranks: int = 1,
    ) -> None:
        """``prefill_flops(tokens)``: what prefilling a segment costs; ``ranks``: workers that each have a
        part of every record."""
        self.config, self.geometry, self.namespace = config, geometry, namespace
        self.max_model_len = max_model_len
        self.shared_tiers = tuple(shared_tiers(config.store))
        """Identities of the tiers that other engines use, too; fastest first."""
        self._primitive_ids = primitive_ids
        self._ids: PrimitiveIds | None = None
        self._prefill_flops = prefill_flops
        self.directory = SegmentDirectory(
            geometry.pages,
            geometry.slots,
            geometry.page_tokens,
            geometry.transition_blocks,
            policy=make_policy(config.store.eviction, "always"),  # what is asked for must be in the pool
        )
        self.upkeep = Upkeep(config, geometry, self.directory)
        self.counters = HypicCounters()
        self._loads, self._pushes = Loads(ranks), Pushes()
        self._news = False
        """A load has ended since the last :meth:`pump`."""
        self._composed: dict[str, _Composed] = {}
        self._pending: OrderedDict[str, None] = OrderedDict()
        self._captures: dict[str, _Capture] = {}
        self._lost: list[SegmentKey] = []
        self._unneeded: list[tuple[SegmentKey, int]] = []
        self._jobs = 0
        self._held: set[str] = set()
        self.worker_unfinished = False
        """Workers copy records, and must be stepped although no request runs."""

    # -- admission -----------------------------------------------------------------------------

    @property
    def ids(self) -> PrimitiveIds:
        """Ids of the primitives; the tokenizer is loaded at the first request."""
        if self._ids is None:
            self._ids = self._primitive_ids()
        return self._ids

    @property
    def traits(self) -> ModelTraits:
        return ModelTraits(has_linear=bool(self.geometry.linear), has_attention=bool(self.geometry.attention))

    def plan(self, ask: Ask) -> PromptPlan | None:
        """Plan a request; ``None`` when it has no primitives.  Changes nothing.

        Raises ``LinkError`` or ``PromptError`` when it asks for something impossible.
        """
        if not self.ids.contains(ask.token_ids):
            return None
        method = link_of_request(
            ask.extra_args, default_link=self.config.link, default_seam=self.config.seam_tokens
        )
        if reason := method.refused_by(self.traits):
            raise LinkError(reason)
        return build_plan(
            parse_prompt(ask.token_ids, self.ids),
            method,
            self.namespace.scoped(salt=ask.salt, lora=ask.lora),
            self.limits(),
            min_segment_tokens=self.config.min_segment_tokens,
            kept=self.directory.kept,
        )

    @property
    def quadratic(self) -> float:
        """What attention adds to a prefill: n tokens take FLOPs in proportion to ``n + quadratic * n^2``."""
        n = 4096
        once, twice = self._prefill_flops(n), self._prefill_flops(2 * n)
        square = (twice - 2 * once) / (2 * n * n)
        return max(0.0, square / (once / n - square * n))

    def limits(self) -> PoolLimits:
        """What a request may take: everything but what records hold that nobody may evict."""
        kept, total = self.directory.kept_space(), self.directory.total
        return PoolLimits(
            total.pages - kept.pages if self.geometry.attention else 1 << 60,
            total.slots - kept.slots,
            self.geometry.page_tokens,
            self.max_model_len - 1,
            total.transition_blocks - kept.transition_blocks,
            self.geometry.record_transition_blocks,
        )

    def transfer(self, ask: Ask) -> Transfer:
        """What a request says of other instances.  Changes nothing; raises ``LinkError``."""
        parallel = self.config.segment_parallel
        longest_s = None if parallel is None else parallel.deadline_s
        return transfer_of_request(ask.extra_args, longest_s=longest_s, shared=self.shared_tiers)

    def admit(self, request_id: str, plan: PromptPlan, transfer: Transfer = NO_TRANSFER) -> None:
        """Take a planned request in; it waits until its records are resident."""
        wanted = {s.key: self._need(s) for s in plan.segments}
        self._composed[request_id] = _Composed(plan, wanted, transfer=transfer)
        self._pending[request_id] = None
        self.counters.requests += 1
        self.counters.segments_queried += len(wanted)
        self.counters.seam_tokens += sum(s.head + s.tail for s in plan.segments)

    def _need(self, segment: CachedSegment) -> Need:
        """At most one transition block per head of linear layers; nothing stands before a leading segment."""
        leading = segment.role is Role.LEADING
        need = Need(segment.columns, 0 if leading else self.geometry.record_transition_blocks)
        nbytes = self.geometry.bytes_of(self.directory.space_for(need))
        return replace(need, value=CacheValue(segment.columns, self._prefill_flops(segment.stop), nbytes))

    def pump(self) -> list[SegmentJob]:
        """Pin records for waiting requests, first come first served, and list the segments to compute.

        Strictly in order: nobody overtakes a request that waits for room, so it cannot starve, and
        every plan fits the empty pool, so it cannot wait for ever.
        """
        self._news = False
        self.upkeep.drop_expired()
        self._loads.give_up_late()
        jobs = [self._job(key, owner) for key, owner in self._take_lost()]
        for request_id in list(self._pending):
            composed = self._composed[request_id]
            before = {k: self.directory.lookup(k) for k in composed.wanted}
            reserved = self.directory.acquire(composed.wanted)
            if reserved is None:
                self.counters.pool_waits += 1
                break
            del self._pending[request_id]
            composed.acquired = True
            self.counters.segments_hit += sum(v is not Lookup.MISS for v in before.values())
            for entry in reserved:
                place = self._place(entry, composed.role_of(entry.key))
                if entry.key in composed.transfer.remote:
                    composed.undecided.add(entry.key)
                    self._loads.await_remote(place, composed.transfer.remote_deadline_s)
                elif self.config.store.tiers:
                    composed.undecided.add(entry.key)
                    self._loads.fetch(place)
                else:
                    composed.fresh.add(entry.key)
                    jobs.append(self._job(entry.key, request_id))
            self._decline(composed, {e.key for e in reserved})
            if not composed.undecided:
                self._count(composed)
        return jobs

    def _decline(self, composed: _Composed, reserved: set[SegmentKey]) -> None:
        """Whoever sends a record that nobody awaits here is told so."""
        unreserved = composed.transfer.remote & composed.wanted.keys() - reserved
        for key in unreserved - self._loads.awaited():
            self._unneeded.append((key, self.directory.get(key).slot))

    @property
    def awaiting(self) -> bool:
        """Whether there is nothing to do but to wait for records of other instances: none comes from the
        store, workers copy none, and of none it became known since the last :meth:`pump` that it is here, or
        will not come."""
        return self._loads.awaiting and not self._news and not self.worker_unfinished

    @property
    def only_receiving(self) -> bool:
        """Whether, of records, only one that lands asks for the next step: none goes to other instances, or
        may be on its way to tiers."""
        return not (self._pushes or self.config.store.tiers)

    def _count(self, composed: _Composed) -> None:
        """It is known which of the request's records were reused."""
        self.counters.tokens_reused += composed.hit_tokens
        self.counters.tokens_computed += composed.plan.n_logical - composed.hit_tokens

    def _decide(self, key: SegmentKey, *, found: bool) -> None:
        """The store has answered."""
        for composed in self._composed.values():
            if key in composed.undecided:
                composed.undecided.discard(key)
                self.counters.segments_hit += found
                if not found:
                    composed.fresh.add(key)
                if not composed.undecided:
                    self._count(composed)

    def _take_lost(self) -> list[tuple[SegmentKey, str]]:
        """Records whose segment request died and for which a request still waits."""
        lost, self._lost = self._lost, []
        waiting = []
        for key in lost:
            owner = next((r for r, c in self._composed.items() if c.acquired and key in c.wanted), None)
            if owner is not None:
                waiting.append((key, owner))
            else:
                self.directory.abort(key)
        return waiting

    def _job(self, key: SegmentKey, owner: str) -> SegmentJob:
        segment = next(s for s in self._composed[owner].plan.segments if s.key == key)
        self._jobs += 1
        request_id = f"hypic-segment-{key[:16]}-{self._jobs}"
        self._captures[request_id] = _Capture(key, segment)
        self.counters.segments_computed += 1
        dummy = segment.tokens[0] if self.config.dummy_token is None else self.config.dummy_token
        tokens = [*([dummy] * segment.dummies), *segment.anchor, *segment.tokens[: segment.stop]]
        return SegmentJob(request_id, tokens, owner)

    # -- scheduling ----------------------------------------------------------------------------

    def is_internal(self, request_id: str) -> bool:
        return request_id in self._captures

    def plan_of(self, request_id: str) -> PromptPlan | None:
        composed = self._composed.get(request_id)
        return None if composed is None else composed.plan

    def hit_tokens(self, request_id: str) -> int:
        """Prompt tokens read from records that the request did not have to have computed."""
        composed = self._composed.get(request_id)
        return 0 if composed is None else composed.hit_tokens

    def ready(self, request_id: str) -> bool:
        """Whether the request may be scheduled now."""
        return request_id not in self._held and self.resident(request_id)

    def hold(self, request_id: str) -> None:
        """Never let this request be scheduled (warm-up prompts, refused ones)."""
        self._held.add(request_id)

    def unhold(self, request_id: str) -> None:
        self._held.discard(request_id)

    def resident(self, request_id: str) -> bool:
        """Whether every record of the request is resident (requests without records always are)."""
        composed = self._composed.get(request_id)
        if composed is None:
            return True
        return composed.acquired and all(self.directory.lookup(k) is Lookup.HIT for k in composed.wanted)

    def over(self, request_id: str) -> bool:
        """Of a request that is never scheduled: its records are resident, and delivered where it says so.

        The first call after they are resident starts the delivery.
        """
        composed = self._composed.get(request_id)
        if composed is None:
            return True
        if not self.resident(request_id):
            return False
        to = composed.transfer.push_to
        if to is None:
            return True
        if not self._pushes.started(request_id):
            places = [self._place(self.directory.get(k), composed.role_of(k)) for k in composed.wanted]
            self._pushes.start(request_id, places, to, composed.transfer.push_deadline_s)
        return self._pushes.over(request_id)

    def push_fault(self, request_id: str) -> str | None:
        """Why a record of the request was not delivered; ``None``: all were, or none had to be."""
        return self._pushes.fault(request_id)

    def stream_plan(self, request_id: str) -> StreamPlan | None:
        """The worker's view of a composed request that is about to run."""
        composed = self._composed.get(request_id)
        if composed is None:
            return None
        plan = composed.plan
        entries = [self.directory.get(s.key) for s in plan.segments]
        slots = [self._column_slots(e) for e in entries]
        offsets = [np.asarray(s.interior_offsets(), dtype=np.int64) + s.start for s in plan.segments]
        return StreamPlan(
            positions=np.asarray(plan.positions, dtype=np.int64),
            n_logical=plan.n_logical,
            points=tuple(
                ComposePoint(s.compose_at, e.slot, s.columns, replace_state=s.role is Role.LEADING)
                for s, e in zip(plan.segments, entries, strict=True)
            ),
            column_slots=_concatenate(slots),
            column_positions=_concatenate(offsets),
            use_transition=plan.method.use_transition,
        )

    def capture_plan(self, request_id: str) -> CapturePlan | None:
        """The worker's view of a segment request that is about to run."""
        capture = self._captures.get(request_id)
        if capture is None:
            return None
        segment, entry = capture.segment, self.directory.get(capture.key)
        lo = segment.before + segment.head
        positions = None
        if segment.offsets is not None:
            offsets = np.asarray(segment.offsets[: segment.stop], dtype=np.int64) + segment.before
            positions = np.concatenate([np.arange(segment.before, dtype=np.int64), offsets])
        return CapturePlan(
            lo=lo,
            hi=lo + segment.columns,
            slot=entry.slot,
            column_slots=self._column_slots(entry),
            positions=positions,
            leading=segment.role is Role.LEADING,
            serial=entry.serial,
            stored=self._place(entry, segment.role) if self.config.store.tiers else None,
        )

    def _place(self, entry: Entry, role: Role) -> RecordPlace:
        return RecordPlace(
            entry.serial,
            entry.key,
            entry.slot,
            self._column_slots(entry),
            role is Role.LEADING,
            entry.value.tokens,
            entry.value.flops,
        )

    def _column_slots(self, entry: Entry) -> np.ndarray:
        page = self.geometry.page_tokens
        if not self.geometry.attention:
            return np.zeros(entry.columns, dtype=np.int64)
        starts = np.asarray(entry.pages, dtype=np.int64)[:, None] * page
        return (starts + np.arange(page)).reshape(-1)[: entry.columns]

    def finished(self, request_id: str, *, completed: bool) -> None:
        """A request is over.  ``completed``: it ran to its end (a segment request's record is whole)."""
        capture = self._captures.pop(request_id, None)
        if capture is not None:
            if completed:
                self.directory.commit(capture.key)
            elif self.directory.abort(capture.key):
                self._lost.append(capture.key)
            return
        composed = self._composed.pop(request_id, None)
        if composed is not None:
            self._pending.pop(request_id, None)
            self._pushes.forget(request_id)
            if composed.acquired:
                self.directory.release(composed.wanted)
            if composed.undecided:
                others = (c for c in self._composed.values() if c.acquired)
                self._loads.give_up_unwanted({key for c in others for key in c.wanted})

    # -- the worker ----------------------------------------------------------------------------

    def instruct(self, metadata: HypicMetadata) -> None:
        """Give the worker what came up since the last step."""
        metadata.dropped_slots = self.directory.take_dropped_slots()
        metadata.orders = self.upkeep.take_orders()
        orders = self._loads.take_orders()
        metadata.loads, metadata.awaited, metadata.unawaited = orders.loads, orders.awaited, orders.unawaited
        metadata.unneeded, self._unneeded = self._unneeded, []
        metadata.pushes = self._pushes.take_orders()

    def absorb(self, report: WorkerReport) -> None:
        """Take in what the worker says of a step."""
        self.worker_unfinished = report.unfinished > 0
        for serial, transition_blocks in report.transition_blocks.items():
            self.directory.shrink(serial, transition_blocks, self.geometry.transition_block_bytes)
        for serial in report.fetching:
            self._loads.at_store(serial)
        for serial, count in report.loads.items():
            self._loaded(serial, count)
        self.upkeep.stored(report.handed)
        for number, fault in report.pushed.items():
            self.counters.segments_pushed += not fault
            self.counters.segments_unpushed += bool(fault)
            self._pushes.reported(number, fault)
        if report.store is not None:
            self.upkeep.absorb(report.store)
            self.counters.store = append_stats(self.counters.store, report.store)

    def _loaded(self, serial: int, count: LoadCount) -> None:
        load = self._loads.reported(serial, count)
        if load is None:
            return
        self._news = True
        self._decide(load.key, found=load.found)
        sent = load.remote and not load.at_store
        if load.remote:
            self.counters.segments_landed += load.found and sent
            self.counters.segments_landed_nixl += load.found and sent and load.count.tier == NIXL
            self.counters.segments_unlanded += not load.found
        if load.found and not sent:
            self.upkeep.stored([load.key])
            self.counters.segments_loaded += 1
        if load.found:
            self.directory.shrink(serial, load.count.transition_blocks, self.geometry.transition_block_bytes)
            self.directory.commit(load.key)
        else:
            self.upkeep.not_stored(load.key)
            self._lost.append(load.key)

    def close(self) -> None:
        """The engine ends."""
        self.directory.policy.close()

    # -- reports -------------------------------------------------------------------------------

    @property
    def pool_bytes_used(self) -> int:
        """Bytes of the public pool that records hold."""
        directory = self.directory
        return self.geometry.bytes_of(
            Space(
                directory.total_pages - directory.free_pages,
                directory.total_slots - directory.free_slots,
                directory.total_transition_blocks - directory.free_transition_blocks,
            )
        )

    def take_counters(self) -> HypicCounters:
        """Counters since the last call, with the pool's present state."""
        counters, self.counters = self.counters, HypicCounters()
        directory = self.directory
        counters.evictions, directory.evictions = directory.evictions, 0
        counters.pool_bytes_used = self.pool_bytes_used
        counters.pool_bytes_capacity = self.geometry.nbytes
        counters.records = len(directory)
        counters.pinned = directory.pinned
        counters.waiting = sum(not self.resident(r) for r in self._composed)
        return counters


def _concatenate(parts: Iterable[np.ndarray]) -> np.ndarray:
    parts = list(parts)
    return np.concatenate(parts) if parts else np.zeros(0, dtype=np.int64)
