"""Means over prompts, with 95 % intervals."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

Z = 1.959964
"""Standard normal quantile of a two-sided interval of 95 %."""
BOUNDS = (2.5, 97.5)
"""Bounds of that interval, as percentiles of a bootstrap."""
RESAMPLES = 2000
SEED = 20
"""Seed of the resampling: the same values give the same interval."""


@dataclass(frozen=True)
class Estimate:
    """A mean of ``n`` values with its 95 % interval."""

    value: float
    low: float
    high: float
    n: int

    def times(self, factor: float) -> Estimate:
        """Return the estimate in another unit; ``factor`` must be positive."""
        return Estimate(self.value * factor, self.low * factor, self.high * factor, self.n)


def share(hits: Sequence[bool]) -> Estimate:
    """Return the share of true values with Wilson's interval.  Raises ``ValueError`` without values."""
    _require(hits)
    n = len(hits)
    p = sum(hits) / n
    spread = 1 + Z**2 / n
    centre = (p + Z**2 / (2 * n)) / spread
    reach = Z / spread * math.sqrt(p * (1 - p) / n + Z**2 / (4 * n**2))
    # At the ends the interval touches p; rounding must not leave p outside.
    return Estimate(p, max(0.0, min(p, centre - reach)), min(1.0, max(p, centre + reach)), n)


def mean(values: Sequence[float]) -> Estimate:
    """Return the mean with its percentile-bootstrap interval.  Raises ``ValueError`` without values."""
    return mean_of_means([values])


def difference(values: Sequence[float], reference: Sequence[float]) -> Estimate:
    """Return the mean of ``values[i] - reference[i]``, resampled in pairs to cancel differences of prompts.

    The interval is empty if no pair differs.  An empty interval says little about few prompts: with n
    prompts, up to 3 / n of all prompts may differ.  Raises ``ValueError`` without values or for unequal
    lengths.
    """
    return mean([a - b for a, b in zip(values, reference, strict=True)])


def mean_of_means(groups: Sequence[Sequence[float]]) -> Estimate:
    """Return the mean of the groups' means; groups have equal weight and are resampled separately."""
    _require(groups)
    rng = np.random.default_rng(SEED)
    value, resampled = 0.0, np.zeros(RESAMPLES)
    for group in groups:
        _require(group)
        values = np.asarray(group, dtype=np.float64)
        value += float(values.mean()) / len(groups)
        resampled += _resampled_means(values, rng) / len(groups)
    low, high = np.percentile(resampled, BOUNDS)
    return Estimate(value, float(low), float(high), sum(map(len, groups)))


def _resampled_means(values: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Draw the counts of the distinct values, so that many equal values cost no more than a single value."""
    distinct, counts = np.unique(values, return_counts=True)
    draws = rng.multinomial(len(values), counts / len(values), size=RESAMPLES)
    return draws @ distinct / len(values)


def _require(values: Sequence[object]) -> None:
    if not len(values):
        raise ValueError("an estimate needs at least one value")


def relative(other: np.ndarray, reference: np.ndarray) -> float:
    """Return the Frobenius norm of the difference over the reference's norm; zero for equal arrays."""
    difference = float(np.linalg.norm(other.astype(np.float64) - reference))
    return difference / float(np.linalg.norm(reference)) if difference else 0.0


def mean_and_interval(estimate: Estimate) -> str:
    """Format an estimate as its mean and half its interval: ``0.0041 ±0.0003``."""
    return f"{estimate.value:.2g} ±{(estimate.high - estimate.low) / 2:.1g}"
