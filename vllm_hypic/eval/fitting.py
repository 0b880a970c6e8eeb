"""Tasks as prompts for which an engine's context has room."""

from __future__ import annotations

from collections.abc import Sequence

from ..bench.engines import Engine
from .task import ChatTemplate, Example, Task, encode

TOGETHER = 64
"""Tasks that are tokenised by one call."""
SPARE = 32
"""Tokens of the context that a prompt leaves free: separators count in the engine's front end."""


class TasksError(ValueError):
    """Tasks that cannot be prompts of the engine."""


def fitting(
    engine: Engine, name: str, tasks: Sequence[Task], *, chat: bool, template: ChatTemplate
) -> list[Example]:
    """Those of ``tasks`` that fit; ``name`` is what errors call them.

    Raises :class:`TasksError` when none does, and for a task that has other segments once it is tokenised.
    """
    examples: list[Example] = []
    for i in range(0, len(tasks), TOGETHER):
        try:
            examples += encode(engine, tasks[i : i + TOGETHER], chat=chat, template=template)
        except ValueError as e:
            raise TasksError(f"{name}: {e}") from e
    context = engine.described["max_model_len"]
    found = [e for e in examples if _tokens(e) <= context]
    if not found:
        raise TasksError(
            f"{name}: no prompt fits the context of {context} tokens; the shortest has "
            f"{min(len(e.prompt) for e in examples)}"
        )
    return found


def _tokens(example: Example) -> int:
    prompt = example.prompt
    return len(prompt) + len(prompt.documents) + example.task.answer_tokens + SPARE
