"""Statistics of measurements."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from vllm_hypic.eval.estimates import Estimate

if TYPE_CHECKING:
    from vllm_hypic.harness.fidelity import Distance

Z = 1.959964
"""Standard normal quantile of a two-sided interval of 95 %."""


@dataclass(frozen=True)
class Spread:
    """Median and range of repeats; ``values`` holds all repeats in the order of measurement."""

    median: float
    min: float
    max: float
    values: tuple[float, ...]

    @staticmethod
    def of(values: Sequence[float]) -> Spread:
        """Return the spread of ``values``; raise ``ValueError`` without values."""
        if not values:
            raise ValueError("a spread needs at least one value")
        return Spread(statistics.median(values), min(values), max(values), tuple(values))

    def over(self, other: Spread) -> Spread:
        """Return the spread of the ratios of both, repeat by repeat; the median is the median of the ratios.

        Both were measured in turns, so that a disturbance of a repeat slows both.
        """
        return Spread.of([a / b for a, b in zip(self.values, other.values, strict=True)])


def slope(x: Sequence[float], y: Sequence[float]) -> float:
    """Return the least-squares slope of ``y`` over ``x``; raise ``ValueError`` if it is not defined."""
    if len(x) != len(y):
        raise ValueError(f"a slope needs as many x as y, got {len(x)} and {len(y)}")
    if len(set(x)) < 2:
        raise ValueError("a slope needs two different x")
    return statistics.linear_regression(x, y).slope


def slopes(x: Sequence[float], y: Sequence[Spread]) -> Spread:
    """Return the slopes of all repeats as a spread."""
    repeats = zip(*(one.values for one in y), strict=True)
    return Spread.of([slope(x, values) for values in repeats])


def misses_allowed(n: int, p: int) -> int:
    """Return how many of ``n`` values may exceed a limit that percentile ``p`` does not exceed."""
    return n - -(-p * n // 100)


@dataclass(frozen=True)
class Fidelity:
    """Medians and worst cases of distances over several prompts; ``agreement`` is a share of the prompts."""

    max_abs: float
    max_abs_worst: float
    mean_abs: float
    kl: float
    kl_worst: float
    agreement: float
    prompts: int

    @staticmethod
    def of(distances: Sequence[Distance]) -> Fidelity:
        return Fidelity(
            max_abs=statistics.median(d.max_abs for d in distances),
            max_abs_worst=max(d.max_abs for d in distances),
            mean_abs=statistics.median(d.mean_abs for d in distances),
            kl=statistics.median(d.kl for d in distances),
            kl_worst=max(d.kl for d in distances),
            agreement=statistics.mean(d.same_argmax for d in distances),
            prompts=len(distances),
        )


def share(hits: Sequence[bool]) -> Estimate:
    """Return the share of true values with Wilson's interval.  Raises ``ValueError`` without values."""
    n = len(hits)
    if not n:
        raise ValueError("an estimate needs at least one value")
    p = sum(hits) / n
    spread = 1 + Z**2 / n
    centre = (p + Z**2 / (2 * n)) / spread
    reach = Z / spread * math.sqrt(p * (1 - p) / n + Z**2 / (4 * n**2))
    # At the ends the interval touches p; rounding must not leave p outside.
    return Estimate(p, max(0.0, min(p, centre - reach)), min(1.0, max(p, centre + reach)), n)


def relative(other: np.ndarray, reference: np.ndarray) -> float:
    """Return the Frobenius norm of the difference over the reference's norm; zero for equal arrays."""
    difference = float(np.linalg.norm(other.astype(np.float64) - reference))
    return difference / float(np.linalg.norm(reference)) if difference else 0.0


def mean_and_interval(estimate: Estimate) -> str:
    """Format an estimate as its mean and half its interval: ``0.0041 ±0.0003``."""
    return f"{estimate.value:.2g} ±{(estimate.high - estimate.low) / 2:.1g}"
