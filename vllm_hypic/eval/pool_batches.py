"""Groups prompts into batches that fit the public pool.

Segments that do not fit are computed in the stream, or evicted between a cold and a warm request.  Either
case would falsify the measurement of a method.
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
    """The pool cannot hold the records of a prompt."""


def pool_limits(engine: Engine) -> PoolLimits | None:
    """Return what requests may take of the pool together, or ``None`` for a stock engine without a pool."""
    return engine.call(_limits) if engine.hypic else None


def traits(engine: Engine) -> ModelTraits:
    """Return the traits of a hypic engine's model that link methods depend on."""
    return engine.call(_traits)


def pool_batches(examples: Sequence[Example], limits: PoolLimits | None, most: int) -> Iterator[range]:
    """Yield ranges of indices of neighbouring examples: at most ``most``, and no more than the pool holds.

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


def _need(prompt: Prompt, limits: PoolLimits) -> tuple[int, int, int]:
    """Return the most pages, slots and transition blocks that the records take with any link method."""
    parts = (prompt.head, *prompt.documents)
    pages = sum(-(-len(part) // limits.page_tokens) for part in parts)
    return pages + len(parts) * limits.state_pages, len(parts), len(prompt.documents) * limits.record_tiles


def _limits(llm: Any) -> PoolLimits:
    return engine_calls.scheduler_of(llm).hypic.planner.limits()


def _traits(llm: Any) -> ModelTraits:
    return engine_calls.scheduler_of(llm).hypic.planner.traits
