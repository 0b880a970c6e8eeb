"""Settings of a run, and the tasks that they select."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from vllm_hypic.eval.task import Task
from vllm_hypic.eval.tasks import longbench
from vllm_hypic.eval.tasks.families import SEED_STEP, Source
from vllm_hypic.eval.tasks.natural import words_of
from vllm_hypic.harness.settings import EngineSettings

from .tasks.families import FAMILIES, suits, usual

DATA_TOKENS = 512
"""Default limit on the tokens in a segment of a file's contexts."""


@dataclass(frozen=True)
class Settings:
    """Settings of a run, as in the JSON report."""

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
    """Documents, and approximate tokens of a document, by family."""
    texts: str | None
    """Digest of the installed texts behind natural families; ``None`` without natural families."""
    chat: bool
    chat_template: Path | None
    chat_template_kwargs: dict[str, Any]
    noise_chunk: int | None
    compare_by: str
    ttft_repeats: int


def family_names(tasks: tuple[str, ...] | None, source: Source, data: Path | None) -> tuple[str, ...]:
    """Return the families to generate.  Raises ``click.UsageError`` for a family unsuitable for the model."""
    suitable = tuple(name for name in FAMILIES if suits(name, source.generator))
    if tasks is None:
        return () if data is not None else tuple(n for n in suitable if usual(n, source.generator))
    for name in tasks:
        if name not in suitable:
            raise click.UsageError(
                f"--tasks: {name!r} has no questions for this model; expected {', '.join(suitable)}"
            )
    return tasks


def has_chat_template(model: Path) -> bool:
    """Whether the tokenizer in the folder has a chat template."""
    if (model / "chat_template.jinja").is_file():
        return True
    try:
        return bool(json.loads((model / "tokenizer_config.json").read_text()).get("chat_template"))
    except (OSError, ValueError):
        return False


def make_tasks(settings: Settings, source: Source) -> dict[str, list[Task]]:
    """Return the tasks by family.  Raises ``click.UsageError`` for shapes and files that give no tasks."""
    first = settings.seed * SEED_STEP
    made: dict[str, list[Task]] = {}
    for name in settings.tasks:
        documents, tokens = settings.shapes[name]
        try:
            made[name] = FAMILIES[name].make(source, first, settings.prompts, documents, tokens)
        except ValueError as e:
            raise click.UsageError(f"{name}, {documents} documents of {tokens} tokens: {e}") from e
    if settings.data is not None:
        words = words_of(settings.tokens or DATA_TOKENS)
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
