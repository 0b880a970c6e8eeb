"""Compares answers: distances between first-token distributions, and equality bit for bit."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping
from dataclasses import dataclass

from . import engine_calls
from .engine_calls import Answer, Ask
from .engines import Engine

TOP = 20
"""Number of tokens that are compared: the most likely tokens of the reference."""


@dataclass(frozen=True)
class Distance:
    """Distance of a distribution to a reference, over the reference's ``TOP`` most likely tokens.

    ``kl``, in nats, compares the distributions over these tokens and "any other", and so never exceeds the
    true KL divergence.
    """

    max_abs: float
    mean_abs: float
    kl: float
    same_argmax: bool


class GateFailed(RuntimeError):
    """Answers are wrong, so that no measurement counts."""


def top(logprobs: Mapping[int, float]) -> list[int]:
    """Return the ``TOP`` most likely tokens, most likely first."""
    return sorted(logprobs, key=lambda i: -logprobs[i])[:TOP]


def distance(reference: Mapping[int, float], other: Mapping[int, float]) -> Distance:
    """Return the distance of two distributions, given as token -> logprob.

    Raises ``KeyError`` if ``other`` lacks a top token of the reference.
    """
    tokens = top(reference)
    gaps = [abs(reference[i] - other[i]) for i in tokens]
    kl = sum(_kl(reference[i], other[i]) for i in tokens)
    rest = [math.log(max(1e-12, 1 - sum(math.exp(d[i]) for i in tokens))) for d in (reference, other)]
    return Distance(
        max_abs=max(gaps),
        mean_abs=statistics.mean(gaps),
        kl=max(0.0, kl + _kl(*rest)),
        same_argmax=tokens[0] == max(other, key=lambda i: other[i]),
    )


def require_same(what: str, one: Answer, other: Answer) -> None:
    """Raise :class:`GateFailed` unless tokens and logprobs are the same, bit for bit."""
    if one.tokens != other.tokens or one.logprobs != other.logprobs:
        both = one.logprobs.keys() & other.logprobs.keys()
        gap = max((abs(one.logprobs[i] - other.logprobs[i]) for i in both), default=math.inf)
        raise GateFailed(
            f"{what} differ: logprobs by up to {gap:.3g}, "
            f"{len(both)} of {len(one.logprobs)} top tokens are the same"
        )


def require_fresh(answer: Answer, who: str) -> None:
    """Raise :class:`GateFailed` if the answer read tokens from a cache."""
    if answer.cached:
        raise GateFailed(f"{who} read {answer.cached} tokens from a cache; expected 0")


def require_cold_equals_warm(hypic: Engine, ask: Ask) -> Answer:
    """Ask with nothing cached, then again; require the same bits, and return the warm answer.

    Both requests need the same order of documents.  The last bits of records, like those of stock vLLM's KV
    cache, depend on the documents that share a pass, and on the places where passes end.  vLLM's prefix cache
    must not serve the first request's stream to the second request.  On CPUs a cached stream would change the
    last bits of long streams, also of plain prompts.
    """
    hypic.call(engine_calls.reset)
    cold = hypic.ask(ask)
    require_fresh(cold, "a cold request")
    hypic.call(engine_calls.forget_streams)
    warm = hypic.ask(ask)
    require_same("a request's answers with cold and with warm documents", cold, warm)
    return warm


def _kl(log_p: float, log_q: float) -> float:
    return math.exp(log_p) * (log_p - log_q)
