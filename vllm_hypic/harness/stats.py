"""Statistics of measurements."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Spread:
    """Median and range of repeats; ``values`` keeps them all, in the order they were measured."""

    median: float
    min: float
    max: float
    values: tuple[float, ...]

    @staticmethod
    def of(values: Sequence[float]) -> Spread:
        """Raises ``ValueError`` without values."""
        if not values:
            raise ValueError("a spread needs at least one value")
        return Spread(statistics.median(values), min(values), max(values), tuple(values))

    def over(self, other: Spread) -> Spread:
        """Ratios, repeat by repeat: both were measured in turns, so what slows one repeat slows both.

        The median is the median of the ratios.
        """
        return Spread.of([a / b for a, b in zip(self.values, other.values, strict=True)])


def slope(x: Sequence[float], y: Sequence[float]) -> float:
    """Least-squares slope of ``y`` over ``x``; raises ``ValueError`` where it is not defined."""
    if len(x) != len(y):
        raise ValueError(f"a slope needs as many x as y, got {len(x)} and {len(y)}")
    if len(set(x)) < 2:
        raise ValueError("a slope needs two different x")
    return statistics.linear_regression(x, y).slope


def slopes(x: Sequence[float], y: Sequence[Spread]) -> Spread:
    """The slope of every repeat, as a spread."""
    repeats = zip(*(one.values for one in y), strict=True)
    return Spread.of([slope(x, values) for values in repeats])


def percentile(values: list[float], p: int) -> float:
    """The smallest of ``values`` that at least ``p`` percent of them do not exceed.

    Raises ``ValueError`` without values.
    """
    if not values or not 1 <= p <= 100:
        raise ValueError(f"percentile {p} of {len(values)} values: expected 1 to 100, and a value")
    return sorted(values)[-(-p * len(values) // 100) - 1]


def misses_allowed(n: int, p: int) -> int:
    """How many of ``n`` values may exceed a limit that their :func:`percentile` ``p`` does not exceed."""
    return n - -(-p * n // 100)
