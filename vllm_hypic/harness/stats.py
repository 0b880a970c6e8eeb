"""Statistics of measurements."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass


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


def percentile(values: list[float], p: int) -> float:
    """Return the smallest of ``values`` that at least ``p`` percent of the values do not exceed.

    Raises ``ValueError`` without values.
    """
    if not values or not 1 <= p <= 100:
        raise ValueError(f"percentile {p} of {len(values)} values: expected 1 to 100, and a value")
    return sorted(values)[-(-p * len(values) // 100) - 1]


def misses_allowed(n: int, p: int) -> int:
    """Return how many of ``n`` values may exceed a limit that :func:`percentile` ``p`` does not exceed."""
    return n - -(-p * n // 100)
