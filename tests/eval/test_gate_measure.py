"""What the gate makes of engines that answer as they should, and of those that do not."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from vllm_hypic.eval import runner
from vllm_hypic.eval.fitting import TasksError
from vllm_hypic.eval.gate import measure as module
from vllm_hypic.eval.gate.criteria import FAULTS, Limits, judge
from vllm_hypic.eval.gate.fixed_set import TaskSet
from vllm_hypic.eval.gate.measure import GateMeasurement, MeasureError, Place, measure
from vllm_hypic.eval.gate.verdict import Verdict
from vllm_hypic.eval.methods import Method
from vllm_hypic.eval.results import Metric
from vllm_hypic.eval.task import TEXTS, ChatTemplate, Task
from vllm_hypic.harness.engine_calls import Answer, Ask
from vllm_hypic.harness.settings import EngineSettings
from vllm_hypic.primitives.options import LinkDefaults
from vllm_hypic.primitives.policies import ModelTraits

from .gate_numbers import subject

HYPIC, NAIVE = Method("hypic-4", "hypic", 4), Method("naive-4", "naive", 4)
DEFAULTS = LinkDefaults("hypic", 4, "none", "query-15")
SEPARATOR, RIGHT, WRONG = 0, 1, 2
DOCUMENT = 40
"""Tokens; of them 32, the least that is kept, are not seam."""


def task(number: int, documents: int = 2) -> Task:
    text = " ".join(["w"] * DOCUMENT)
    return Task("facts", "s", (text,) * documents, f"q{number}", ("right",), 4)


SETS = [TaskSet("fixed set", Metric.EXACT, tuple(map(task, range(6))))]


@dataclass
class Model:
    """Stands in for an engine of a model whose tokens are words; answers are right, unless one is planted."""

    hypic: bool = True
    planted: Callable[[Ask, bool, Answer], Answer] = lambda ask, warm, answer: answer
    """(request, whether its documents were asked about before, answer) -> answer."""
    has_linear: bool = True
    warm: set[tuple[int, ...]] = field(default_factory=set)
    described: dict[str, int] = field(default_factory=lambda: {"max_model_len": 200})
    separator: int = SEPARATOR
    link_defaults: LinkDefaults = DEFAULTS

    def call(self, function: Callable[..., Any], *args: Any) -> Any:
        return getattr(self, function.__name__.lstrip("_"))(*args)

    def ask(self, ask: Ask) -> Answer:
        return self.generate([ask])[0]

    def has_chat_template(self) -> bool:
        return False

    def subject(self) -> Any:
        return subject()

    def token_ids(self, texts: list[str], template: ChatTemplate) -> list[list[int]]:
        words = [text.replace(TEXTS.sep, f" {TEXTS.sep} ").split() for text in texts]
        return [[SEPARATOR if w == TEXTS.sep else 3 + len(w) for w in line] for line in words]

    def traits(self) -> ModelTraits:
        return ModelTraits(has_linear=self.has_linear, has_attention=True)

    def limits(self) -> None:
        return None

    def reset(self) -> None:
        self.warm.clear()

    def forget_streams(self) -> None:
        """Documents stay known."""

    def decode(self, answers: list[tuple[int, ...]]) -> list[str]:
        return [{RIGHT: "right", WRONG: "wrong"}[tokens[0]] for tokens in answers]

    def generate(self, asks: list[Ask]) -> list[Answer]:
        return [self._answer(ask) for ask in asks]

    def _answer(self, ask: Ask) -> Answer:
        places = [i for i, token in enumerate(ask.tokens) if token == SEPARATOR]
        key = tuple(ask.tokens[: places[-1]] if places else ask.tokens)  # without the question
        warm = key in self.warm
        self.warm.add(key)
        documents = len(places) - 1
        cached = documents * (DOCUMENT - 2 * HYPIC.seam) if warm and documents > 0 else 0
        logprobs = {RIGHT: math.log(0.9), WRONG: math.log(0.1)}
        return self.planted(ask, warm, Answer((RIGHT,), (0.0,), logprobs, len(ask.tokens), cached))


class Silent:
    """A progress bar that nobody sees."""

    def __init__(self) -> None:
        self.count = 0

    def show(self, what: str) -> None:
        pass

    def done(self, n: int = 1) -> None:
        self.count += n


def run(
    monkeypatch: pytest.MonkeyPatch,
    hypic: Model | None = None,
    noise: Model | None = None,
    *,
    methods: tuple[Method, ...] = (HYPIC,),
    sets: list[TaskSet] = SETS,
) -> GateMeasurement:
    engines = {True: hypic or Model(), False: noise or Model(hypic=False)}

    def running(engine: Model) -> AbstractContextManager[None]:
        return nullcontext()

    for where in (module, runner):
        monkeypatch.setattr(where, "Engine", lambda *args, hypic, **more: engines[hypic])
    monkeypatch.setattr(module, "running", running)
    place = Place(EngineSettings(Path("model"), threads=1), 200, {})
    steps = Silent()
    found = measure(
        place,
        methods,
        lambda chat: sets,
        chat=None,
        template=ChatTemplate(),
        steps=steps,  # type: ignore[arg-type]
    )
    assert steps.count == sum(len(s.tasks) for s in sets) * (len(methods) + 2)
    return found


def with_reuse(change: Callable[[Answer], Answer]) -> Callable[[Ask, bool, Answer], Answer]:
    """Plants a change in what is answered with reuse, cold or warm."""
    return lambda ask, warm, answer: change(answer) if SEPARATOR in ask.tokens else answer


def test_a_model_without_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    found = run(monkeypatch)
    numbers = found.numbers[HYPIC]
    assert judge(numbers, Limits()).verdict is Verdict.GO
    assert numbers.reuse is not None and numbers.reuse.reused == numbers.reuse.reusable == 6 * 2 * 32
    assert [(a.name, a.full, a.reuse) for a in numbers.answers] == [("fixed set", 100, 100)]
    assert found.chat is False and found.left_out == 0


def test_a_method_that_depends_on_the_model_is_the_engines(monkeypatch: pytest.MonkeyPatch) -> None:
    auto = replace(HYPIC, name="hypic-4@cdc", context="auto", islands="auto", mode="cdc")
    named = replace(HYPIC, name="hypic-4/text", context="text", islands="auto")
    on = Method("hypic-4/query-15@cdc", "hypic", 4, "none", "query-15", "cdc")
    assert auto.on(DEFAULTS) == on
    found = run(monkeypatch, methods=(named,))
    assert list(found.numbers) == [Method("hypic-4/text/query-15", "hypic", 4, "text", "query-15")]


def test_sets_are_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each set has its own scores, of its own answers."""

    def fail(ask: Ask, warm: bool, answer: Answer) -> Answer:
        return replace(answer, tokens=(WRONG,)) if ask.tokens[-1] == 3 + len("hard?") else answer

    hard = TaskSet("hard", Metric.F1, tuple(replace(task(i), question="hard?") for i in range(3)))
    numbers = run(monkeypatch, Model(planted=fail), sets=[hard, *SETS]).numbers[HYPIC]
    assert [(a.name, a.metric, a.full, a.loss.n) for a in numbers.answers] == [
        ("hard", "F1", 0, 3),
        ("fixed set", "exact match", 100, 6),
    ]


def test_answers_that_reuse_gets_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Model(planted=with_reuse(lambda answer: replace(answer, tokens=(WRONG,))))
    numbers = run(monkeypatch, model).numbers[HYPIC]
    assert [(a.full, a.reuse, a.loss.value) for a in numbers.answers] == [(100, 0, 100)]


def test_distributions_against_the_noise_of_another_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    near, far = ({RIGHT: math.log(p), WRONG: math.log(1 - p)} for p in (0.89, 0.5))
    model = Model(planted=with_reuse(lambda answer: replace(answer, logprobs=far)))

    def noisy(ask: Ask, warm: bool, answer: Answer) -> Answer:
        assert ask.logprobs_of == [RIGHT, WRONG], "the most likely tokens of the other engine"
        return replace(answer, logprobs=near)

    numbers = run(monkeypatch, model, Model(hypic=False, planted=noisy)).numbers[HYPIC]
    assert numbers.noise is not None and numbers.distances is not None
    assert 0 < numbers.noise.kl_p90 < 0.01 < 0.3 < numbers.distances.kl_p90


def faults(found: GateMeasurement, method: Method = HYPIC) -> str:
    judgement = judge(found.numbers[method], Limits())
    assert judgement.verdict is Verdict.NO_GO
    assert {r.criterion for r in judgement.against} == {FAULTS}
    return "; ".join(r.says for r in judgement.against)


def test_warm_that_differs_from_cold(monkeypatch: pytest.MonkeyPatch) -> None:
    def differ(ask: Ask, warm: bool, answer: Answer) -> Answer:
        return replace(answer, logprobs={RIGHT: -0.1, WRONG: -2.3}) if warm else answer

    assert "with cold and with warm documents differ" in faults(run(monkeypatch, Model(planted=differ)))


@pytest.mark.parametrize("bad", [math.nan, -math.inf])
def test_logprobs_that_are_no_numbers(monkeypatch: pytest.MonkeyPatch, bad: float) -> None:
    def broken(ask: Ask, warm: bool, answer: Answer) -> Answer:
        asked_once_more = ask.max_tokens > 1 and SEPARATOR in ask.tokens
        return replace(answer, logprobs={RIGHT: bad, WRONG: bad}) if asked_once_more else answer

    assert f"12 logprobs of first tokens are no numbers ({bad})" in faults(
        run(monkeypatch, Model(planted=broken))
    )


def test_nothing_is_reused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Model(planted=with_reuse(lambda answer: replace(answer, cached=0)))
    assert "0 of 384 reusable tokens were reused" in faults(run(monkeypatch, model))


def test_a_method_that_the_model_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is not asked for; the other one is judged all the same."""

    def asked(ask: Ask, warm: bool, answer: Answer) -> Answer:
        assert ask.extra.get("hypic_link") != "naive"
        return answer

    model = Model(planted=asked, has_linear=False)
    found = run(monkeypatch, model, methods=(NAIVE, HYPIC))
    assert "this model has none" in faults(found, NAIVE)
    assert judge(found.numbers[HYPIC], Limits()).verdict is Verdict.GO


def test_a_model_that_is_broken_without_reuse(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(ask: Ask, warm: bool, answer: Answer) -> Answer:
        return replace(answer, logprobs={RIGHT: math.nan, WRONG: math.nan})

    with pytest.raises(MeasureError, match="model is broken without reuse: 12 logprobs"):
        run(monkeypatch, Model(planted=lambda a, w, x: x if SEPARATOR in a.tokens else broken(a, w, x)))


def test_tasks_that_are_no_prompts_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    empty = replace(task(0), segments=("w", ""))
    with pytest.raises(TasksError, match=r"own: .*segment"):
        run(monkeypatch, sets=[TaskSet("own", Metric.F1, (empty,))])


def test_prompts_that_are_too_long_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    long = task(9, documents=5)
    found = run(monkeypatch, sets=[TaskSet("own", Metric.EXACT, (task(0), long, task(1)))])
    assert found.left_out == 1 and found.numbers[HYPIC].answers[0].loss.n == 2
    with pytest.raises(
        TasksError, match="own: no prompt fits the context of 200 tokens; the shortest has 202"
    ):
        run(monkeypatch, sets=[TaskSet("own", Metric.EXACT, (long,))])
