"""Finds what an engine can take: prompts for its context, batches for its pool, methods for its model."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from ..harness import engine_calls
from ..harness.engines import Engine
from ..harness.settings import model_context
from ..primitives.plan import PoolLimits
from ..primitives.policies import ModelTraits
from .methods import Method
from .task import ChatTemplate, Example, Prompt, Task, encode

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


class PoolError(ValueError):
    """The pool cannot hold the records of a prompt."""


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


def pool_limits(engine: Engine) -> PoolLimits | None:
    """Return what requests may take of the pool together, or ``None`` for a stock engine without a pool."""
    return engine.call(_limits) if engine.hypic else None


def traits(engine: Engine) -> ModelTraits:
    """Return the traits of a hypic engine's model that link methods depend on."""
    return engine.call(_traits)


def pool_batches(examples: Sequence[Example], limits: PoolLimits | None, most: int) -> Iterator[range]:
    """Yield ranges of indices of neighbouring examples: at most ``most``, and no more than the pool holds.

    Segments that do not fit are computed in the stream, or evicted between a cold and a warm request.  Either
    case would falsify the measurement of a method.

    Raises :class:`PoolError` for a single example that does not fit.
    """
    begin = 0
    while begin < len(examples):
        end, pages, slots, blocks = begin, 0, 0, 0
        while end < min(begin + most, len(examples)):
            if limits is not None:
                more = _need(examples[end].prompt, limits)
                pages, slots, blocks = pages + more[0], slots + more[1], blocks + more[2]
                if pages > limits.pages or slots > limits.slots or blocks > limits.tiles:
                    break
            end += 1
        if end == begin:
            example = examples[begin]
            raise PoolError(
                f"a prompt of the family {example.task.family!r}, {len(example.prompt)} tokens in "
                f"{len(example.prompt.documents)} segments, does not fit the public pool: raise --kv-gib, or "
                "pool_bytes or pool_fraction in --hypic"
            )
        yield range(begin, end)
        begin = end


def refused(engine: Engine, methods: Sequence[Method]) -> dict[Method, str]:
    """Return the methods that the engine's model cannot honour, each with the reason."""
    model = traits(engine)
    reasons = {m: link.refused_by(model) for m in methods if (link := m.linked) is not None}
    return {method: reason for method, reason in reasons.items() if reason is not None}


def _need(prompt: Prompt, limits: PoolLimits) -> tuple[int, int, int]:
    """Return the most pages, slots and transition blocks that the records take with any link method."""
    parts = (prompt.head, *prompt.documents)
    pages = sum(-(-len(part) // limits.page_tokens) for part in parts)
    return pages + len(parts) * limits.state_pages, len(parts), len(prompt.documents) * limits.record_tiles


def _limits(llm: Any) -> PoolLimits:
    return engine_calls.scheduler_of(llm).hypic.planner.limits()


def _traits(llm: Any) -> ModelTraits:
    return engine_calls.scheduler_of(llm).hypic.planner.traits
