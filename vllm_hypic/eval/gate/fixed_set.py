"""The tasks of the gate: the same for every run with the same seed."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from ...harness.generators import Generator
from ..results import Metric
from ..task import Task
from ..tasks import longbench
from ..tasks.families import FAMILIES, SEED_STEP, Source

ENGLISH = ("needle", "keyvalue", "variables")
DOCUMENTS = 8
ENGLISH_TOKENS = 128
DEMO_TOKENS = 64
"""Facts in a document: short ones, since seams cost answers, and long documents have no more of them."""
DATA_WORDS = 384
"""Most in a segment of the user's data."""


@dataclass(frozen=True)
class TaskSet:
    """Tasks that are judged together."""

    name: str
    metric: Metric
    tasks: tuple[Task, ...]


def fixed_set(generator: Generator | None, prompts: int, seed: int, *, chat: bool) -> TaskSet:
    """About ``prompts`` tasks, as many of each family; ``generator``: the demo model's, if it is one."""
    source = Source(generator, chat)
    names = ENGLISH if generator is None else generator.LEARNED
    tokens = ENGLISH_TOKENS if generator is None else DEMO_TOKENS
    each = -(-prompts // len(names))
    made = [FAMILIES[name].make(source, seed * SEED_STEP, each, DOCUMENTS, tokens) for name in names]
    return TaskSet("fixed set", Metric.EXACT, tuple(_in_turns(made)))


def data_set(path: Path, prompts: int) -> TaskSet:
    """The first ``prompts`` tasks of a file in LongBench's format.  Raises ``longbench.DataError``."""
    tasks = longbench.read(path, limit=prompts, words=DATA_WORDS)
    return TaskSet(path.name, Metric.F1, tuple(tasks))


def _in_turns(made: Iterable[list[Task]]) -> Iterable[Task]:
    """One of each family, then the next of each: the first tasks are of all families."""
    for together in zip(*made, strict=True):
        yield from together
