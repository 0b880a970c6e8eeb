"""Correctness first: what must hold before a time is reported."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import wraps
from typing import Any

import click

from ..primitives.policies import LinkMethod
from . import engine_calls
from .engine_calls import Answer, Ask
from .engines import Engine, EngineError
from .fidelity import Distance, distance, top

GROSS_KL = 3.0
"""Nats: a first-token distribution this far from stock vLLM's has nothing to do with it. Reuse with
separators is an approximation, and how good a one depends on the model: only gross errors are refused."""


class GateFailed(RuntimeError):
    """The answers are wrong: no time is reported."""


def reporting_failures(command: Callable[..., Any]) -> Callable[..., Any]:
    """Show a failed gate or a dead engine as one message, exit code 1."""

    @wraps(command)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        try:
            return command(*args, **kwargs)
        except GateFailed as e:
            raise click.ClickException(f"correctness gate: {e}") from e
        except EngineError as e:
            raise click.ClickException(str(e)) from e

    return wrapped


def require_same(what: str, one: Answer, other: Answer) -> None:
    """Same tokens and same logprobs, bit for bit."""
    if one.tokens != other.tokens or one.logprobs != other.logprobs:
        both = one.logprobs.keys() & other.logprobs.keys()
        gap = max((abs(one.logprobs[i] - other.logprobs[i]) for i in both), default=math.inf)
        raise GateFailed(
            f"{what} differ: logprobs by up to {gap:.3g}, "
            f"{len(both)} of {len(one.logprobs)} top tokens are the same"
        )


def require_reuse(answer: Answer, documents: int, tokens: int, link: LinkMethod) -> None:
    """``documents`` documents of ``tokens`` tokens were read from records, but for the seams and islands."""
    inside = documents * (tokens - link.head - link.tail)
    least = inside - (0 if link.islands is None else link.islands.budget(inside))
    if answer.cached < least:
        raise GateFailed(
            f"{answer.cached} of {answer.prompt_tokens} tokens were reused, expected at least {least}; "
            "is the pool too small (--kv-gib, --hypic)?"
        )


def require_fresh(answer: Answer, who: str) -> None:
    """Nothing was cached."""
    if answer.cached:
        raise GateFailed(f"{who} read {answer.cached} tokens from a cache: it should compute all of them")


def first_token_distance(stock: Engine, plain: list[int], other: Engine, ask: Ask) -> Distance:
    """``other``'s answer to ``ask`` against stock vLLM's to the same prompt without separators.

    Asks both for the same tokens' logprobs. Raises :class:`GateFailed` where they are no numbers.
    """
    reference = stock.ask(Ask(plain)).logprobs
    tokens = top(reference)
    found = other.ask(Ask(ask.tokens, logprobs_of=tokens, extra=ask.extra)).logprobs
    return checked_distance(reference, found, other.name)


def checked_distance(reference: Mapping[int, float], found: Mapping[int, float], who: str) -> Distance:
    bad = [i for i, value in found.items() if not math.isfinite(value)]
    if bad:
        raise GateFailed(f"{who}: the logprob of token {bad[0]} is {found[bad[0]]}")
    return distance(reference, found)


def require_close(found: Distance) -> None:
    if found.kl > GROSS_KL:
        raise GateFailed(
            f"the first token's distribution is {found.kl:.2f} nats from stock vLLM's, "
            f"more than {GROSS_KL:g}: a gross error"
        )


def require_cold_equals_warm(hypic: Engine, ask: Ask) -> Answer:
    """Ask with nothing cached, then once more: same bits, from the same records. Returns the warm answer.

    The order of documents must not change between the two: which documents share a pass of the model, and
    where passes end within one, changes the last bits of records, as it does of stock vLLM's KV cache.  Nor
    may vLLM's prefix cache serve the stream of the first: on CPUs that changes last bits of long ones, plain
    prompts alike.
    """
    hypic.call(engine_calls.reset)
    cold = hypic.ask(ask)
    require_fresh(cold, "a cold request")
    hypic.call(engine_calls.forget_streams)
    warm = hypic.ask(ask)
    require_same("a request's answers with cold and with warm documents", cold, warm)
    return warm
