"""All families through both engines: what the command measures."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from ..harness.engines import Engine
from ..harness.report import Steps
from ..harness.stats import Spread
from . import pool_batches
from .fitting import fitting
from .methods import FULL, Method
from .results import FamilyResult, TextResult, cell, text_cell
from .runner import MethodAnswer, evaluate, first_token_times
from .scores import Likelihood, Scores, likelihood, score
from .task import ChatTemplate, Example, Task

Keep = Callable[[Task, str, MethodAnswer, Scores | Likelihood], None]
"""(task, method, outcome, scores): told of every single answer."""


@dataclass
class Study:
    """What was found so far; filled by :meth:`add`."""

    engine: Engine
    noise: Engine | None
    """A stock engine that cuts prompts into other chunks."""
    noise_name: str
    methods: Sequence[Method]
    """Full recompute is the first."""
    chat: bool
    template: ChatTemplate
    ttft_repeats: int
    steps: Steps
    keep: Keep
    skipped: list[str]
    """Methods that the model refuses, as sentences."""
    results: list[FamilyResult] = field(default_factory=list)
    """Families of questions."""
    texts: list[TextResult] = field(default_factory=list)
    """Families of texts that go on."""
    scores: dict[str, dict[str, list[Scores]]] = field(default_factory=dict)
    """Scores of every question by family and method, in the order of the tasks."""

    def add(self, family: str, tasks: Sequence[Task]) -> FamilyResult | TextResult:
        """Run and score one family, either of questions or of texts that go on; keeps what it gives back.

        Raises ``TasksError`` when no prompt fits the context, ``PoolError`` when one does not fit the
        pool.
        """
        self.steps.show(f"{family}: accuracy")
        examples = fitting(self.engine, family, tasks, chat=self.chat, template=self.template)
        outcomes = self._outcomes(examples)
        self.steps.done((len(tasks) - len(examples)) * (len(self.methods) + (self.noise is not None)))
        if tasks[0].continuation:
            return self._add_texts(family, len(tasks), examples, outcomes)
        scores = {name: self._scored(examples, found, outcomes) for name, found in outcomes.items()}
        self._keep(examples, outcomes, scores)
        by_name = self._times(family, examples)
        cells = tuple(
            cell(name, outcomes[name], found, scores[FULL.name], by_name.get(name))
            for name, found in scores.items()
        )
        self.results.append(FamilyResult(family, len(examples), len(tasks) - len(examples), cells))
        self.scores[family] = scores
        return self.results[-1]

    def _add_texts(
        self,
        family: str,
        asked: int,
        examples: Sequence[Example],
        outcomes: Mapping[str, Sequence[MethodAnswer]],
    ) -> TextResult:
        full = outcomes[FULL.name]
        found = {
            name: [likelihood(o, r) for o, r in zip(own, full, strict=True)] for name, own in outcomes.items()
        }
        self._keep(examples, outcomes, found)
        by_name = self._times(family, examples)
        cells = tuple(
            text_cell(name, outcomes[name], own, found[FULL.name], by_name.get(name))
            for name, own in found.items()
        )
        self.texts.append(TextResult(family, len(examples), asked - len(examples), cells))
        return self.texts[-1]

    def _keep(
        self,
        examples: Sequence[Example],
        outcomes: Mapping[str, Sequence[MethodAnswer]],
        scores: Mapping[str, Sequence[Scores | Likelihood]],
    ) -> None:
        for name, found in scores.items():
            for example, outcome, one in zip(examples, outcomes[name], found, strict=True):
                self.keep(example.task, name, outcome, one)

    def _times(self, family: str, examples: Sequence[Example]) -> dict[str, Spread]:
        """Times to first token by the method's name; empty where none are measured."""
        self.steps.show(f"{family}: time to first token")
        times = (
            first_token_times(self.engine, examples, self.methods, self.ttft_repeats, done=self.steps.done)
            if self.ttft_repeats
            else {}
        )
        return {method.name: spread for method, spread in times.items()}

    def _outcomes(self, examples: Sequence[Example]) -> dict[str, list[MethodAnswer]]:
        """Outcomes by name: full recompute, its noise, the other methods."""
        found = evaluate(self.engine, examples, self.methods, done=self.steps.done)
        full = found[FULL]
        named = {FULL.name: full}
        if self.noise is not None:
            again = evaluate(self.noise, examples, [], done=self.steps.done, references=full)
            named[self.noise_name] = again[FULL]
        return named | {method.name: outcomes for method, outcomes in found.items()}

    @staticmethod
    def _scored(
        examples: Sequence[Example], found: Sequence[MethodAnswer], outcomes: Mapping[str, list[MethodAnswer]]
    ) -> list[Scores]:
        full = outcomes[FULL.name]
        return [score(e.task, o, r) for e, o, r in zip(examples, found, full, strict=True)]


def refused(engine: Engine, methods: Sequence[Method]) -> dict[Method, str]:
    """Methods that the engine's model cannot honour, and why."""
    traits = pool_batches.traits(engine)
    reasons = {m: link.refused_by(traits) for m in methods if (link := m.linked) is not None}
    return {method: reason for method, reason in reasons.items() if reason is not None}
