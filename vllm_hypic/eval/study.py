"""All families through both engines: what the command measures."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from ..harness.engines import Engine
from ..harness.report import Steps
from . import pool_batches
from .fitting import fitting
from .methods import FULL, Method
from .results import FamilyResult, cell
from .runner import MethodAnswer, evaluate, first_token_times
from .scores import Scores, score
from .task import ChatTemplate, Example, Task

Keep = Callable[[Task, str, MethodAnswer, Scores], None]
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
    scores: dict[str, dict[str, list[Scores]]] = field(default_factory=dict)
    """Scores of every prompt by family and method, in the order of the tasks."""

    def add(self, family: str, tasks: Sequence[Task]) -> None:
        """Run and score one family.

        Raises ``TasksError`` when no prompt fits the context, ``PoolError`` when one does not fit the
        pool.
        """
        self.steps.show(f"{family}: accuracy")
        examples = fitting(self.engine, family, tasks, chat=self.chat, template=self.template)
        outcomes = self._outcomes(examples)
        self.steps.done((len(tasks) - len(examples)) * (len(self.methods) + (self.noise is not None)))
        scores = {name: self._scored(examples, found, outcomes) for name, found in outcomes.items()}
        for name, found in scores.items():
            for example, outcome, one in zip(examples, outcomes[name], found, strict=True):
                self.keep(example.task, name, outcome, one)
        self.steps.show(f"{family}: time to first token")
        times = (
            first_token_times(self.engine, examples, self.methods, self.ttft_repeats, done=self.steps.done)
            if self.ttft_repeats
            else {}
        )
        by_name = {method.name: spread for method, spread in times.items()}
        cells = tuple(
            cell(name, outcomes[name], found, scores[FULL.name], by_name.get(name))
            for name, found in scores.items()
        )
        self.results.append(FamilyResult(family, len(examples), len(tasks) - len(examples), cells))
        self.scores[family] = scores

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
