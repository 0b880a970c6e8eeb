"""The highest rate that a server sustains: bracketing, then bisection."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

WIDEST = 256.0
"""Bracketing gives up this many times above or below the rate it started with."""


@dataclass
class RateSearch:
    """Ask :meth:`next_rate`, measure, tell :meth:`record`; until there is no next rate.

    Doubles or halves from ``start`` until one rate is sustained and one is not, then takes geometric means
    until they are within a factor of ``precision``.  Measurements are noisy: where a lower rate failed
    although a higher one was sustained, the lower one counts.
    """

    start: float
    precision: float = 1.1
    probes: int = 9
    """Most rates that are measured."""
    tried: list[tuple[float, bool]] = field(default_factory=list)

    def __post_init__(self) -> None:
        if not (self.start > 0 and math.isfinite(self.start)):
            raise ValueError(f"start={self.start}: expected a rate > 0")
        if self.precision <= 1:
            raise ValueError(f"precision={self.precision}: expected a factor > 1")

    @property
    def failed(self) -> float | None:
        """The lowest rate that was not sustained."""
        return min((rate for rate, within in self.tried if not within), default=None)

    @property
    def sustained(self) -> float | None:
        """The highest rate that was sustained, of those below :attr:`failed`."""
        bound = math.inf if self.failed is None else self.failed
        return max((rate for rate, within in self.tried if within and rate < bound), default=None)

    def next_rate(self) -> float | None:
        """The rate to measure now; ``None`` when the search is over."""
        if len(self.tried) >= self.probes:
            return None
        low, high = self.sustained, self.failed
        if low is None and high is None:
            return self.start
        if high is None:
            assert low is not None
            return low * 2 if low < self.start * WIDEST else None
        if low is None:
            return high / 2 if high > self.start / WIDEST else None
        return math.sqrt(low * high) if high / low > self.precision else None

    def record(self, rate: float, within: bool) -> None:
        self.tried.append((rate, within))
