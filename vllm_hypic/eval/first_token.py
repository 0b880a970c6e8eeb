"""Time to first token of every method: one request at a time, its documents asked about before."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from ..harness.engines import Engine
from ..harness.stats import Spread
from .methods import Method
from .runner import prepare
from .task import Example


def first_token_times(
    engine: Engine,
    examples: Sequence[Example],
    methods: Sequence[Method],
    repeats: int,
    *,
    done: Callable[[int], None] = lambda n: None,
) -> dict[Method, Spread]:
    """Seconds; each repeat is another example, and the methods take turns in who is first.

    One round before them is not counted.  ``done`` is told how many requests were measured since the last
    time.
    """
    times: dict[Method, list[float]] = {method: [] for method in methods}
    for repeat in range(-1, repeats):
        example = examples[repeat % len(examples)]
        turn = repeat % len(methods)
        for method in [*methods[turn:], *methods[:turn]]:
            prepare(engine, method, [example])
            ask = method.ask(example.prompt, engine.separator, max_tokens=1, logprobs_of=None)
            taken = engine.ask(replace(ask, logprobs=None)).first_token_s
            if repeat >= 0:
                times[method].append(taken)
                done(1)
    return {method: Spread.of(taken) for method, taken in times.items()}
