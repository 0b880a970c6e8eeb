"""Runs examples through engines, method by method, for answers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ..harness import engine_calls
from ..harness.engine_calls import FORCING, Answer
from ..harness.engines import Engine
from ..harness.fidelity import top
from ..harness.settings import EngineSettings
from .fitting import pool_batches, pool_limits
from .methods import FULL, Method
from .task import Example

BATCH = 16
"""Requests that run at a time."""
SEQUENCES = 64
"""``max_num_seqs`` of the noise engine: vLLM allows no more sequences than a step has tokens."""


@dataclass(frozen=True)
class MethodAnswer:
    """A method's answer to an example."""

    text: str
    """Text of the answer without special tokens."""
    tokens: tuple[int, ...]
    """Tokens of the answer, with the end-of-sequence token unless the answer was cut off."""
    logprobs: dict[int, float]
    """Logprobs at the first token, for the most likely tokens of full recompute."""
    prompt_tokens: int
    """Count of the prompt's tokens without separators."""
    cached: int
    """Count of prompt tokens read from vLLM's prefix cache or from records, not computed."""
    forced: tuple[float, ...] = ()
    """Logprobs of the tokens of the example's continuation."""

    @property
    def computed(self) -> int:
        return self.prompt_tokens - self.cached


def evaluate(
    engine: Engine,
    examples: Sequence[Example],
    methods: Sequence[Method],
    *,
    done: Callable[[int], None] = lambda n: None,
    batch: int = BATCH,
    references: Sequence[MethodAnswer] | None = None,
) -> dict[Method, list[MethodAnswer]]:
    """Return the outcomes of each method, in the order of ``examples``; full recompute is always included.

    A method's cached data are computed before its requests, and dropped afterwards unless the next method
    reads the same records.  Requests run ``batch`` at a time, or as many as the pool holds; raises
    ``PoolError`` if the pool cannot hold a single request.  ``done`` gets the number of (example, method)
    pairs finished since its last call.  ``references``: full recompute's outcomes on another engine, whose
    most likely tokens are compared instead of this engine's.
    """
    limits = pool_limits(engine)
    found: dict[Method, list[MethodAnswer]] = {m: [] for m in dict.fromkeys((FULL, *methods))}
    reading: dict[Method, list[Method]] = {}
    for method in found:
        reading.setdefault(method.records, []).append(method)
    for alike in reading.values():
        compared = references or (None if FULL in alike else found[FULL])
        for part in pool_batches(examples, limits, batch):
            group = [examples[i] for i in part]
            wanted = [None if compared is None else top(compared[i].logprobs) for i in part]
            prepare(engine, alike[0], group)
            for method in alike:
                found[method] += _answers(engine, method, group, wanted)
                done(len(group))
    return found


def prepare(engine: Engine, method: Method, group: Sequence[Example]) -> None:
    """Empty the caches, and compute what ``method`` finds cached when the same documents come again."""
    engine.call(engine_calls.reset)
    if method is FULL:
        return
    if method.mode == "off":
        # The question is new in every request. A prompt that ends in a separator computes its segments, and
        # nothing else.
        before = [replace(e.prompt, question=()) for e in group]
    else:
        others = [*group[1:], group[0]]
        before = [replace(e.prompt, question=o.prompt.question) for e, o in zip(group, others, strict=True)]
    asks = [
        method.ask(method.earlier(prompt, i), engine.separator, max_tokens=1, logprobs_of=None)
        for i, prompt in enumerate(before)
    ]
    engine.call(engine_calls.generate, asks)


def _answers(
    engine: Engine, method: Method, group: Sequence[Example], wanted: Sequence[list[int] | None]
) -> Iterator[MethodAnswer]:
    asks = [
        method.ask(
            e.prompt,
            engine.separator,
            max_tokens=e.task.answer_tokens,
            logprobs_of=w,
            forced=e.continuation,
        )
        for e, w in zip(group, wanted, strict=True)
    ]
    answers = engine.call(engine_calls.generate, asks)
    texts = engine.call(engine_calls.decode, [answer.tokens for answer in answers])
    for example, answer, text in zip(group, answers, texts, strict=True):
        yield _outcome(example, answer, text)


def _outcome(example: Example, answer: Answer, text: str) -> MethodAnswer:
    return MethodAnswer(
        text, answer.tokens, answer.logprobs, len(example.prompt), answer.cached, answer.forced
    )


def noise_engine(settings: EngineSettings, context: int, chunk: int, **more: Any) -> Engine:
    """Return a stock engine that shows full recompute's own noise, by cutting prompts into other chunks.

    Prompts have up to ``context`` tokens and run in steps of ``chunk`` tokens; ``more``: options of vLLM.
    """
    own = {
        "max_num_batched_tokens": chunk,
        "max_num_seqs": SEQUENCES,
        "enable_prefix_caching": False,
        "logits_processors": [FORCING],
    }
    return Engine(settings, context, hypic=False, name="noise", **{**more, **own})
