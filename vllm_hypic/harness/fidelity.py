"""Distances between first-token distributions."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping
from dataclasses import dataclass

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


def _kl(log_p: float, log_q: float) -> float:
    return math.exp(log_p) * (log_p - log_q)
