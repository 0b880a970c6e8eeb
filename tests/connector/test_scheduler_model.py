"""The scheduler side in any order of events: its laws after each, and progress for everybody.

10,000 events in a normal run, ten times as many in a slow one.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from vllm_hypic.primitives.keys import SegmentKey
from vllm_hypic.store.eviction import PolicyName

from .simulation import CLOCKED, DOCUMENTS, LEADS, Clock, Ends, Engine, Prompt

PROMPTS = st.builds(
    Prompt,
    lead=st.integers(0, len(LEADS) - 1),
    documents=st.lists(st.integers(0, len(DOCUMENTS) - 1), min_size=1, max_size=5).map(tuple),
    context=st.sampled_from(["none", "text", "lead"]),
    ends=st.sampled_from([Ends.IN_A_QUERY, Ends.IN_A_QUERY, Ends.WARM, Ends.PUSHED]),
    remote=st.booleans(),
    tenant=st.sampled_from("aaabc"),
    priority=st.integers(0, 2),
)
ANY = st.integers(0, 1000)
"""Picks one of what there is."""


def steps_for(requests: int) -> int:
    """Steps within which so many requests end, one after the other at worst, each when those of its tenant
    that hold room have ended, and then those of others.  Twelve for either: five for a record that does not
    come, its computation behind that of a context, the request's own, a push."""
    return 24 * requests + 24


class SchedulerMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.clock = Clock("time")
        self.patch = pytest.MonkeyPatch()
        for module in CLOCKED:
            self.patch.setattr(module, "time", self.clock)

    @initialize(
        policy=st.sampled_from(["lru", "flop-aware"]),
        ranks=st.integers(1, 2),
        tiered=st.booleans(),
        tenant_fraction=st.sampled_from([1.0, 0.6]),
        request_fraction=st.sampled_from([1.0, 0.4]),
    )
    def start(
        self, policy: PolicyName, ranks: int, tiered: bool, tenant_fraction: float, request_fraction: float
    ) -> None:
        self.engine = Engine(self.clock, policy, ranks, tiered, tenant_fraction, request_fraction)

    # -- users

    @rule(prompt=PROMPTS)
    def admit(self, prompt: Prompt) -> None:
        self.engine.admit(prompt)

    @precondition(lambda self: self.engine.known)
    @rule(which=ANY)
    def pin(self, which: int) -> None:
        self.engine.pin(self.key(which))

    @precondition(lambda self: self.engine.pins)
    @rule(which=ANY)
    def unpin(self, which: int) -> None:
        pins = list(self.engine.pins)
        self.engine.unpin(pins[which % len(pins)])

    @precondition(lambda self: self.engine.known)
    @rule(which=ANY)
    def delete(self, which: int) -> None:
        self.engine.delete(self.key_in_use(which))

    @precondition(lambda self: self.engine.known)
    @rule(which=ANY, seconds=st.sampled_from([-1.0, 2.0]))
    def expire(self, which: int, seconds: float) -> None:
        self.engine.expire(self.key_in_use(which), seconds)

    def key(self, which: int) -> SegmentKey:
        known = list(self.engine.known)
        return known[which % len(known)]

    def key_in_use(self, which: int) -> SegmentKey:
        """That of a record which requests want, if there are requests."""
        requests = [*self.engine.waiting.values(), *self.engine.running.values()]
        keys = [self.engine.first[s.key] for r in requests for s in r.plan.records]
        return keys[which % len(keys)] if keys else self.key(which)

    @precondition(lambda self: self.engine.waiting or self.engine.running)
    @rule(which=ANY, everybody=st.sampled_from([False, False, True]))
    def abort(self, which: int, everybody: bool) -> None:
        names = [*self.engine.waiting, *self.engine.running]
        for name in names if everybody else [names[which % len(names)]]:
            self.engine.abort(name)

    @rule(seconds=st.sampled_from([1.0, 6.0]))
    def time_passes(self, seconds: float) -> None:
        self.clock.now += seconds

    @rule()
    def reset(self) -> None:
        self.engine.reset()

    @rule()
    def restart(self) -> None:
        self.engine.start()

    # -- the engine

    @rule()
    def step(self) -> None:
        self.engine.step()

    @precondition(lambda self: self.engine.running)
    @rule(which=ANY)
    def end(self, which: int) -> None:
        running = list(self.engine.running)
        self.engine.finish(running[which % len(running)], completed=True)

    @precondition(lambda self: self.engine.capturing)
    @rule(which=ANY, well=st.booleans())
    def segment_request_ends(self, which: int, well: bool) -> None:
        capturing = list(self.engine.capturing)
        self.engine.captured(capturing[which % len(capturing)], well=well)

    @precondition(lambda self: self.engine.queued)
    @rule(which=ANY)
    def segment_request_is_aborted(self, which: int) -> None:
        queued = self.engine.queued
        self.engine.finish(queued.pop(which % len(queued)), completed=False)

    # -- the worker

    @precondition(lambda self: self.engine.worker.moving)
    @rule(which=ANY, found=st.booleans())
    def record_arrives(self, which: int, found: bool) -> None:
        moving = list(self.engine.worker.moving)
        self.engine.side.absorb(self.engine.worker.arrive(moving[which % len(moving)], found=found))

    @precondition(lambda self: self.engine.worker.awaited)
    @rule(which=ANY)
    def record_is_left_in_a_tier(self, which: int) -> None:
        awaited = sorted(self.engine.worker.awaited)
        self.engine.side.absorb(self.engine.worker.leave_in_tier(awaited[which % len(awaited)]))

    @precondition(lambda self: self.engine.worker.unsaved)
    @rule()
    def record_is_saved(self) -> None:
        self.engine.side.absorb(self.engine.worker.save())

    @precondition(lambda self: self.engine.worker.pushing)
    @rule(fault=st.sampled_from(["", "nobody there"]))
    def push_ends(self, fault: str) -> None:
        self.engine.side.absorb(self.engine.worker.push(fault))

    # -- laws

    @rule(found=st.booleans(), others=st.lists(PROMPTS, max_size=6))
    def everybody_makes_progress(self, found: bool, others: list[Prompt]) -> None:
        """Once the worker answers, who waits runs, whatever is deleted and pinned meanwhile, and although in
        each step another comes that is not more urgent, of any tenant."""
        engine = self.engine
        before = engine.made
        names = {*engine.waiting, *engine.running, *engine.queued}
        least_urgent = max((r.prompt.priority for r in engine.waiting.values()), default=0)
        bound = steps_for(len(names))
        for i in range(bound):
            if not names:
                break
            if others:
                engine.admit(replace(others[i % len(others)], priority=least_urgent))
                engine.delete(self.key_in_use(engine.made))
                engine.pin(self.key(engine.made))
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
        if hasattr(self, "engine"):
            self.everybody_makes_progress(True, [])
            for _ in range(steps_for(1)):
                self.engine.work(found=True)
            self.engine.audit()
        self.patch.undo()


class LongSchedulerMachine(SchedulerMachine):
    """The same, for longer."""


TestSchedulerMachine = SchedulerMachine.TestCase
TestSchedulerMachine.settings = settings(max_examples=250, stateful_step_count=50, deadline=None)
TestLongSchedulerMachine = pytest.mark.slow(LongSchedulerMachine.TestCase)
TestLongSchedulerMachine.settings = settings(max_examples=1000, stateful_step_count=100, deadline=None)
