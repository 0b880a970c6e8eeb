"""An engine around the real scheduler side: a simulated worker, tiers that outlive it, a clock to be set."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, replace
from enum import Enum
from types import ModuleType

from vllm_hypic.config.engine import HypicConfig
from vllm_hypic.connector.metadata import HypicMetadata, WorkerReport
from vllm_hypic.connector.scheduler import pending_loads, retention
from vllm_hypic.connector.scheduler.connector import SchedulerConnector
from vllm_hypic.connector.scheduler.entries import Entry
from vllm_hypic.connector.scheduler.planning import PlanningTexts, PlanRequest
from vllm_hypic.connector.scheduler.retention import PinRefused
from vllm_hypic.pool.plans import CapturePlan, Space
from vllm_hypic.primitives.keys import Namespace, Role, SegmentKey
from vllm_hypic.primitives.options import Transfer
from vllm_hypic.primitives.plan import CachedSegment, PromptPlan
from vllm_hypic.primitives.tokens import PrimitiveIds
from vllm_hypic.store.eviction.policy import PolicyName

from .simulated_worker import PAGE, Content, Worker
from .turns import Turns
from .vocabulary import QUERY, TEXT, WHOLE, Vocabulary

IDS = PrimitiveIds(sep=1000, pdep=1001, pad=1002)
PARALLEL = {"listen": "tcp://127.0.0.1:7100", "events": "tcp://127.0.0.1:7101", "deadline_s": 60.0}
STORE = {"tiers": [{"type": "memory", "bytes": 1 << 20}]}


class Clock(ModuleType):
    """Stands where modules of the scheduler side import ``time``."""

    now = 1000.0

    def time(self) -> float:
        return self.now

    monotonic = time


CLOCKED = (pending_loads, retention)
"""Modules whose ``time`` is the clock."""


@dataclass
class Request:
    """A composed request."""

    plan: PromptPlan
    deleted: dict[SegmentKey, int]
    """Records, by key, that were deleted before it came: their serials, and all before them."""
    prompt: Prompt
    came: int


class Ends(Enum):
    """How a prompt ends: in a query, or as a warm-up prompt, whose records may go to another instance."""

    IN_A_QUERY = "in a query"
    WARM = "warm"
    PUSHED = "pushed"


@dataclass(frozen=True)
class Prompt:
    """``leads`` and ``documents`` by their places in the vocabulary."""

    lead: int
    documents: tuple[int, ...]
    context: str = "none"
    ends: Ends = Ends.IN_A_QUERY
    remote: bool = False
    """Some of its records are said to come from another instance."""
    tenant: str = "a"
    priority: int = 0
    plain: bool = False
    """It is its first document, without separators, where plain prompts have prefixes."""


@dataclass
class Engine:
    """``side`` and ``worker`` are replaced at a restart; tiers, pins and the clock stay."""

    clock: Clock
    policy: PolicyName = "lru"
    ranks: int = 1
    tiered: bool = True
    """Records are asked for in tiers before they are computed."""
    tenant_fraction: float = 1.0
    request_fraction: float = 1.0
    words: Vocabulary = WHOLE
    tiers: set[SegmentKey] = field(default_factory=set)
    pins: dict[SegmentKey, CachedSegment] = field(default_factory=dict)
    known: dict[SegmentKey, CachedSegment] = field(default_factory=dict)
    """All records that were ever asked for, by their first keys."""
    first: dict[SegmentKey, SegmentKey] = field(default_factory=dict)
    """First keys by those that plans had."""
    tenants: dict[SegmentKey, str] = field(default_factory=dict)
    """Of keys that plans had, and of their checkpoints'."""
    histories: dict[SegmentKey, tuple[int, ...]] = field(default_factory=dict)
    """Of each record by the keys that plans had: what stands before each of its tokens, and there."""
    resets: int = 0
    made: int = 0
    planned_before_pins: int = 0
    """Requests that came before the last pin, or the last reset, which renames what is pinned."""

    def __post_init__(self) -> None:
        self.start()

    def start(self) -> None:
        config = HypicConfig.from_mapping(
            {
                "min_segment_tokens": 4,
                "seam_tokens": 0,
                "context": "none",
                "islands": "none",
                "page_tokens": PAGE,
                "checkpoint_tokens": self.words.checkpoint_tokens,
                "checkpoints": 2,
                "prefix": "sparse" if self.words.prefixes else "stock",
                "store": {**(STORE if self.tiered else {}), "eviction": self.policy},
                "segment_parallel": PARALLEL,
                "max_tenant_fraction": self.tenant_fraction,
                "max_request_fraction": self.request_fraction,
            }
        )
        self.side = SchedulerConnector(
            *(config, self.words.geometry, Namespace.from_config({}), 4096, lambda: IDS),
            ranks=self.ranks,
            texts=PlanningTexts(context=lambda: TEXT),
        )
        self.worker = Worker(self.tiers, self.ranks, self.histories)
        self.turns = Turns(self, self.tenant_fraction)
        self.waiting: dict[str, Request] = {}
        self.running: dict[str, Request] = {}
        self.queued: list[str] = []
        """Segment requests that have not begun."""
        self.capturing: dict[str, CapturePlan] = {}
        self.own: dict[str, list[CapturePlan]] = {}
        """What requests that run have yet to capture of their own prefixes."""
        self.deleted: dict[SegmentKey, int] = {}
        """The last record reserved before each was deleted, by key."""
        self.made_with: dict[int, Entry] = {}
        """Records by the serials of checkpoints that were made with them."""
        self.expiry: dict[SegmentKey, float] = {}
        for key in list(self.pins):
            self.pin(key)

    # -- users

    def admit(self, prompt: Prompt) -> None:
        plain, separator = prompt.plain and self.words.prefixes, [IDS.sep]
        if plain:
            prompt = replace(prompt, documents=prompt.documents[:1], ends=Ends.IN_A_QUERY)
            separator = []
        tokens = [] if plain else [*self.words.leads[prompt.lead], IDS.sep]
        tokens += [t for d in prompt.documents for t in (*self.words.documents[d], *separator)]
        tokens += QUERY if prompt.ends is Ends.IN_A_QUERY else ()
        spec = self.side.spec({"hypic_context": prompt.context}, len(tokens))
        asked = PlanRequest(tokens, spec, prompt.tenant, None)
        plan = self.side.planner.plan_prefix(asked) if plain else self.side.planner.plan(asked)
        if plan is None:
            assert plain, "only a prefix may be too long for the pool"
            return
        self._check_room(plan)
        for segment in plan.records:
            for key in (segment.key, *(c.key for c in segment.checkpoints)):
                self.first[key] = self.side.namespace.renamed(key)
                self.tenants[key] = prompt.tenant
            if not segment.is_prefix:  # nobody knows the key of one
                self.known[self.first[segment.key]] = segment
            behind = segment.context and segment.context.key
            origin = prompt.tenant, self.resets, segment.role.value, segment.is_prefix, behind
            self.histories[segment.key] = tuple(
                hash((origin, segment.tokens[: n + 1])) for n in range(segment.head, segment.stop)
            )
            for c in segment.checkpoints:
                self.histories[c.key] = self.histories[segment.key][: c.stop - segment.head]
        self.made += 1
        transfer = Transfer(
            "tcp://127.0.0.1:7200" if prompt.ends is Ends.PUSHED else None,
            9.0,
            frozenset(s.key for s in plan.segments[::2]) if prompt.remote else frozenset(),
            5.0,
        )
        name = f"r{self.made}"
        self.waiting[name] = Request(plan, dict(self.deleted), prompt, self.made)
        self.turns.priorities[name] = prompt.priority
        if plan.warm_only:
            self.side.hold(name)
        self.side.admit(name, plan, transfer, tenant=prompt.tenant, priority=prompt.priority)

    def _check_room(self, plan: PromptPlan) -> None:
        """The pool holds what a plan wants and what is pinned, which may be away, together."""
        directory, planner = self.side.directory, self.side.planner
        records = {s.key: s for s in plan.records}
        records |= {self.side.namespace.renamed(key): segment for key, segment in self.pins.items()}
        spaces = [directory.space_for(planner.need(segment)) for segment in records.values()]
        assert directory.total.covers(sum(spaces, Space())), "planned with the place of pinned records"

    def pin(self, key: SegmentKey) -> None:
        """As the registry does it, which remembers pins."""
        segment, self.planned_before_pins = self.known[key], self.made
        try:
            tokens, leading = len(segment.tokens), segment.role is Role.LEADING
            self.side.retention.pin_record(key, tokens, leading=leading)
            self.pins[key] = segment
        except PinRefused:
            self.pins.pop(key, None)

    def unpin(self, key: SegmentKey) -> None:
        self.side.retention.unpin_record(key)
        self.pins.pop(key, None)

    def delete(self, key: SegmentKey) -> None:
        self._note_deletion(key)
        self.side.retention.drop_record(key)
        self.pins.pop(key, None)

    def expire(self, key: SegmentKey, seconds: float) -> None:
        self.expiry[key] = self.clock.now + seconds
        self.side.retention.expire_record(key, self.expiry[key])

    def _note_deletion(self, key: SegmentKey) -> None:
        self.expiry.pop(key, None)
        self.deleted[self.side.namespace.renamed(key)] = self.side.directory._reserved

    def abort(self, name: str) -> None:
        self.side.unhold(name)
        self.finish(name, completed=False)

    def finish(self, name: str, *, completed: bool) -> None:
        while completed and name in self.own:
            self.pass_ends(name)
        self.own.pop(name, None)
        self.waiting.pop(name, None)
        self.running.pop(name, None)
        self.worker.reads.pop(name, None)
        self.side.finished(name, completed=completed)

    def reset(self) -> None:
        self.resets, self.planned_before_pins = self.resets + 1, self.made
        self.side.reset(str(self.resets))

    def holds_room(self, request: Request) -> bool:
        return self.side.admission.requests[f"r{request.came}"].acquired

    # -- the engine's loop

    def step(self) -> None:
        for key in [k for k, at in self.expiry.items() if at <= self.clock.now]:
            self._note_deletion(key)
            self.pins.pop(key, None)
        while unwanted := [name for name in self.side.take_unwanted() if name in self.queued]:
            for name in unwanted:
                self.queued.remove(name)
                self.finish(name, completed=False)
        start = self.side.begin_pass()
        self.turns.begun(start)
        for job in start.segment_requests:
            assert job.for_request in {*self.waiting, *self.running, *self.queued, *self.capturing}
            self.queued.append(job.request_id)
            self._check_base(job.request_id)
        for name, plan in start.restarted.items():
            assert name in self.waiting and plan is self.side.plan_of(name)
        metadata = HypicMetadata()
        self.side.instruct(metadata)
        self.worker.drop(metadata.dropped_slots)
        self.worker.take(metadata.taken_slots)
        for order in metadata.orders:
            if (report := self.worker.obey(order)) is not None:
                self.side.absorb(report)
        for name in [n for n in self.queued if self.side.ready(n)]:
            self._capture(name)
        for name, request in list(self.waiting.items()):
            if request.plan.warm_only:
                if self.side.over(name):
                    self.side.unhold(name)
                    self.finish(name, completed=True)
            elif self.side.ready(name):
                self._run(name, request)

    def _capture(self, name: str) -> None:
        self.queued.remove(name)
        [plan], stream = self.side.views.captures(name), self.side.views.stream_plan(name)
        work = self.side.segment_requests.work_of(name)
        assert work is not None
        stored = self.tiered and work.last and not work.entry.forgotten
        assert (plan.stored is not None) is stored, "only what can be found again is stored"
        segment, stretch = work.segment, work.stretch
        histories = self.histories[segment.key]
        own = histories[stretch.first - segment.head : stretch.stop - segment.head]
        self.worker.write(stretch.target.serial, plan.slot, plan.slot_mapping, own)
        # That of a leading record is overwritten when all is computed.
        assert plan.slot != stretch.base_slot or plan.leading
        if plan.slot != stretch.base_slot:
            self.worker.slots[plan.slot] = Content(stretch.target.serial, stretch.target.key)
        if stretch.target is not work.entry:
            self.made_with[stretch.target.serial] = work.entry
        before = [] if segment.context is None else [self.histories[segment.context.key]]
        if stretch.base_slot is not None:
            before.append(histories[: stretch.first - segment.head])
        assert (stream is None) is (not before)
        if stream is not None:
            self.worker.read(name, stream, before)
        self.capturing[name] = plan

    def _check_base(self, name: str) -> None:
        """A record that another has begun with has not been deleted."""
        work = self.side.segment_requests.work_of(name)
        assert work is not None
        if work.stretch.base is not None:
            made_with = self.made_with.get(work.stretch.base.serial)
            if made_with is None:
                assert work.stretch.base.key in self.tiers, "it is from nowhere"
                return
            deleted = self.deleted.get(made_with.key, 0)
            begun = work.entry.serial <= deleted
            assert begun or made_with.serial > deleted, "resumed from what was deleted before"

    def _run(self, name: str, request: Request) -> None:
        stream, plan = self.side.views.stream_plan(name), self.side.plan_of(name)
        assert plan is not None
        keys = [s.key for s in plan.segments]
        if own := self.side.views.captures(name):
            self.own[name] = list(own)
            for capture in own:
                histories = self._captured_by(name, capture)
                self.worker.write(capture.serial, capture.slot, capture.slot_mapping, histories)
                entry = self.side.directory.of_serial(capture.serial)
                assert entry is not None
                self.worker.slots[capture.slot] = Content(capture.serial, entry.key)
        assert stream is not None or not keys
        serials = [] if stream is None else self.worker.read(name, stream, [self.histories[k] for k in keys])
        for key, serial in zip(keys, serials, strict=True):
            assert serial > request.deleted.get(key, 0), f"{name} reads a record that was deleted before"
        self.running[name] = self.waiting.pop(name)

    def _captured_by(self, name: str, capture: CapturePlan) -> tuple[int, ...]:
        """Histories of the tokens that a request captures of its own prefix."""
        composed = self.side.admission.requests[name]
        assert composed.own is not None
        first = composed.own.first
        return self.histories[composed.own.entry.key][first + capture.lo : first + capture.hi]

    def pass_ends(self, name: str) -> None:
        """A request that runs has computed the next stretch of its own prefix."""
        capture, slots = self.own[name].pop(0), self.worker.slots
        if not self.own[name]:
            del self.own[name]
        content, histories = slots[capture.slot], self._captured_by(name, capture)
        assert content.serial == capture.serial, "its slot was given away while it was made"
        self.worker.fill(content, capture.slot, capture.slot_mapping, histories)
        if capture.stored is not None:
            assert self.tiered
            self.worker.unsaved[capture.serial] = capture.stored
        self.side.prefixes.passed(name, capture.hi)

    def captured(self, name: str, *, well: bool) -> None:
        """A segment request that runs is over."""
        plan = self.capturing.pop(name)
        if well:
            self._fill(name, plan)
            if plan.stored is not None:
                self.worker.unsaved[plan.serial] = plan.stored
            self.side.absorb(WorkerReport(transition_blocks={plan.serial: 1}))
        self.finish(name, completed=well)

    def _fill(self, name: str, plan: CapturePlan) -> None:
        work = self.side.segment_requests.work_of(name)
        assert work is not None
        segment, stretch, slots = work.segment, work.stretch, self.worker.slots
        histories = self.histories[segment.key]
        content = Content(stretch.target.serial, stretch.target.key)
        if plan.slot != stretch.base_slot:
            assert slots[plan.slot] == content, "its slot was given away while it was made"
        if stretch.base_slot is not None:
            first = stretch.first - segment.head
            assert slots[stretch.base_slot].state == histories[first - 1], "what is before was given away"
        histories = histories[stretch.first - segment.head : stretch.stop - segment.head]
        self.worker.fill(content, plan.slot, plan.slot_mapping, histories)

    # -- laws

    def check(self) -> None:
        """The books are right: every pin is somebody's, and nothing of earlier generations is found."""
        side = self.side
        side.directory.check_integrity()
        for key in side.directory._entries:
            assert key == side.namespace.renamed(self.first[key]), "an earlier generation's record is found"
        held = [e for c in side.admission.requests.values() for e in c.held.values()]
        for work in side.segment_requests._segments.values():
            held += [e for e in (work.context, work.stretch.base) if e is not None]
            held += [work.stretch.target] if work.stretch.target is not work.entry else []
        for incomplete in side.segment_requests._incomplete:
            done = incomplete.done
            held += [done.target] if done is not None and done.target is not incomplete.entry else []
        held += side.missing.pinned()
        for composed in side.admission.requests.values():
            if (own := composed.own) is not None:
                held += [s.target for s in own.ahead if s.target is not own.entry]
        held += [e.resume_from for e in side.directory._by_serial.values() if e.resume_from is not None]
        pins = {s: e.pins for s, e in side.directory._by_serial.items() if e.pins}
        assert pins == Counter(entry.serial for entry in held)
        self.turns.check()

    def work(self, *, found: bool) -> None:
        """One step, of a second, in which the worker does all that it was asked for, and what runs ends; not
        ``found``: tiers have nothing, and other instances send nothing and do not say so."""
        self.clock.now += 1.0
        self.step()
        for serial in [s for s in self.worker.moving if found or s not in self.worker.awaited]:
            self.side.absorb(self.worker.arrive(serial, found=found, ranks=self.worker.left[serial]))
        while self.worker.unsaved:
            self.side.absorb(self.worker.save())
        while self.worker.pushing:
            self.side.absorb(self.worker.push(""))
        for name in list(self.capturing):
            self.captured(name, well=True)
        for name in list(self.running):
            self.finish(name, completed=True)
        self.check()

    def audit(self, steps: int) -> None:
        """After all requests have ended: within so many steps nothing is held, awaited or on its way."""
        side, requests, admission = self.side, self.side.segment_requests, self.side.admission
        while steps and (self.queued or self.capturing or side.loads):
            self.work(found=True)
            steps -= 1
        self.step()
        self.step()
        assert not (self.waiting or self.running or self.queued or self.capturing)
        assert not (admission.requests or admission._pending)
        assert not (self.own or side.prefixes._begun)
        assert not (side._held or side._pushes or side.loads)
        assert not (requests._segments or requests._incomplete or side.retention.has_orders)
        assert side.directory.pinned == 0
        assert len(side.directory) == len(side.directory.resident()), "a record is lost"
