"""Turns tasks into prompts that fit an engine's context."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from ..harness.engines import Engine
from ..harness.settings import model_context
from .task import ChatTemplate, Example, Task, encode

TOGETHER = 64
"""Tasks that a single call tokenises."""
SPARE = 32
"""Tokens of the context that a prompt leaves free, because the engine's front end counts separators."""


CHARACTERS_PER_TOKEN = 2
"""Low estimate for any language that is written with letters or digits."""
CHAT_TOKENS = 512
"""Generous limit on the tokens that a chat template adds."""


class TasksError(ValueError):
    """The tasks cannot become prompts of the engine."""


def fitting(
    engine: Engine, name: str, tasks: Sequence[Task], *, chat: bool, template: ChatTemplate
) -> list[Example]:
    """Return the ``tasks`` that fit the context, as examples; errors call the tasks ``name``.

    Raises :class:`TasksError` if no task fits, and for a task whose segments change in tokenisation.
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


def needed_context(model: Path, tasks: Iterable[Task], *, least: int = 0) -> int:
    """Return the context in tokens for the longest task, at least ``least``, at most the model's context.

    Raises ``click.UsageError`` if the folder holds no model.
    """
    characters = [(len(t.system) + sum(map(len, t.segments)) + len(t.question), t) for t in tasks]
    longest = max((n // CHARACTERS_PER_TOKEN + t.answer_tokens for n, t in characters), default=0)
    needed = max(least, longest + CHAT_TOKENS)
    return min(needed, model_context(model) or needed)


def _tokens(example: Example) -> int:
    prompt = example.prompt
    return len(prompt) + len(prompt.documents) + example.task.answer_tokens + SPARE
