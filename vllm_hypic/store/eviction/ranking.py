"""Held objects in order of recency and cache value, without a sort.

The score is ``recency * density ** alpha``.  Recency is 1 over the time since the object's last use.  Density
is the object's FLOPs saved per byte, relative to the densest held object.  In logarithms the score is recency
plus ``alpha`` times value, both normalised.  The score uses the logarithm of age because the chance of
another use falls roughly as 1 over the time since the last use.

Densities are rounded to half octaves.  Use alone orders the objects of one such grade, so the worst object is
the oldest object of one of a few dozen grades.  ``alpha`` can therefore change at any time, and a use is
O(1).
"""

from __future__ import annotations

import heapq
import math
from collections import OrderedDict
from collections.abc import Iterator

from ..protocol import CacheValue

GRADES_PER_OCTAVE = 2
_TINY = 1e-300
_STEEPEST = 600.0  # exp(600) is finite, and so is its product with an age


def grade(value: CacheValue) -> int:
    """Return the density in half octaves: the logarithm to base ``sqrt(2)`` of FLOPs per byte, rounded."""
    return round(GRADES_PER_OCTAVE * math.log2(max(value.flops_per_byte, _TINY)))


def weight(grade: int, best: int, alpha: float) -> float:
    """Return the factor of an object's age: ``(density of best / density of grade) ** alpha``, at least 1."""
    return math.exp(min(_STEEPEST, alpha * (best - grade) * math.log(2) / GRADES_PER_OCTAVE))


class Ranking:
    """Objects, each with its grade and the time of its last use; times only grow."""

    def __init__(self) -> None:
        self._grades: dict[str, int] = {}
        self._orders: dict[int, OrderedDict[str, int]] = {}  # grade -> key -> last use, oldest first
        self._changes = 0

    def __len__(self) -> int:
        return len(self._grades)

    def used(self, key: str) -> int:
        """Return the time of the last use.  Raises ``KeyError`` for unknown keys.  Changes nothing."""
        return self._orders[self._grades[key]][key]

    def put(self, key: str, grade: int, now: int) -> None:
        """Add the object with a use at ``now``, or give a known object a new grade and use."""
        self.drop(key)
        self._grades[key] = grade
        self._orders.setdefault(grade, OrderedDict())[key] = now

    def touch(self, key: str, now: int) -> None:
        """Note a use of the object at ``now``.  Raises ``KeyError`` for unknown keys."""
        self._changes += 1
        order = self._orders[self._grades[key]]
        order[key] = now
        order.move_to_end(key)

    def regrade(self, key: str, grade: int) -> None:
        """Change the grade, without a use; ``KeyError`` for unknown keys.  O(objects of that grade); rare."""
        if grade == self._grades[key]:
            return
        used = self.used(key)
        self.drop(key)
        self._grades[key] = grade
        order = self._orders.setdefault(grade, OrderedDict())
        order[key] = used
        for later in [k for k, at in order.items() if at > used]:
            order.move_to_end(later)

    def drop(self, key: str) -> None:
        """Remove the object; unknown keys are ignored."""
        self._changes += 1
        grade = self._grades.pop(key, None)
        if grade is not None:
            del self._orders[grade][key]
            if not self._orders[grade]:
                del self._orders[grade]

    def worst_first(self, now: int, alpha: float) -> Iterator[str]:
        """Yield all keys by score at time ``now`` (not before the last use), equal scores by last use.

        The walk costs O(grades), then O(log grades) per key.  Raises ``RuntimeError`` when the ranking
        changes before the walk ends.
        """
        best = max(self._orders, default=0)
        changes = self._changes
        # An entry is (- weighted age, last use, ...): last uses are unique, so that comparisons end there.
        heap = []
        for grade, order in self._orders.items():
            factor = weight(grade, best, alpha)
            rest = iter(order.items())
            key, used = next(rest)
            heap.append((-(now + 1 - used) * factor, used, key, factor, rest))
        heapq.heapify(heap)
        while heap:
            if self._changes != changes:
                raise RuntimeError("the policy changed during the iteration over its worst objects")
            _, _, key, factor, rest = heap[0]
            following = next(rest, None)
            if following is None:
                heapq.heappop(heap)
            else:
                used = following[1]
                heapq.heapreplace(heap, (-(now + 1 - used) * factor, used, following[0], factor, rest))
            yield key
