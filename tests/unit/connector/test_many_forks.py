"""Thousands of forks of one prefix, and many cold prompts at once: what one costs, and what is remembered of
it, does not grow with the number of the others, and all of them end."""

import sys
from collections import deque
from collections.abc import Mapping, Set
from types import FrameType
from typing import Any

import pytest

from vllm_hypic.connector.scheduler import delta_records, directory, placement, retention, reuse_estimator
from vllm_hypic.connector.scheduler.connector import SchedulerConnector
from vllm_hypic.store.eviction import flop_aware
from vllm_hypic.store.eviction.policy import PolicyName

from .simulated_worker import PAGE
from .simulation import CLOCKED, Clock, Engine, Prompt
from .test_generated_prefixes import Side
from .vocabulary import Vocabulary, geometry

FORKS, AGAIN = 2000, 100
"""Forks, and after how many what they cost and leave is looked at again."""
COMMON = tuple(range(100, 100 + 5 * PAGE))
REMEMBERED = 100
"""Of whatever is remembered only so long as there is room for it, in these tests."""


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock("time")
    for module in CLOCKED:
        monkeypatch.setattr(module, "time", clock)
    for module, name in (
        (placement, "REMEMBERED"),
        (reuse_estimator, "REMEMBERED"),
        (delta_records, "_REMEMBERED"),
        (retention, "STORED_KEPT"),
        (directory, "MOST_CONTAINING"),
        (flop_aware, "LEAST_GHOSTS"),
    ):
        monkeypatch.setattr(module, name, REMEMBERED)
    monkeypatch.setattr(placement, "APART_TOKENS", 2 * PAGE)
    return clock


def forks(count: int, kind: str) -> Vocabulary:
    """Documents that part from a common beginning behind one page, or two, up to five."""
    tails = (range(10_000 + 100 * i, 10_000 + 100 * i + 3 * PAGE) for i in range(count))
    documents = tuple((*COMMON[: PAGE * (1 + i % 5)], *tail) for i, tail in enumerate(tails))
    return Vocabulary(((),), documents, geometry(120, 40), PAGE, prefixes=kind == "prefixes")


class Lines:
    """Lines of the scheduler's side that run on behalf of requests, while it is ``on``."""

    def __init__(self, side: SchedulerConnector) -> None:
        self.count, self.on = 0, True
        for name in ("admit", "begin_pass", "absorb", "finished", "take_unwanted"):
            self._watch(side, name)

    def _watch(self, side: SchedulerConnector, name: str) -> None:
        method = getattr(side, name)

        def watched(*args: Any, **kwargs: Any) -> Any:
            if not self.on:
                return method(*args, **kwargs)
            before = sys.gettrace()
            sys.settrace(self._trace)
            try:
                return method(*args, **kwargs)
            finally:
                sys.settrace(before)

        setattr(side, name, watched)

    def _trace(self, frame: FrameType, event: str, _: Any) -> Any:
        if "vllm_hypic" not in frame.f_code.co_filename:
            return None
        self.count += event == "line"
        return self._trace


def held(side: SchedulerConnector) -> int:
    """How much the containers hold that are reached from there."""
    found, todo, count = set[int](), [side], 0
    while todo:
        thing: Any = todo.pop()
        if id(thing) in found:
            continue
        found.add(id(thing))
        if isinstance(thing, Mapping):
            inside = [*thing.keys(), *thing.values()]
        elif isinstance(thing, list | tuple | deque | Set):
            inside = list(thing)
        elif type(thing).__module__.startswith("vllm_hypic"):
            inside = list(getattr(thing, "__dict__", {}).values())
        else:
            continue
        count += len(inside)
        todo += inside
    return count


def ask(engine: Engine, number: int, kind: str) -> None:
    engine.admit(Prompt(0, (number,), plain=kind == "prefixes"))
    while engine.waiting or engine.running or engine.queued or engine.capturing:
        engine.work(found=True)


@pytest.mark.fast("segments-True-flop-aware")
@pytest.mark.parametrize("policy", ["lru", "flop-aware"])
@pytest.mark.parametrize("tiered", [False, True])
@pytest.mark.parametrize("kind", ["prefixes", "segments"])
def test_thousands_of_forks(clock: Clock, kind: str, tiered: bool, policy: PolicyName) -> None:
    engine = Engine(clock, policy, tiered=tiered, words=forks(FORKS, kind))
    engine.check = lambda: None  # type: ignore[method-assign]
    lines = Lines(engine.side)
    costs, sizes, resumed = [], [], []
    for number in range(FORKS):
        lines.on = number % AGAIN < 5
        ask(engine, number, kind)
        if number % AGAIN == 5:
            costs.append(lines.count)
            sizes.append(held(engine.side))
            resumed.append(engine.side.counters.tokens_resumed)
            lines.count, engine.side.counters.tokens_resumed = 0, 0
            Engine.check(engine)
    settled = 2 * REMEMBERED // AGAIN
    assert max(costs[-5:]) < 1.1 * max(costs[settled : settled + 5]), costs
    assert max(sizes[-5:]) < 1.1 * max(sizes[settled : settled + 5]), sizes
    assert min(resumed[1:]) > 0, "they still begin with what is here"
    assert engine.side.directory.evictions > FORKS / 2
    engine.audit(50)


@pytest.mark.parametrize("kind", ["prefixes", "segments"])
def test_who_waits_costs_others_nothing(clock: Clock, kind: str) -> None:
    def cost(waiting: int) -> int:
        engine = Engine(clock, words=forks(waiting, kind), tiered=False)
        engine.check = lambda: None  # type: ignore[method-assign]
        lines = Lines(engine.side)
        lines.on = False
        for number in range(waiting):
            engine.admit(Prompt(0, (number,), plain=kind == "prefixes"))
        while engine.made - len(engine.waiting) < 20:
            engine.work(found=True)
        lines.on = True
        while engine.made - len(engine.waiting) < 50:
            engine.work(found=True)
        return lines.count

    assert cost(1000) < 1.1 * cost(100)


COLD = 60
"""Prompts, each of which leaves four checkpoints in a pool that has room for eleven states."""


@pytest.mark.parametrize("leave", [False, True])
@pytest.mark.parametrize("tenants", ["a", "abc"])
def test_many_cold_prompts_at_once(clock: Clock, tenants: str, leave: bool) -> None:
    """Each is asked by two.  Who computes it pins what it has begun; with ``leave`` every third goes then."""
    starts = range(10_000, 10_000 + 100 * COLD, 100)
    documents = tuple(tuple(range(start, start + 10 * PAGE)) for start in starts)
    words = Vocabulary(((),), documents, geometry(30, 11), prefixes=True)
    engine = Engine(clock, tiered=False, tenant_fraction=1.0 if tenants == "a" else 0.6, words=words)
    for i in range(2 * COLD):
        engine.admit(Prompt(0, (i // 2,), tenant=tenants[i // 2 % len(tenants)], plain=True))
    side, most_begun, waited = engine.side, 0, False
    for _ in range(8 * COLD):
        engine.step()
        engine.check()
        waited |= side.admission.no_room or bool(side.admission.full)
        begun = [e for e in side.directory._by_serial.values() if e.is_checkpoint and e.pins]
        most_begun = max(most_begun, len(begun))
        for name in list(engine.running):
            if leave and int(name[1:]) % 3 == 0 and name in engine.own:
                engine.abort(name)
            elif name in engine.own:
                engine.pass_ends(name)
            else:
                engine.finish(name, completed=True)
    assert not engine.waiting and not engine.running
    assert waited and most_begun > 4
    engine.audit(10)


def test_half_a_million_tokens() -> None:
    """Of which a fork has four fifths; in a pool with room for few states."""
    side = Side(pages=140_000, slots=12)
    whole = tuple(range(500_000))
    assert side.begin("whole", whole) == len(whole)
    side.end("whole", whole)
    fork = (*whole[:400_000], *range(10**6, 10**6 + 1000))
    computed = side.begin("fork", fork)
    assert len(fork) - 400_000 <= computed < len(fork)
    side.end("fork", fork)
    assert side.begin("other", (*whole[:400_000], *range(2 * 10**6, 2 * 10**6 + 1000))) == 1000
