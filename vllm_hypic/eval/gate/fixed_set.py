"""The tasks of the gate: the same for every run with the same seed."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from ...harness.generators import Generator
from ..results import Metric
from ..task import Task
from ..tasks import longbench
from ..tasks.families import CONTINUATIONS, FAMILIES, QUESTIONS, SEED_STEP, Source

DEMO_DOCUMENTS, DEMO_TOKENS = 8, 64
"""Documents of a demo model's prompt, and tokens of each: few, so that a seam is a large part of each."""
TEXTS_SHARE = 3
"""Questions for every text that goes on: each of a text's tokens tells something, a question only once."""
DATA_WORDS = 384
"""Longest segment of the user's data, in words."""


@dataclass(frozen=True)
class TaskSet:
    """Tasks that are judged together."""

    name: str
    metric: Metric | None
    """``None``: texts that go on; what counts is how likely they are."""
    tasks: tuple[Task, ...]


def fixed_sets(generator: Generator | None, prompts: int, seed: int, *, chat: bool) -> list[TaskSet]:
    """About ``prompts`` questions, as many of each family, and texts that go on.

    ``generator``: the demo model's, if it is one: it knows its own questions, answers with nothing else, and
    knows no English texts.
    """
    source = Source(generator, chat)

    def tasks(names: Sequence[str], count: int) -> tuple[Task, ...]:
        each = -(-count // len(names))
        first, made = seed * SEED_STEP, []
        for name in names:
            family = FAMILIES[name]
            shape = (family.documents, family.tokens) if generator is None else (DEMO_DOCUMENTS, DEMO_TOKENS)
            made.append(family.make(source, first, each, *shape))
        return tuple(_in_turns(made))

    if generator is not None:
        return [TaskSet("fixed set", Metric.EXACT, tasks(generator.LEARNED, prompts))]
    return [
        TaskSet("fixed set", Metric.CONTAINS, tasks(QUESTIONS, prompts)),
        TaskSet("texts", None, tasks(CONTINUATIONS, -(-prompts // TEXTS_SHARE))),
    ]


def data_set(path: Path, prompts: int) -> TaskSet:
    """The first ``prompts`` tasks of a file in LongBench's format.  Raises ``longbench.DataError``."""
    tasks = longbench.read(path, limit=prompts, words=DATA_WORDS)
    return TaskSet(path.name, Metric.F1, tuple(tasks))


def _in_turns(made: Iterable[list[Task]]) -> Iterable[Task]:
    """One of each family, then the next of each: the first tasks are of all families."""
    for together in zip(*made, strict=True):
        yield from together
