"""Scheduler half: admits requests, keeps the directory, says who may run.

Life of a composed request here: :meth:`admit` (plan, tokens become the stream) -> :meth:`pump`
(pins its records, has the missing ones fetched from the store or computed by segment requests) ->
:meth:`ready` -> :meth:`stream_plan` on its first step -> :meth:`finished` (unpin).
"""

from __future__ import annotations

import math
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace

import numpy as np

from ..config import HypicConfig
from ..primitives.keys import Namespace, Role, SegmentKey
from ..primitives.options import NO_TRANSFER, Transfer, link_of_request, transfer_of_request
from ..primitives.plan import CachedSegment, PoolLimits, PromptPlan, build_plan, parse_prompt
from ..primitives.policies import LinkError, ModelTraits
from ..primitives.tokens import PrimitiveIds
from ..store.eviction.make import make_policy
from ..store.protocol import StoreStats
from ..store.totals import append_stats, numbers_of, without_latencies
from ..store.worth import Worth
from .directory import Entry, Lookup, Need, SegmentDirectory, Space
from .geometry import PoolGeometry
from .metadata import (
    CapturePlan,
    ComposePoint,
    HypicMetadata,
    LoadCount,
    PushOrder,
    RecordPlace,
    StoreAction,
    StoreOrder,
    StreamPlan,
    WorkerReport,
)
from .stats import HypicCounters


@dataclass(frozen=True)
class Ask:
    """What the planner needs to know of a request."""

    token_ids: list[int]
    extra_args: dict | None
    salt: str | None
    lora: str | None


@dataclass(frozen=True)
class SegmentJob:
    """A segment that must be computed by an internal request, on behalf of ``for_request``: its dummies and
    its tokens up to the interior's end."""

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
    pushes: set[int] | None = None
    """Orders to push its records that have not ended; ``None``: not given yet."""
    push_faults: list[str] = field(default_factory=list)

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


class PinRefused(ValueError):
    """Pinning the record would leave too little of the pool to others."""


@dataclass(frozen=True)
class RecordState:
    """Where a record stands: complete in the pool, being made, or neither; its bytes there.  ``stored``: the
    store was given it by this engine, or found it (a tier may have evicted it since)."""

    resident: bool
    pending: bool
    nbytes: int
    stored: bool


@dataclass
class _Load:
    """A record being fetched from the store, or sent by another instance; how many ranks have said what."""

    key: SegmentKey
    count: LoadCount = field(default_factory=LoadCount)
    remote: bool = False
    until: float = math.inf
    """Monotonic time at which waiting for another instance ends."""


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
        self._primitive_ids = primitive_ids
        self._ids: PrimitiveIds | None = None
        self._prefill_flops, self._ranks = prefill_flops, ranks
        self.directory = SegmentDirectory(
            geometry.pages,
            geometry.slots,
            geometry.page_tokens,
            geometry.tiles,
            policy=make_policy(config.store.eviction, "always"),  # what is asked for must be in the pool
        )
        self.counters = HypicCounters()
        self._composed: dict[str, _Composed] = {}
        self._pending: OrderedDict[str, None] = OrderedDict()
        self._captures: dict[str, _Capture] = {}
        self._lost: list[SegmentKey] = []
        self._loading: dict[int, _Load] = {}
        self._to_load: list[RecordPlace] = []
        self._orders: list[StoreOrder] = []
        self._to_await: list[RecordPlace] = []
        self._to_unawait: list[int] = []
        self._unneeded: list[tuple[SegmentKey, int]] = []
        self._to_push: list[PushOrder] = []
        self._pushes = 0
        self._store: StoreStats | None = None
        self._stored: set[SegmentKey] = set()
        self._expiry: dict[SegmentKey, float] = {}
        self._dropping: set[SegmentKey] = set()
        """Dropped while they were being made or used."""
        self._jobs = 0
        self._held: set[str] = set()

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
            total.tiles - kept.tiles,
            self.geometry.record_tiles,
            self.directory.kept,
        )

    def transfer(self, ask: Ask) -> Transfer:
        """What a request says of other instances.  Changes nothing; raises ``LinkError``."""
        parallel = self.config.segment_parallel
        longest_s = None if parallel is None else parallel.deadline_s
        return transfer_of_request(ask.extra_args, longest_s=longest_s)

    def admit(self, request_id: str, plan: PromptPlan, transfer: Transfer = NO_TRANSFER) -> None:
        """Take a planned request in; it waits until its records are resident."""
        wanted = {s.key: self._need(s) for s in plan.segments}
        self._composed[request_id] = _Composed(plan, wanted, transfer=transfer)
        self._pending[request_id] = None
        self.counters.requests += 1
        self.counters.segments_queried += len(wanted)
        self.counters.seam_tokens += sum(s.head + s.tail for s in plan.segments)

    def _need(self, segment: CachedSegment) -> Need:
        """At most one tile per head of every linear layer; nothing stands before a leading segment."""
        leading = segment.role is Role.LEADING
        need = Need(segment.columns, 0 if leading else self.geometry.record_tiles)
        nbytes = self._bytes(self.directory.space_for(need))
        return replace(need, worth=Worth(segment.columns, self._prefill_flops(segment.stop), nbytes))

    def pump(self) -> list[SegmentJob]:
        """Pin records for waiting requests, first come first served, and list the segments to compute.

        Strictly in order: nobody overtakes a request that waits for room, so it cannot starve, and
        every plan fits the empty pool, so it cannot wait for ever.
        """
        self._drop_expired()
        self._give_up_waiting()
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
                if entry.key in composed.transfer.remote:
                    self._await(entry, composed)
                elif self.config.store.tiers:
                    self._fetch(entry, composed)
                else:
                    composed.fresh.add(entry.key)
                    jobs.append(self._job(entry.key, request_id))
            self._decline(composed, {e.key for e in reserved})
            if not composed.undecided:
                self._count(composed)
        return jobs

    def _decline(self, composed: _Composed, reserved: set[SegmentKey]) -> None:
        """Whoever sends a record that nobody awaits here is told so."""
        awaited = {load.key for load in self._loading.values() if load.remote}
        for key in composed.transfer.remote & composed.wanted.keys() - reserved - awaited:
            self._unneeded.append((key, self.directory.get(key).slot))

    def _fetch(self, entry: Entry, composed: _Composed) -> None:
        """Ask the worker for a record; what the store does not have is computed after all."""
        composed.undecided.add(entry.key)
        self._loading[entry.serial] = _Load(entry.key)
        self._to_load.append(self._place(entry, composed.role_of(entry.key)))

    def _await(self, entry: Entry, composed: _Composed) -> None:
        """Let the worker take a record from whoever sends it; what does not come is computed after all."""
        composed.undecided.add(entry.key)
        until = time.monotonic() + composed.transfer.remote_deadline_s
        self._loading[entry.serial] = _Load(entry.key, remote=True, until=until)
        self._to_await.append(self._place(entry, composed.role_of(entry.key)))

    def _give_up_waiting(self) -> None:
        """Of awaited records, for those whose time is over; the worker reports them like any load."""
        now = time.monotonic()
        for serial, load in self._loading.items():
            if now >= load.until:
                load.until = math.inf
                self._to_unawait.append(serial)

    @property
    def awaiting(self) -> bool:
        """Whether records are on their way from other instances, and none from the store."""
        return any(load.remote for load in self._loading.values()) and all(
            load.remote for load in self._loading.values()
        )

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
        tokens = [dummy] * segment.dummies + list(segment.tokens[: segment.stop])
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
        if composed.pushes is None:
            composed.pushes = set()
            for key in composed.wanted:
                self._pushes += 1
                composed.pushes.add(self._pushes)
                place = self._place(self.directory.get(key), composed.role_of(key))
                self._to_push.append(PushOrder(self._pushes, place, to, composed.transfer.push_deadline_s))
        return not composed.pushes

    def push_fault(self, request_id: str) -> str | None:
        """Why a record of the request was not delivered; ``None``: all were, or none had to be."""
        composed = self._composed.get(request_id)
        return composed.push_faults[0] if composed is not None and composed.push_faults else None

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
        lo = segment.dummies + segment.head
        positions = None
        if segment.offsets is not None:
            offsets = np.asarray(segment.offsets[: segment.stop], dtype=np.int64) + segment.dummies
            positions = np.concatenate([np.arange(segment.dummies, dtype=np.int64), offsets])
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
            entry.worth.tokens,
            entry.worth.flops,
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
            if composed.acquired:
                self.directory.release(composed.wanted)
            if composed.undecided:
                self._wait_no_longer()

    def _wait_no_longer(self) -> None:
        """For records of other instances that no request wants now: their room is given back."""
        wanted = {key for c in self._composed.values() if c.acquired for key in c.wanted}
        for load in self._loading.values():
            if load.remote and load.key not in wanted:
                load.until = min(load.until, 0.0)

    # -- the store -----------------------------------------------------------------------------

    def instruct(self, metadata: HypicMetadata) -> None:
        """Give the worker the loads and orders that came up since the last step."""
        metadata.dropped_slots = self.directory.take_dropped_slots()
        # A record that was being made or used when it was dropped may have reached the store since.
        for key in self._gone():
            self._dropping.discard(key)
            self._order(StoreAction.DELETE, key)
        metadata.loads, self._to_load = self._to_load, []
        metadata.orders, self._orders = self._orders, []
        metadata.awaited, self._to_await = self._to_await, []
        metadata.unneeded, self._unneeded = self._unneeded, []
        metadata.unawaited, self._to_unawait = self._to_unawait, []
        metadata.pushes, self._to_push = self._to_push, []

    @property
    def has_orders(self) -> bool:
        """Whether the worker must be stepped although no request runs."""
        return bool(self._orders or self._gone())

    def _gone(self) -> list[SegmentKey]:
        return [k for k in self._dropping if self.directory.lookup(k) is Lookup.MISS]

    def absorb(self, report: WorkerReport) -> None:
        """Take in what the worker says of a step."""
        for serial, tiles in report.tiles.items():
            self.directory.shrink(serial, tiles, self.geometry.tile_bytes)
        for serial, count in report.loads.items():
            self._loaded(serial, count)
        self._stored |= report.handed
        for number, fault in report.pushed.items():
            self._pushed(number, fault)
        if report.store is not None:
            # The metrics have the latencies.
            self._store = append_stats(self._store, without_latencies(report.store))
            self.counters.store = append_stats(self.counters.store, report.store)

    def _loaded(self, serial: int, count: LoadCount) -> None:
        load = self._loading[serial]
        load.count += count
        if load.count.taken + load.count.missed < self._ranks:
            return
        del self._loading[serial]
        found = not load.count.missed
        self._decide(load.key, found=found)
        if load.remote:
            self.counters.segments_landed += found
            self.counters.segments_unlanded += not found
        elif found:
            self._stored.add(load.key)
            self.counters.segments_loaded += 1
        if found:
            self.directory.commit(load.key)
        else:
            self._stored.discard(load.key)
            self._lost.append(load.key)

    def _pushed(self, number: int, fault: str) -> None:
        self.counters.segments_pushed += not fault
        self.counters.segments_unpushed += bool(fault)
        for composed in self._composed.values():
            if composed.pushes and number in composed.pushes:
                composed.pushes.discard(number)
                if fault:
                    composed.push_faults.append(fault)

    def pin_record(self, key: SegmentKey) -> None:
        """The record never leaves, neither the pool nor the store; also when it comes later.

        Raises :class:`PinRefused` when pinned records would take more of the pool than
        ``max_pinned_fraction``.
        """
        entry = self.directory.get(key) if self.directory.lookup(key) is not Lookup.MISS else None
        if entry is not None and key not in self.directory.kept:
            total, kept = self.directory.total, self.directory.kept_space() + entry.space
            share = self.config.max_pinned_fraction
            if not Space(int(total.pages * share), int(total.slots * share), int(total.tiles * share)).covers(
                kept
            ):
                raise PinRefused(
                    f"pinned records would take {self._bytes(kept)} bytes of the pool's "
                    f"{self.geometry.nbytes}: at most {share:.0%} of its pages, state slots and tiles may "
                    "be pinned; unpin others, or raise max_pinned_fraction or pool_bytes"
                )
        self.directory.keep(key)
        self._order(StoreAction.PIN, key)

    def unpin_record(self, key: SegmentKey) -> None:
        """Undo :meth:`pin_record`."""
        self.directory.unkeep(key)
        self._order(StoreAction.UNPIN, key)

    def drop_record(self, key: SegmentKey) -> None:
        """Forget the record: in the store at once, in the pool as soon as no request uses it."""
        self._expiry.pop(key, None)
        self.directory.unkeep(key)
        if self.directory.lookup(key) is not Lookup.MISS:
            self._dropping.add(key)
        self.directory.discard(key)
        self._stored.discard(key)
        self._order(StoreAction.DELETE, key)

    def expire_record(self, key: SegmentKey, at: float | None) -> None:
        """The record is dropped at Unix time ``at``; ``None``: never."""
        self._expiry.pop(key, None)
        if at is not None:
            self._expiry[key] = at
        self._order(StoreAction.EXPIRE, key, at)

    def _drop_expired(self) -> None:
        now = time.time()
        for key in [k for k, at in self._expiry.items() if at <= now]:
            self.drop_record(key)

    def record_state(self, key: SegmentKey) -> RecordState:
        """Changes nothing."""
        found = self.directory.lookup(key)
        if found is Lookup.MISS:
            return RecordState(resident=False, pending=False, nbytes=0, stored=key in self._stored)
        nbytes = self._bytes(self.directory.get(key).space)
        return RecordState(found is Lookup.HIT, found is Lookup.PENDING, nbytes, key in self._stored)

    def _order(self, action: StoreAction, key: SegmentKey, at: float | None = None) -> None:
        if self.config.store.tiers:
            self._orders.append(StoreOrder(action, key, at))

    def reset(self) -> bool:
        """Forget every record that no request uses, in the store as well.  True when none is left."""
        self.directory.drop_unpinned()
        if self.config.segment_parallel is not None or self.config.store.tiers:
            self._orders.append(StoreOrder(StoreAction.CLEAR))
        if self.config.store.tiers:
            self._orders += [StoreOrder(StoreAction.PIN, key) for key in self.directory.kept]
            self._stored.clear()
        return len(self.directory) == 0

    def close(self) -> None:
        """The engine ends."""
        self.directory.policy.close()

    # -- reports -------------------------------------------------------------------------------

    @property
    def pool_bytes_used(self) -> int:
        """Bytes of the public pool that records hold."""
        directory = self.directory
        return self._bytes(
            Space(
                directory.total_pages - directory.free_pages,
                directory.total_slots - directory.free_slots,
                directory.total_tiles - directory.free_tiles,
            )
        )

    def _bytes(self, space: Space) -> int:
        geometry = self.geometry
        return (
            space.pages * geometry.page_bytes
            + space.slots * geometry.slot_bytes
            + space.tiles * geometry.tile_bytes
        )

    def store_stats(self) -> dict[str, dict[str, float]]:
        """By tier: what it counted since the start, and its levels as last reported; empty without a store
        and until it has been heard of."""
        return {} if self._store is None else {n: numbers_of(t) for n, t in self._store.tiers.items()}

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
