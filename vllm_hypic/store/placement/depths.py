"""Depths that requests share: inputs and results of placement, and a histogram of recent overlaps.

A record has ``n`` boundaries, ``1`` to ``n``, a fixed number of tokens apart.  Boundary 0 is the record's
start, whose state is always known.  A request that shares ``d`` boundaries resumes from the deepest state at
or before ``d`` and computes from there to ``d``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class Depths:
    """``weights[d]``: number of requests that share exactly ``d`` boundaries.  ``work[d]``: work from the
    start to boundary ``d``, in any unit, 0 first and never falling.  Both are ``float64 [n + 1]``."""

    weights: Floats
    work: Floats

    def __post_init__(self) -> None:
        sane = self.weights.shape == self.work.shape and self.work.ndim == 1 and self.work.size >= 1
        if not sane or self.work[0] != 0 or np.any(np.diff(self.work) < 0) or np.any(self.weights < 0):
            raise ValueError("expected equal lengths, weights >= 0, work that starts at 0 and never falls")

    @property
    def boundaries(self) -> int:
        return len(self.weights) - 1

    def judged(self, kept: Sequence[int]) -> Placement:
        """Return the placement of states at the boundaries ``kept``, and its saving under these depths."""
        places = np.unique(np.array([0, *kept], dtype=np.int64))
        resumed = places[np.searchsorted(places, np.arange(len(self.work)), side="right") - 1]
        saved = float(self.weights @ self.work[resumed])
        return Placement(tuple(int(b) for b in places[1:]), saved)


@dataclass(frozen=True)
class Placement:
    """The boundaries that keep a state, ascending and without 0, and the work that these states save."""

    boundaries: tuple[int, ...]
    saved: float


class Placer(Protocol):
    """A rule that decides which boundaries keep a state."""

    def place(self, depths: Depths, count: int) -> Placement:
        """Return at most ``count`` boundaries of the record; boundaries that save nothing may be missing."""


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
