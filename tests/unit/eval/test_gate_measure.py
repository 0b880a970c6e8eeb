"""What the gate makes of engines that answer as they should, and of those that do not."""

import math
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from vllm_hypic.eval import runner
from vllm_hypic.eval.fitting import TasksError
from vllm_hypic.eval.gate import measure as module
from vllm_hypic.eval.gate.criteria import FAULTS, Limits, Verdict, judge
from vllm_hypic.eval.gate.fixed_set import TaskSet
from vllm_hypic.eval.gate.measure import GateEngines, GateMeasurement, MeasureError, measure
from vllm_hypic.eval.methods import Method
from vllm_hypic.eval.scores import Metric
from vllm_hypic.eval.task import ChatTemplate, Task
from vllm_hypic.harness.engine_calls import Answer, Ask
from vllm_hypic.harness.settings import EngineSettings
from vllm_hypic.primitives.options import LinkDefaults

from .gate_numbers import subject
from .stand_ins import SEPARATOR, Bar, BookingEngine

HYPIC, NAIVE = Method("hypic-4", "hypic", 4), Method("naive-4", "naive", 4)
DEFAULTS = LinkDefaults("hypic", 4, "none", "query-15")
RIGHT, WRONG = 1, 2
DOCUMENT = 40
"""Tokens; of them 32, the least that is kept, are not seam."""


def task(number: int, documents: int = 2) -> Task:
    return Task("facts", "s", (" ".join(["w"] * DOCUMENT),) * documents, f"q{number}", ("right",), 4)


SETS = [TaskSet("fixed set", Metric.EXACT, tuple(map(task, range(6))))]
Planted = Callable[[Ask, bool, Answer], Answer]
"""(request, whether its documents were asked about before, answer) -> answer."""


class Model(BookingEngine):
    """Its answers are right, unless others are planted."""

    link_defaults = DEFAULTS

    def __init__(self, planted: Planted = lambda ask, warm, answer: answer, *, linear: bool = True) -> None:
        super().__init__(context=200, linear=linear)
        self.planted = planted

    def has_chat_template(self) -> bool:
        return False

    def subject(self) -> Any:
        return subject()

    def limits(self) -> None:
        return None

    def forget_streams(self) -> None:
        """Documents stay known."""

    def decode(self, answers: list[tuple[int, ...]]) -> list[str]:
        return [{RIGHT: "right", WRONG: "wrong"}[tokens[0]] for tokens in answers]

    def answer(self, ask: Ask) -> Answer:
        places = [i for i, token in enumerate(ask.tokens) if token == SEPARATOR]
        key = tuple(ask.tokens[: places[-1]] if places else ask.tokens)  # without the question
        warm = key in self.held
        self.held.add(key)
        documents = len(places) - 1
        cached = documents * (DOCUMENT - 2 * HYPIC.seam) if warm and documents > 0 else 0
        logprobs = {RIGHT: math.log(0.9), WRONG: math.log(0.1)}
        return self.planted(ask, warm, Answer((RIGHT,), (0.0,), logprobs, len(ask.tokens), cached))


def run(
    monkeypatch: pytest.MonkeyPatch,
    hypic: Model | None = None,
    noise: Model | None = None,
    *,
    methods: tuple[Method, ...] = (HYPIC,),
    sets: list[TaskSet] = SETS,
) -> GateMeasurement:
    engines = {True: hypic or Model(), False: noise or Model()}
    for where in (module, runner):
        monkeypatch.setattr(where, "Engine", lambda *args, hypic, **more: engines[hypic])
    monkeypatch.setattr(module, "running", lambda engine: nullcontext())
    place = GateEngines(EngineSettings(Path("model"), threads=1), 200, {})
    steps: Any = Bar()
    found = measure(place, methods, lambda _: sets, chat=None, template=ChatTemplate(), steps=steps)
    assert steps.total == sum(len(s.tasks) for s in sets) * (len(methods) + 2)
    return found


def with_reuse(change: Callable[[Answer], Answer], reuse: bool = True) -> Planted:
    """Plants a change in what is answered with reuse, cold or warm, or in what is answered without."""
    return lambda ask, warm, answer: change(answer) if (SEPARATOR in ask.tokens) is reuse else answer


def test_a_model_without_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    found = run(monkeypatch)
    numbers = found.numbers[HYPIC]
    assert judge(numbers, Limits()).verdict is Verdict.GO
    assert numbers.reuse is not None and numbers.reuse.reused == numbers.reuse.reusable == 6 * 2 * 32
    assert [(a.name, a.full, a.reuse) for a in numbers.answers] == [("fixed set", 100, 100)]
    assert found.chat is False and found.left_out == 0
    model = Model(with_reuse(lambda answer: replace(answer, tokens=(WRONG,))))
    numbers = run(monkeypatch, model).numbers[HYPIC]
    assert [(a.full, a.reuse, a.loss.value) for a in numbers.answers] == [(100, 0, 100)]


def test_a_method_that_depends_on_the_model_is_the_engines(monkeypatch: pytest.MonkeyPatch) -> None:
    auto = replace(HYPIC, name="hypic-4@cdc", context="auto", islands="auto", mode="cdc")
    named = replace(HYPIC, name="hypic-4/text", context="text", islands="auto")
    assert auto.on(DEFAULTS) == Method("hypic-4/query-15@cdc", "hypic", 4, "none", "query-15", "cdc")
    found = run(monkeypatch, methods=(named,))
    assert list(found.numbers) == [Method("hypic-4/text/query-15", "hypic", 4, "text", "query-15")]


def test_sets_are_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each set has its own scores, of its own answers."""

    def fail(ask: Ask, warm: bool, answer: Answer) -> Answer:
        return replace(answer, tokens=(WRONG,)) if ask.tokens[-1] == model.words["hard?"] else answer

    model = Model(fail)
    hard = TaskSet("hard", Metric.F1, tuple(replace(task(i), question="hard?") for i in range(3)))
    numbers = run(monkeypatch, model, sets=[hard, *SETS]).numbers[HYPIC]
    assert [(a.name, a.metric, a.full, a.loss.n) for a in numbers.answers] == [
        ("hard", "F1", 0, 3),
        ("fixed set", "exact match", 100, 6),
    ]


def test_distributions_against_the_noise_of_another_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    near, far = ({RIGHT: math.log(p), WRONG: math.log(1 - p)} for p in (0.89, 0.5))
    model = Model(with_reuse(lambda answer: replace(answer, logprobs=far)))

    def noisy(ask: Ask, warm: bool, answer: Answer) -> Answer:
        assert ask.logprobs_of == [RIGHT, WRONG], "the most likely tokens of the other engine"
        return replace(answer, logprobs=near)

    numbers = run(monkeypatch, model, Model(noisy)).numbers[HYPIC]
    assert 0 < numbers.noise.kl_p90 < 0.01 < 0.3 < numbers.distances.kl_p90


def faults(found: GateMeasurement, method: Method = HYPIC) -> str:
    judgement = judge(found.numbers[method], Limits())
    assert judgement.verdict is Verdict.NO_GO
    assert {r.criterion for r in judgement.against} == {FAULTS}
    return "; ".join(r.says for r in judgement.against)


def test_faults_of_what_is_reused(monkeypatch: pytest.MonkeyPatch) -> None:
    def differ(ask: Ask, warm: bool, answer: Answer) -> Answer:
        return replace(answer, logprobs={RIGHT: -0.1, WRONG: -2.3}) if warm else answer

    assert "with cold and with warm documents differ" in faults(run(monkeypatch, Model(differ)))
    model = Model(with_reuse(lambda answer: replace(answer, cached=0)))
    assert "0 of 384 reusable tokens were reused" in faults(run(monkeypatch, model))
    # It is not asked for; the other one is judged all the same.

    def asked(ask: Ask, warm: bool, answer: Answer) -> Answer:
        assert ask.extra.get("hypic_link") != "naive"
        return answer

    model = Model(asked, linear=False)
    found = run(monkeypatch, model, methods=(NAIVE, HYPIC))
    assert "this model has no transitions" in faults(found, NAIVE)
    assert judge(found.numbers[HYPIC], Limits()).verdict is Verdict.GO


@pytest.mark.parametrize("bad", [math.nan, -math.inf])
def test_logprobs_that_are_no_numbers(monkeypatch: pytest.MonkeyPatch, bad: float) -> None:
    def broken(ask: Ask, warm: bool, answer: Answer) -> Answer:
        asked_once_more = ask.max_tokens > 1 and SEPARATOR in ask.tokens
        return replace(answer, logprobs={RIGHT: bad, WRONG: bad}) if asked_once_more else answer

    assert f"12 logprobs of first tokens are no numbers ({bad})" in faults(run(monkeypatch, Model(broken)))


def test_a_model_that_is_broken_without_reuse(monkeypatch: pytest.MonkeyPatch) -> None:
    nan = {RIGHT: math.nan, WRONG: math.nan}
    broken = with_reuse(lambda answer: replace(answer, logprobs=nan), reuse=False)
    with pytest.raises(MeasureError, match="model is broken without reuse: 12 logprobs"):
        run(monkeypatch, Model(broken))


def test_tasks_that_are_no_prompts_or_too_long(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(TasksError, match=r"own: .*segment"):
        run(monkeypatch, sets=[TaskSet("own", Metric.F1, (replace(task(0), segments=("w", "")),))])
    long = task(9, documents=5)
    found = run(monkeypatch, sets=[TaskSet("own", Metric.EXACT, (task(0), long, task(1)))])
    assert found.left_out == 1 and found.numbers[HYPIC].answers[0].loss.n == 2
    says = "own: no prompt fits the context of 200 tokens; the shortest has 202"
    with pytest.raises(TasksError, match=says):
        run(monkeypatch, sets=[TaskSet("own", Metric.EXACT, (long,))])
