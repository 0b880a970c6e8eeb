"""Requests of several priorities and tenants that want the room of a small pool, on a real engine."""

from pathlib import Path
from typing import Any

import pytest
from lib.oracle.models import random_segments

from .conftest import EngineFactory, tight_args, tight_options
from .engines import Answer, Ask, Engine, answer_of, begin, drain, prompt, scheduler_of

DOCUMENTS = random_segments([200, 300, 250, 280, 220, 240, 310, 290, 260, 230], seed=41)
(QUERY,) = random_segments([40], seed=42)
LONG = random_segments([1500] * 4, seed=43)
GENERATED = 60


@pytest.fixture(scope="module")
def _engine(module_engine: EngineFactory, hybrid_model: Path, units: tuple[int, int]) -> Engine:
    """Room for three records: one of a request, two of a tenant."""
    options = tight_options(units) | {"max_tenant_fraction": 0.67, "max_request_fraction": 0.34}
    args = tight_args() | {"num_gpu_blocks_override": 40}
    return module_engine(hybrid_model, options=options, scheduling_policy="priority", **args)


def ask(document: int, *, salt: str | None = None, max_tokens: int = GENERATED) -> Ask:
    return Ask(prompt(DOCUMENTS[document], query=QUERY), max_tokens, salt=salt)


class Course:
    """What happens to some requests, step by step: after how many steps each came, had room in the pool, and
    had ended."""

    def __init__(self, llm: Any) -> None:
        self.llm, self.scheduler, self.steps = llm, scheduler_of(llm), 0
        self.came: dict[str, int] = {}
        self.room: dict[str, int] = {}
        self.over: dict[str, int] = {}
        self.answers: dict[str, Answer] = {}

    def add(self, name: str, asked: Ask, priority: int = 0) -> None:
        begin(self.llm, name, asked, priority=priority)
        self.came[name] = self.steps

    def find(self, name: str) -> Any:
        """The scheduler's request: vLLM adds to its name."""
        return next((r for i, r in self.scheduler.requests.items() if i.startswith(name)), None)

    def step(self) -> None:
        self.steps += 1
        ended = {one.request_id: answer_of(one) for one in self.llm.llm_engine.step() if one.finished}
        self.answers |= ended
        self.over |= dict.fromkeys(ended, self.steps)
        for request_id, composed in self.scheduler.hypic.admission.requests.items():
            name = next(n for n in self.came if request_id.startswith(n))
            if composed.acquired:
                self.room.setdefault(name, self.steps)

    def until_over(self, *names: str) -> None:
        while left := {*names} - {*self.over}:
            assert self.steps < 2000, f"{sorted(left)} have not ended"
            self.step()


def overtake(llm: Any) -> list[str]:
    course = Course(llm)
    for i, (name, priority, n) in enumerate((("one", 3, 20), ("two", 3, 40), ("late", 5, 1), ("soon", 3, 1))):
        course.add(name, ask(i, max_tokens=n), priority)
    for _ in range(5):
        course.step()
    course.add("urgent", ask(4), 0)
    course.until_over(*course.came)
    return sorted(course.room, key=lambda name: course.room[name])


def test_urgent_requests_get_room_before_those_that_came_first(engine: Engine) -> None:
    assert engine.call(overtake) == ["one", "two", "urgent", "soon", "late"]


def behind_long_prompts(llm: Any) -> Course:
    course = Course(llm)
    for i, tokens in enumerate(LONG):
        course.add(f"plain {i}", Ask(tuple(tokens), 1), 5)
    return course


def join(llm: Any) -> tuple[bool, list[str]]:
    """A segment request waits behind long prompts; one that is more urgent than these asks for its record."""
    course = behind_long_prompts(llm)
    course.step()
    course.add("patient", ask(0, max_tokens=1), 9)
    course.step()
    course.add("urgent", ask(0, max_tokens=1), 0)
    course.until_over("urgent")
    unbegun = [n for n in course.came if (r := course.find(n)) is not None and not r.num_computed_tokens]
    shared = course.room["patient"] < course.room["urgent"]
    course.until_over(*course.came)
    drain(llm)
    return shared, unbegun


def test_a_segment_request_hurries_when_an_urgent_request_joins(engine: Engine) -> None:
    """Its long neighbours, which were more urgent than its first owner, wait."""
    shared, unbegun = engine.call(join)
    assert shared and "plain 3" in unbegun


def hold(llm: Any) -> list[int]:
    """One request holds its tenant's room and waits behind long prompts, one that is urgent waits for it."""
    course = behind_long_prompts(llm)
    for i in range(2):
        course.add(f"holds {i}", ask(i, max_tokens=1), 9)
    course.step()
    course.add("urgent", ask(2, max_tokens=1), 0)
    course.until_over(*course.came)
    return [course.over[name] for name in ("urgent", "plain 3")]


def test_who_holds_room_hurries_when_an_urgent_request_waits_for_it(engine: Engine) -> None:
    urgent, plain = engine.call(hold)
    assert urgent < plain


def preempt(llm: Any, asked: Ask) -> tuple[Answer, int]:
    """A composed request decodes, and is preempted when urgent ones want its blocks: its answer, and how many
    of the tokens were there before."""
    course = Course(llm)
    course.add("patient", asked, 9)
    while (patient := course.find("patient")).num_output_tokens < 3:
        course.step()
    for i in range(24):  # each outgrows its first block of 256 tokens
        course.add(f"urgent {i}", Ask(tuple(LONG[i % 4][:240]), 60), 0)
    while not patient.num_preemptions:
        assert "patient" not in course.over, "it was not preempted"
        course.step()
    before = patient.num_output_tokens
    course.until_over(*course.came)
    return course.answers["patient"], before


def test_a_preempted_request_goes_on_as_if_it_had_not_been(engine: Engine) -> None:
    """The urgent ones came later: first come, first served, they would have been preempted themselves."""
    asked = ask(0, max_tokens=GENERATED)
    (alone,) = engine.ask(asked)
    answer, before = engine.call(preempt, asked)
    assert len(answer.tokens) == GENERATED
    agreed = next((i for i in range(GENERATED) if answer.tokens[i] != alone.tokens[i]), GENERATED - 1)
    assert agreed > before, "no token behind the preemption can be compared"
    for one, other in zip(answer.logprobs[0][: agreed + 1], alone.logprobs[0], strict=False):
        assert max(abs(one[t] - other[t]) for t in one.keys() & other.keys()) <= 0.3


def crowd(llm: Any) -> tuple[int, int, int]:
    """A greedy tenant's requests hold and want all room there is; then a modest one's come, one by one."""
    course = Course(llm)
    for i in range(9):
        course.add(f"greedy {i}", ask(i, salt="greedy"))
    for _ in range(6):
        course.step()
    waits = []
    for i in range(4):
        name = f"modest {i}"
        course.add(name, ask(9 - i, salt="modest", max_tokens=1))
        course.until_over(name)
        waits.append((course.room[name] - course.came[name], course.over[name] - course.came[name]))
    left = sum(f"greedy {i}" not in course.over for i in range(9))
    course.until_over(*course.came)
    return max(room for room, _ in waits), max(over for _, over in waits), left


def test_a_greedy_tenant_does_not_keep_a_modest_one_waiting(engine: Engine) -> None:
    """The modest one has room at once, and its answer as soon as its record is computed, beside two chunks of
    other prompts at most; in the same time it would wait for a whole generation."""
    room, over, left = engine.call(crowd)
    assert left >= 5, "the greedy one wanted room all the time"
    assert room == 1
    assert over <= 10 < GENERATED
