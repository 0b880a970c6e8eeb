"""A histogram of the overlap depths that requests had lately."""

from __future__ import annotations

import numpy as np

from .base import Floats

_LARGEST = 1e100


class DepthHistogram:
    """Counts overlaps by the number of shared boundaries; ``half_life`` more overlaps halve a count's weight.

    The memory is proportional to the deepest overlap so far: 8 bytes per boundary.
    """

    def __init__(self, half_life: float = 1000.0) -> None:
        if half_life <= 0:
            raise ValueError(f"half_life={half_life:g}: expected more than 0")
        self._growth = 2.0 ** (1 / half_life)
        self._counts: Floats = np.zeros(64)
        self._scale = 1.0  # weight of the next count: its growth makes earlier counts lighter

    def observe(self, boundary: int | None) -> None:
        """Count an overlap of ``boundary`` boundaries, 0 or more; ``None``: only age the earlier counts."""
        if boundary is None:
            boundary, count = 0, 0.0
        else:
            count = self._scale
        if boundary >= len(self._counts):
            more = max(boundary + 1, 2 * len(self._counts)) - len(self._counts)
            self._counts = np.concatenate([self._counts, np.zeros(more)])
        self._counts[boundary] += count
        self._scale *= self._growth
        if self._scale > _LARGEST:
            self._counts /= self._scale
            self._scale = 1.0

    def weights(self, boundaries: int) -> Floats:
        """Return the weights of the depths 0 to ``boundaries``, ``[boundaries + 1]``; the latest weighs 1."""
        found = np.zeros(boundaries + 1)
        counts = self._counts[: boundaries + 1]
        found[: len(counts)] = counts
        return found * (self._growth / self._scale)
