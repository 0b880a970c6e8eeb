"""The scheduler side in any order of events: its laws after each, and progress for everybody.

10,000 events in a normal run, ten times as many in a slow one.
"""

import sys
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any, ClassVar, TypeVar
from unittest import TestCase

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from vllm_hypic.connector.scheduler import placement
from vllm_hypic.primitives.keys import SegmentKey

from .simulated_worker import PAGE
from .simulation import CLOCKED, Clock, Ends, Engine, Prompt, Request
from .vocabulary import DOCUMENTS, FORKS, LEADS, ONE_MEMORY, PREFIXES, WHOLE, Vocabulary

T = TypeVar("T")
DOCUMENT_LISTS = st.lists(st.integers(0, len(DOCUMENTS) - 1), min_size=1, max_size=3).map(tuple)
PRIORITIES = st.integers(0, 2)
PROMPTS = st.builds(
    Prompt,
    lead=st.integers(0, len(LEADS) - 1),
    documents=DOCUMENT_LISTS,
    context=st.sampled_from(["none", "text", "lead"]),
    ends=st.sampled_from([Ends.IN_A_QUERY, Ends.IN_A_QUERY, Ends.WARM, Ends.PUSHED]),
    remote=st.sampled_from([False, False, True]),
    tenant=st.sampled_from("aaabc"),
    priority=PRIORITIES,
    plain=st.sampled_from([True, True, False]),
)
ANY = st.integers(0, 1000)
"""Picks one of what there is."""


def steps_for(requests: int) -> int:
    """Steps within which so many requests end, one after the other at worst, each when those of its tenant
    that hold room have ended, and then those of others.  Twelve for either: five for a record that does not
    come, its computation behind that of a context, the request's own, a push."""
    return 24 * requests + 24


DISTURBANCES = ["abort", "delete", "expire", "pin", "reset", "restart", "time_passes", "unpin"]
"""Events of which some happen in a run."""


class SchedulerMachine(RuleBasedStateMachine):
    words: ClassVar[Vocabulary]

    def __init__(self) -> None:
        super().__init__()
        self.clock = Clock("time")
        self.patch = pytest.MonkeyPatch()
        for module in CLOCKED:
            self.patch.setattr(module, "time", self.clock)
        self.patch.setattr(placement, "APART_TOKENS", 2 * PAGE)

    @initialize(
        policy=st.sampled_from(["lru", "flop-aware"]),
        ranks=st.integers(1, 2),
        tiered=st.booleans(),
        tenant_fraction=st.sampled_from([1.0, 0.6]),
        request_fraction=st.sampled_from([1.0, 0.4]),
        disturbances=st.sets(st.sampled_from(DISTURBANCES)),
    )
    def start(self, disturbances: set[str], **options: Any) -> None:
        self.engine = Engine(self.clock, words=self.words, **options)
        self.disturbances = sorted(disturbances)

    @rule(data=st.data())
    def event(self, data: st.DataObject) -> None:
        """Anything that can happen now.

        One rule for all: of several rules Hypothesis leaves each out of half the runs, and in one without
        requests, steps or ends there is little to see.
        """
        self.draw = data.draw
        events = self.events()
        possible = [name for name, (chances, _) in events.items() for _ in range(chances)]
        events[self.draw(st.sampled_from(possible))][1]()

    def events(self) -> dict[str, tuple[int, Callable[[], object]]]:
        """What can happen, by name, and how many chances it has now."""
        engine, worker, draw, pick = self.engine, self.engine.worker, self.draw, self.pick
        absorb, requests = self.engine.side.absorb, bool(self.requests())
        own, awaited = bool(engine.own), sorted(worker.awaited)
        events: dict[str, tuple[int, Callable[[], object]]] = {
            "step": (12, engine.step),
            "admit": (6, lambda: engine.admit(draw(PROMPTS))),
            "join": (4 * requests, self.join),
            "ask_again": (4 * requests, self.ask_again),
            "end": (6 * bool(engine.running), lambda: engine.finish(pick(engine.running), completed=True)),
            "pass_ends": (8 * own, lambda: engine.pass_ends(pick(engine.own))),
            "own_prefix_is_aborted": (2 * own, lambda: engine.abort(pick(engine.own))),
            "segment_request_ends": (12 * bool(engine.capturing), self.segment_request_ends),
            "segment_request_is_aborted": (2 * bool(engine.queued), self.segment_request_is_aborted),
            "record_arrives": (
                12 * bool(worker.moving),
                lambda: absorb(worker.arrive(pick(worker.moving), found=draw(st.booleans()))),
            ),
            "record_left_in_a_tier": (2 * bool(awaited), lambda: absorb(worker.leave_in_tier(pick(awaited)))),
            "record_is_saved": (4 * bool(worker.unsaved), lambda: absorb(worker.save())),
            "push_ends": (
                4 * bool(worker.pushing),
                lambda: absorb(worker.push(draw(st.sampled_from(["", "nobody there"])))),
            ),
            "everybody_makes_progress": (
                1,
                lambda: self.make_progress(draw(st.booleans()), draw(st.lists(PROMPTS, max_size=6))),
            ),
        }
        disturbances: dict[str, tuple[int, Callable[[], object]]] = {
            "abort": (2, self.abort),
            "delete": (2, lambda: engine.delete(pick(self.keys_in_use()))),
            "expire": (2, lambda: engine.expire(pick(self.keys_in_use()), draw(st.sampled_from([-1, 2])))),
            "pin": (2, lambda: engine.pin(pick(engine.known))),
            "reset": (1, engine.reset),
            "restart": (1, engine.start),
            "time_passes": (2, self.time_passes),
            "unpin": (2, lambda: engine.unpin(pick(engine.pins or engine.known))),
        }
        return events | {name: disturbances[name] for name in self.disturbances if engine.known}

    def pick(self, things: Iterable[T]) -> T:
        found = list(things)
        return found[self.draw(ANY) % len(found)]

    def requests(self) -> list[Request]:
        """Those that read records."""
        requests = [*self.engine.waiting.values(), *self.engine.running.values()]
        return [request for request in requests if request.plan.records]

    # -- users

    def join(self) -> None:
        """A request that shares records with another, and may be more urgent."""
        prompt = self.pick(self.requests()).prompt
        documents = prompt.documents[:1] + self.draw(DOCUMENT_LISTS)
        self.engine.admit(replace(prompt, documents=documents, priority=self.draw(PRIORITIES)))

    def ask_again(self) -> None:
        """A record that a request wants is deleted, one behind which others are computed if there is one, and
        wanted again by a request that is more urgent."""
        requests = self.requests()
        request = self.pick([r for r in requests if self.engine.holds_room(r)] or requests)
        records = [s for s in request.plan.records if not s.is_prefix]
        if records:
            key = self.pick([s.context.key for s in records if s.context] or [s.key for s in records])
            self.engine.delete(self.engine.first[key])
        self.engine.admit(replace(request.prompt, priority=request.prompt.priority - 1))
        self.engine.step()

    def keys_in_use(self) -> list[SegmentKey]:
        """Those of records which requests want, if there are requests."""
        records = [s for r in self.requests() for s in r.plan.records if not s.is_prefix]
        return [self.engine.first[s.key] for s in records] or list(self.engine.known)

    def abort(self) -> None:
        names = [*self.engine.waiting, *self.engine.running]
        everybody = self.draw(st.sampled_from([False, False, True]))
        for name in names if everybody or not names else [self.pick(names)]:
            self.engine.abort(name)

    def time_passes(self) -> None:
        self.clock.now += self.draw(st.sampled_from([1.0, 6.0]))

    # -- the engine

    def segment_request_ends(self) -> None:
        self.engine.captured(
            self.pick(self.engine.capturing), well=self.draw(st.sampled_from([True, True, False]))
        )

    def segment_request_is_aborted(self) -> None:
        name = self.pick(self.engine.queued)
        self.engine.queued.remove(name)
        self.engine.finish(name, completed=False)

    # -- laws

    def make_progress(self, found: bool, others: list[Prompt]) -> None:
        """Once the worker answers, who waits runs, whatever is deleted and pinned meanwhile, and although in
        each step another comes that is not more urgent, of any tenant."""
        engine = self.engine
        before = engine.made
        names = {*engine.waiting, *engine.running, *engine.queued}
        least_urgent = max((r.prompt.priority for r in engine.waiting.values()), default=0)
        bound = steps_for(len(names)) * self.words.stretches
        for i in range(bound):
            if not names:
                break
            if others:
                engine.admit(replace(others[i % len(others)], priority=least_urgent))
                keys, known = self.keys_in_use(), list(engine.known)
                if known:
                    engine.delete(keys[engine.made % len(keys)])
                    engine.pin(known[engine.made % len(known)])
            engine.work(found=found)
            names &= {*engine.waiting, *engine.running, *engine.queued, *engine.capturing}
        assert not names, f"{sorted(names)} wait after {bound} steps"
        # Or each such stream would have to wait behind all of the one before.
        for name in [n for n in (*engine.waiting, *engine.running) if int(n[1:]) > before]:
            engine.abort(name)

    @invariant()
    def books_are_right(self) -> None:
        self.engine.check()

    def teardown(self) -> None:
        if hasattr(self, "engine") and sys.exception() is None:  # nothing has been found yet
            self.make_progress(True, [])
            self.engine.audit(steps_for(1) * self.words.stretches)
        self.patch.undo()


def machine(words: Vocabulary, runs: int, steps: int = 50) -> type[TestCase]:
    """A test of so many runs, with prompts of these words."""
    case = type(f"SchedulerMachine{runs}", (SchedulerMachine,), {"words": words}).TestCase
    case.settings = settings(max_examples=runs, stateful_step_count=steps, deadline=None)
    return case


def long(case: type[TestCase]) -> type[TestCase]:
    return pytest.mark.slow(pytest.mark.timeout(2400)(case))


TestSchedulerMachine = machine(WHOLE, 60)
TestLongSchedulerMachine = long(machine(WHOLE, 1000, 100))
TestForkingSchedulerMachine = machine(FORKS, 50)
TestLongForkingSchedulerMachine = long(machine(FORKS, 1000, 100))
TestPrefixSchedulerMachine = machine(PREFIXES, 60)
TestLongPrefixSchedulerMachine = long(machine(PREFIXES, 300))
TestOneMemorySchedulerMachine = machine(ONE_MEMORY, 60)
TestLongOneMemorySchedulerMachine = long(machine(ONE_MEMORY, 300))
