"""Inputs and results of placement: a record's boundaries, depths that requests share, work of prefills.

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
