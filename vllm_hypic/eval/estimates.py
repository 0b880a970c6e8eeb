"""Means over prompts, with 95 % intervals, and percentiles."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

BOUNDS = (2.5, 97.5)
"""Bounds of an interval of 95 %, as percentiles of a bootstrap."""
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


def nll_increase(found: Sequence[float], full: Sequence[float]) -> Estimate:
    """Return by how many percent the mean of ``found`` exceeds the mean of ``full``, resampled in pairs."""
    return difference(found, full).times(100 / statistics.fmean(full))


def percentile(values: list[float], p: int) -> float:
    """Return the smallest of ``values`` that at least ``p`` percent of the values do not exceed.

    Raises ``ValueError`` without values.
    """
    if not values or not 1 <= p <= 100:
        raise ValueError(f"percentile {p} of {len(values)} values: expected 1 to 100, and a value")
    return sorted(values)[-(-p * len(values) // 100) - 1]


def _resampled_means(values: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Draw the counts of the distinct values, so that many equal values cost no more than a single value."""
    distinct, counts = np.unique(values, return_counts=True)
    draws = rng.multinomial(len(values), counts / len(values), size=RESAMPLES)
    return draws @ distinct / len(values)


def _require(values: Sequence[object]) -> None:
    if not len(values):
        raise ValueError("an estimate needs at least one value")
