"""Prompts that fit the public pool together.

What does not fit is computed in the stream or evicted between a cold and a warm request: either would
be measured as something that it is not.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from ..harness import engine_calls
from ..harness.engines import Engine
from ..harness.prompts import Prompt
from ..primitives.plan import PoolLimits
from ..primitives.policies import ModelTraits
from .task import Example


class PoolError(ValueError):
    """A prompt that the pool cannot hold."""


def pool_limits(engine: Engine) -> PoolLimits | None:
    """What requests may take of the pool together; ``None``: a stock engine has none."""
    return engine.call(_limits) if engine.hypic else None


def traits(engine: Engine) -> ModelTraits:
    """What link methods must know of a hypic engine's model."""
    return engine.call(_traits)


def pool_batches(examples: Sequence[Example], limits: PoolLimits | None, most: int) -> Iterator[range]:
    """Neighbouring examples, by index: at most ``most``, and no more than the pool holds at once.

    Raises :class:`PoolError` for an example that alone does not fit.
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


def _need(prompt: Prompt, limits: PoolLimits) -> tuple[int, int, int]:
    """Most pages, slots and transition blocks that the prompt's records take with any link method."""
    parts = (prompt.head, *prompt.documents)
    pages = sum(-(-len(part) // limits.page_tokens) for part in parts)
    return pages + len(parts) * limits.state_pages, len(parts), len(prompt.documents) * limits.record_tiles


def _limits(llm: Any) -> PoolLimits:
    return engine_calls.scheduler_of(llm).hypic.planner.limits()


def _traits(llm: Any) -> ModelTraits:
    return engine_calls.scheduler_of(llm).hypic.planner.traits
