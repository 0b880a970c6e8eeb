"""The scheduler side in any order of events: its laws after each, and progress for everybody.

10,000 events in a normal run, ten times as many in a slow one.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
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


DISTURBANCES = {name: 2 for name in ("abort", "pin", "unpin", "delete", "expire", "time_passes")}
DISTURBANCES |= {"reset": 1, "restart": 1}
"""Events of which some happen in a run, and how often."""


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
        disturbances=st.sets(st.sampled_from(sorted(DISTURBANCES))),
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
        getattr(self, self.draw(st.sampled_from(self.possible())))()

    def possible(self) -> list[str]:
        """Names of events, those that are to happen more often several times."""
        engine, worker = self.engine, self.engine.worker
        times = {
            "step": 12,
            "admit": 6,
            "join": 4 if self.requests() else 0,
            "ask_again": 4 if self.requests() else 0,
            "end": 6 if engine.running else 0,
            "pass_ends": 8 if engine.own else 0,
            "own_prefix_is_aborted": 2 if engine.own else 0,
            "segment_request_ends": 12 if engine.capturing else 0,
            "segment_request_is_aborted": 2 if engine.queued else 0,
            "record_arrives": 12 if worker.moving else 0,
            "record_is_left_in_a_tier": 2 if worker.awaited else 0,
            "record_is_saved": 4 if worker.unsaved else 0,
            "push_ends": 4 if worker.pushing else 0,
            "everybody_makes_progress": 1,
        }
        if engine.known:
            times |= {name: DISTURBANCES[name] for name in self.disturbances}
        return [name for name, n in times.items() for _ in range(n)]

    def pick(self, things: Iterable[T]) -> T:
        found = list(things)
        return found[self.draw(ANY) % len(found)]

    def requests(self) -> list[Request]:
        """Those that read records."""
        requests = [*self.engine.waiting.values(), *self.engine.running.values()]
        return [request for request in requests if request.plan.records]

    # -- users

    def admit(self) -> None:
        self.engine.admit(self.draw(PROMPTS))

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

    def pin(self) -> None:
        self.engine.pin(self.pick(self.engine.known))

    def unpin(self) -> None:
        self.engine.unpin(self.pick(self.engine.pins or self.engine.known))

    def delete(self) -> None:
        self.engine.delete(self.pick(self.keys_in_use()))

    def expire(self) -> None:
        self.engine.expire(self.pick(self.keys_in_use()), self.draw(st.sampled_from([-1.0, 2.0])))

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

    def reset(self) -> None:
        self.engine.reset()

    def restart(self) -> None:
        self.engine.start()

    # -- the engine

    def step(self) -> None:
        self.engine.step()

    def end(self) -> None:
        self.engine.finish(self.pick(self.engine.running), completed=True)

    def pass_ends(self) -> None:
        self.engine.pass_ends(self.pick(self.engine.own))

    def own_prefix_is_aborted(self) -> None:
        self.engine.abort(self.pick(self.engine.own))

    def segment_request_ends(self) -> None:
        self.engine.captured(
            self.pick(self.engine.capturing), well=self.draw(st.sampled_from([True, True, False]))
        )

    def segment_request_is_aborted(self) -> None:
        name = self.pick(self.engine.queued)
        self.engine.queued.remove(name)
        self.engine.finish(name, completed=False)

    # -- the worker

    def record_arrives(self) -> None:
        worker = self.engine.worker
        self.engine.side.absorb(worker.arrive(self.pick(worker.moving), found=self.draw(st.booleans())))

    def record_is_left_in_a_tier(self) -> None:
        worker = self.engine.worker
        self.engine.side.absorb(worker.leave_in_tier(self.pick(sorted(worker.awaited))))

    def record_is_saved(self) -> None:
        self.engine.side.absorb(self.engine.worker.save())

    def push_ends(self) -> None:
        self.engine.side.absorb(self.engine.worker.push(self.draw(st.sampled_from(["", "nobody there"]))))

    # -- laws

    def everybody_makes_progress(self) -> None:
        self.make_progress(self.draw(st.booleans()), self.draw(st.lists(PROMPTS, max_size=6)))

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


TestSchedulerMachine = machine(WHOLE, 120)
TestLongSchedulerMachine = pytest.mark.slow(machine(WHOLE, 1000, 100))
TestForkingSchedulerMachine = machine(FORKS, 80)
TestLongForkingSchedulerMachine = pytest.mark.slow(machine(FORKS, 1000, 100))
TestPrefixSchedulerMachine = machine(PREFIXES, 60)
TestLongPrefixSchedulerMachine = pytest.mark.slow(machine(PREFIXES, 300))
TestOneMemorySchedulerMachine = machine(ONE_MEMORY, 60)
TestLongOneMemorySchedulerMachine = pytest.mark.slow(machine(ONE_MEMORY, 300))
