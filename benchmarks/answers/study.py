"""Runs all families through both engines, as the command asks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from vllm_hypic.eval.fitting import fitting
from vllm_hypic.eval.methods import FULL, Method
from vllm_hypic.eval.runner import MethodAnswer, evaluate, prepare
from vllm_hypic.eval.scores import Likelihood, Scores, likelihood, score
from vllm_hypic.eval.task import ChatTemplate, Example, Task
from vllm_hypic.harness.engines import Engine
from vllm_hypic.harness.report import Steps

from ..lib.stats import Spread
from .results import FamilyResult, TextResult, cell, text_cell

Keep = Callable[[Task, str, MethodAnswer, Scores | Likelihood], None]
"""Callback (task, method, outcome, scores) for every single answer."""


@dataclass
class Study:
    """Results so far, to which :meth:`add` adds families."""

    engine: Engine
    noise: Engine | None
    """Stock engine that cuts prompts into other chunks; ``None``: the noise is not measured."""
    noise_name: str
    methods: Sequence[Method]
    """Methods to compare, with full recompute first."""
    chat: bool
    template: ChatTemplate
    ttft_repeats: int
    steps: Steps
    keep: Keep
    skipped: list[str]
    """Sentences about the methods that the model refuses."""
    results: list[FamilyResult] = field(default_factory=list)
    """Results of families of questions."""
    texts: list[TextResult] = field(default_factory=list)
    """Results of families of continued texts."""
    scores: dict[str, dict[str, list[Scores]]] = field(default_factory=dict)
    """Scores of every question by family and method, in the order of the tasks."""

    def add(self, family: str, tasks: Sequence[Task]) -> FamilyResult | TextResult:
        """Run, score, store and return a family, either of questions or of continued texts.

        Raises ``TasksError`` if no prompt fits the context, ``PoolError`` if a prompt does not fit the pool.
        """
        self.steps.show(f"{family}: accuracy")
        examples = fitting(self.engine, family, tasks, chat=self.chat, template=self.template)
        outcomes = self._outcomes(examples)
        run = family, len(examples), len(tasks) - len(examples)
        self.steps.done(run[-1] * (len(self.methods) + (self.noise is not None)))
        full = outcomes[FULL.name]
        if tasks[0].continuation:
            found = {
                n: [likelihood(o, r) for o, r in zip(own, full, strict=True)] for n, own in outcomes.items()
            }
            times = self._finish(family, examples, outcomes, found)
            base = found[FULL.name]
            texts = tuple(text_cell(n, outcomes[n], own, base, times.get(n)) for n, own in found.items())
            self.texts.append(TextResult(*run, texts))
            return self.texts[-1]
        scores = {
            name: [score(e.task, o, r) for e, o, r in zip(examples, own, full, strict=True)]
            for name, own in outcomes.items()
        }
        times = self._finish(family, examples, outcomes, scores)
        right = scores[FULL.name]
        cells = tuple(cell(n, outcomes[n], own, right, times.get(n)) for n, own in scores.items())
        self.results.append(FamilyResult(*run, cells))
        self.scores[family] = scores
        return self.results[-1]

    def _finish(
        self,
        family: str,
        examples: Sequence[Example],
        outcomes: Mapping[str, Sequence[MethodAnswer]],
        scores: Mapping[str, Sequence[Scores | Likelihood]],
    ) -> dict[str, Spread]:
        """Keep the answers; return times to first token by method name, empty if times are not measured."""
        for name, found in scores.items():
            for example, outcome, one in zip(examples, outcomes[name], found, strict=True):
                self.keep(example.task, name, outcome, one)
        self.steps.show(f"{family}: time to first token")
        if not self.ttft_repeats:
            return {}
        done, repeats = self.steps.done, self.ttft_repeats
        times = first_token_times(self.engine, examples, self.methods, repeats, done=done)
        return {method.name: spread for method, spread in times.items()}

    def _outcomes(self, examples: Sequence[Example]) -> dict[str, list[MethodAnswer]]:
        """Return the outcomes by name: full recompute, its noise, all other methods."""
        found = evaluate(self.engine, examples, self.methods, done=self.steps.done)
        full = found[FULL]
        named = {FULL.name: full}
        if self.noise is not None:
            again = evaluate(self.noise, examples, [], done=self.steps.done, references=full)
            named[self.noise_name] = again[FULL]
        return named | {method.name: outcomes for method, outcomes in found.items()}


def first_token_times(
    engine: Engine,
    examples: Sequence[Example],
    methods: Sequence[Method],
    repeats: int,
    *,
    done: Callable[[int], None] = lambda n: None,
) -> dict[Method, Spread]:
    """Return the times to first token in seconds; repeats use different examples, and methods take turns
    in being first.

    An extra round before the repeats does not count.  ``done`` gets the number of requests measured since its
    last call.
    """
    times: dict[Method, list[float]] = {method: [] for method in methods}
    for repeat in range(-1, repeats):
        example = examples[repeat % len(examples)]
        turn = repeat % len(methods)
        for method in [*methods[turn:], *methods[:turn]]:
            prepare(engine, method, [example])
            ask = method.ask(example.prompt, engine.separator, max_tokens=1, logprobs_of=None)
            taken = engine.ask(replace(ask, logprobs=None)).first_token_s
            if repeat >= 0:
                times[method].append(taken)
                done(1)
    return {method: Spread.of(taken) for method, taken in times.items()}
