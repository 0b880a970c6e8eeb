"""The tasks of the gate, which are the same in every run with the same seed."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from ...harness.generators import Generator
from ..scores import Metric
from ..task import Task
from ..tasks import longbench
from ..tasks.families import CONTINUATIONS, FAMILIES, QUESTIONS, SEED_STEP, Source

DEMO_DOCUMENTS, DEMO_TOKENS = 8, 64
"""Documents of a demo model's prompt, and tokens of a document: few, so that a seam is a large part of it."""
TEXTS_SHARE = 3
"""Questions for every continued text: a question is a single measurement, a text one for each token."""
DATA_WORDS = 384
"""Words of the longest segment of the user's data."""


@dataclass(frozen=True)
class TaskSet:
    """Tasks that are judged together."""

    name: str
    metric: Metric | None
    """Metric of the answers; ``None`` for continued texts, whose likelihood counts."""
    tasks: tuple[Task, ...]


def fixed_sets(generator: Generator | None, prompts: int, seed: int, *, chat: bool) -> list[TaskSet]:
    """Return about ``prompts`` questions, equally many of each family, and continued texts.

    ``generator``: the generator of a demo model, which knows only its own questions and no English texts, and
    answers with nothing else.
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
    """Return the first ``prompts`` tasks of a file in LongBench's format.  Raises ``longbench.DataError``."""
    tasks = longbench.read(path, limit=prompts, words=DATA_WORDS)
    return TaskSet(path.name, Metric.F1, tuple(tasks))


def _in_turns(made: Iterable[list[Task]]) -> Iterable[Task]:
    """Yield the first task of each family, then the next of each, so that all families come early."""
    for together in zip(*made, strict=True):
        yield from together
