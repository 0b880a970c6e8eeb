"""What was asked for, and the tasks that this makes."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from ..bench.settings import EngineSettings, model_context
from .task import Task
from .tasks import longbench
from .tasks.english import WORDS_PER_TOKEN
from .tasks.families import FAMILIES, Source

SEED_STEP = 1_000_000
"""Tasks of different seeds are different."""
DATA_TOKENS = 512
"""Most in a segment of a file's contexts, unless it is named."""


@dataclass(frozen=True)
class Settings:
    """What was asked for, as it stands in the JSON."""

    model: str
    engine: EngineSettings
    tasks: tuple[str, ...]
    data: Path | None
    methods: tuple[str, ...]
    prompts: int
    documents: int | None
    tokens: int | None
    facts: int | None
    seed: int
    shapes: dict[str, tuple[int, int]]
    """By family: documents, and tokens of each, about."""
    chat: bool
    chat_template: Path | None
    chat_template_kwargs: dict[str, Any]
    noise_chunk: int | None
    compare_by: str
    ttft_repeats: int


def family_names(tasks: tuple[str, ...] | None, source: Source, data: Path | None) -> tuple[str, ...]:
    """Families to generate.  Raises ``click.UsageError`` for one that does not suit the model."""
    suitable = tuple(name for name, family in FAMILIES.items() if family.suits(source.generator))
    if tasks is None:
        return () if data is not None else suitable
    for name in tasks:
        if name not in suitable:
            raise click.UsageError(
                f"--tasks: {name!r} has no questions for this model; expected {', '.join(suitable)}"
            )
    return tasks


def model_name(folder: Path) -> str:
    """The folder's name, with that of the folder around it where it says nothing itself."""
    found = folder.absolute()
    return f"{found.parent.name}/{found.name}" if found.name == "model" else found.name


def make_tasks(settings: Settings, source: Source) -> dict[str, list[Task]]:
    """Tasks by family.  Raises ``click.UsageError`` for shapes and files that make none."""
    first = settings.seed * SEED_STEP
    made: dict[str, list[Task]] = {}
    for name in settings.tasks:
        documents, tokens = settings.shapes[name]
        try:
            made[name] = FAMILIES[name].make(source, first, settings.prompts, documents, tokens)
        except ValueError as e:
            raise click.UsageError(f"{name}, {documents} documents of {tokens} tokens: {e}") from e
    if settings.data is not None:
        words = int((settings.tokens or DATA_TOKENS) * WORDS_PER_TOKEN)
        try:
            read = longbench.read(settings.data, limit=settings.prompts, words=words)
        except longbench.DataError as e:
            raise click.UsageError(f"--data {e}") from e
        for task in read:
            name = task.family
            if name in settings.tasks:
                name = f"{name} of {settings.data.name}"
            made.setdefault(name, []).append(task)
    return made


def needed_context(model: Path, tasks: Iterable[Task]) -> int:
    """Tokens that the longest prompt takes at most, but not more than the model knows.

    Two characters a token are few in any language that is written with letters or digits.
    """
    longest = max(
        (len(t.system) + sum(map(len, t.segments)) + len(t.question)) // 2 + t.answer_tokens for t in tasks
    )
    known = model_context(model)
    return longest + 512 if known is None else min(longest + 512, known)
