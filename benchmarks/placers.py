"""Rules that say where a record keeps states: the engine's, and some that know nothing of requests."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from vllm_hypic.store.placement.depths import Depths, Placement, Placer
from vllm_hypic.store.placement.optimal import OptimalPlacer


@dataclass(frozen=True)
class Spacing:
    """A fixed set of boundaries: ``places(n, count)``, both at least 1, are at most ``count`` of 1 to
    ``n``."""

    places: Callable[[int, int], list[int]]

    def place(self, depths: Depths, count: int) -> Placement:
        n = depths.boundaries
        return depths.judged(self.places(n, min(count, n)) if n and count > 0 else [])


EQUAL = Spacing(lambda n, count: [(n + 1) * k // (count + 1) for k in range(1, count + 1)])
"""Gaps that differ by one at most: best where all depths are as likely, and in the worst case."""
LAST = Spacing(lambda n, count: [n])
"""The end, and nothing else: enough where prompts only grow."""
POWERS = Spacing(lambda n, count: [2**k for k in range(n.bit_length())][-count:])
"""Gaps that double from the begin; the deepest ones where there are more than allowed."""
SQRT = Spacing(lambda n, count: list(range(math.isqrt(n), n + 1, math.isqrt(n)))[:count])
"""As a cache with blocks of ``sqrt(n)`` boundaries; the first where there are too many."""

PLACERS: dict[str, Placer] = {
    "last": LAST,
    "powers": POWERS,
    "sqrt": SQRT,
    "equal": EQUAL,
    "optimal": OptimalPlacer(),
}
