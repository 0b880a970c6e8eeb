"""The placement that saves the most work, after Sparse Prefix Caching: an exact dynamic programme.

``F(c)`` is the number of requests that share boundary ``c`` or more.  States at ``c_1 < c_2 < ...`` save
``(W[c_1] - W[0]) F(c_1) + (W[c_2] - W[c_1]) F(c_2) + ...``.  The most that ``m`` states up to ``j`` save is::

    best_m[j] = max over i <= j of  best_{m-1}[i] + (W[j] - W[i]) F(j)

For a fixed ``j``, a line of slope ``F(j)`` touches the best point ``(W[i], best[i])`` last: a vertex of the
points' upper hull.  Points with ``i > j`` may stay: they give at most ``best_{m-1}[j]``, because
``F`` falls.  Hulls of ordered points take O(N), so that the whole takes O(N M) and a binary search of numpy's
for each query.  ``N`` counts the boundaries where requests end: other boundaries are never better.
"""

from __future__ import annotations

import numpy as np

from .depths import Depths, Floats, Placement


class OptimalPlacer:
    """Places states so that they save the most work under the given depths."""

    def place(self, depths: Depths, count: int) -> Placement:
        ends = np.flatnonzero(depths.weights)
        ends = ends[ends > 0]
        if not ends.size or count <= 0 or depths.work[ends[-1]] == 0:
            return depths.judged([])
        weights = depths.weights[ends]
        chosen = _chosen(depths.work[ends] / depths.work[ends[-1]], weights[::-1].cumsum()[::-1], count)
        return depths.judged([int(ends[i]) for i in chosen])


def _chosen(work: Floats, sharing: Floats, count: int) -> list[int]:
    """Return the numbers of the points that save most: ``work`` rises, ``sharing`` falls, both ``[N]``."""
    numbers = np.arange(len(work))
    best: Floats = work * sharing
    before: list[np.ndarray] = []
    for _ in range(min(count, len(work)) - 1):
        hull = _upper_hull(work.tolist(), best.tolist())
        slopes = np.diff(best[hull]) / np.diff(work[hull])  # falling
        touched = hull[np.searchsorted(-slopes, -sharing)]
        found = best[touched] + (work - work[touched]) * sharing
        better = (touched < numbers) & (found > best)
        if not better.any():
            break
        before.append(np.where(better, touched, -1))
        best = np.where(better, found, best)
    at = int(best.argmax())
    chosen = [at]
    for layer in reversed(before):  # -1: no state before this point saves more
        if layer[at] >= 0:
            at = int(layer[at])
            chosen.append(at)
    return chosen[::-1]


def _upper_hull(x: list[float], y: list[float]) -> np.ndarray:
    """Return the numbers of the points on the upper hull.  ``x`` is in order; of equal ``x``, the highest
    ``y`` counts."""
    hull: list[int] = []
    for i, (xi, yi) in enumerate(zip(x, y, strict=True)):
        while hull:
            a = hull[-1]
            if x[a] < xi:
                if len(hull) < 2:
                    break
                o = hull[-2]
                if (y[a] - y[o]) * (xi - x[a]) > (yi - y[a]) * (x[a] - x[o]):
                    break
            elif y[a] > yi:
                break
            hull.pop()
        if not hull or x[hull[-1]] < xi:
            hull.append(i)
    return np.array(hull)
