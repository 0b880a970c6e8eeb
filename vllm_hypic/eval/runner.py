"""Examples through the engine, method by method."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from ..bench import beside
from ..bench.beside import Answer, Ask
from ..bench.engines import Engine
from ..bench.fidelity import top
from .methods import FULL, PREFIX, Method
from .task import Example

BATCH = 16
"""Requests that run together."""


@dataclass(frozen=True)
class Outcome:
    """What one method made of one example."""

    text: str
    """Without special tokens."""
    tokens: tuple[int, ...]
    """Ends with the end-of-sequence token, unless the answer was cut off."""
    logprobs: dict[int, float]
    """Of the first token: for the most likely ones of full recompute."""
    prompt_tokens: int
    """Without separators."""
    cached: int
    """Prompt tokens that were not computed: read from vLLM's prefix cache or from records."""

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
) -> dict[Method, list[Outcome]]:
    """Outcomes of each method, in the order of ``examples``; full recompute is always among the methods.

    Each method runs once with nothing cached and once more, which is what counts: reused records are what
    it is about, and what was computed for one method must not serve another.  Requests run ``batch`` at a
    time.  ``done`` is told how many (example, method) pairs were finished since the last time.
    """
    found: dict[Method, list[Outcome]] = {}
    for method in dict.fromkeys((FULL, *methods)):
        references = found.get(FULL)
        outcomes: list[Outcome] = []
        for part in (range(len(examples))[i : i + batch] for i in range(0, len(examples), batch)):
            group = [examples[i] for i in part]
            wanted = [None if references is None else top(references[i].logprobs) for i in part]
            outcomes += _answers(engine, method, group, wanted)
            done(len(group))
        found[method] = outcomes
    return found


def _answers(
    engine: Engine, method: Method, group: Sequence[Example], wanted: Sequence[list[int] | None]
) -> Iterator[Outcome]:
    engine.call(beside.reset)
    asks = [
        method.ask(e.prompt, engine.separator, max_tokens=e.task.answer_tokens, logprobs_of=w)
        for e, w in zip(group, wanted, strict=True)
    ]
    if method is PREFIX:
        engine.call(beside.generate, [_warming(e, i, engine) for i, e in enumerate(group)])
    elif method.link is not None:
        engine.call(beside.generate, [replace(ask, max_tokens=1) for ask in asks])
    answers = engine.call(beside.generate, asks)
    texts = engine.call(beside.decode, [answer.tokens for answer in answers])
    for example, answer, text in zip(group, answers, texts, strict=True):
        yield _outcome(example, answer, text)


def _warming(example: Example, seed: int, engine: Engine) -> Ask:
    """The same documents in another order."""
    order = list(range(len(example.prompt.documents)))
    random.Random(seed).shuffle(order)
    prompt = example.prompt.reordered(order, example.prompt.question)
    return PREFIX.ask(prompt, engine.separator, max_tokens=1, logprobs_of=None)


def _outcome(example: Example, answer: Answer, text: str) -> Outcome:
    return Outcome(text, answer.tokens, answer.logprobs, len(example.prompt), answer.cached)
