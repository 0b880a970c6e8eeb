"""What no assignment of work to machines can beat: the exact optimum, and a bound below it."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from vllm_hypic.segment_parallel.router.assign import assign, check_numbers

STEPS = 2_000_000
"""Subsets that :func:`optimal_makespan` looks at before it gives up: some seconds."""
_CLOSE = 1e-12
"""Relative: sums of the same costs in another order differ by less."""


def makespan(costs: Sequence[float], loads: Sequence[float], assignment: Sequence[int]) -> float:
    """When the last machine is done, loads included; 0 without machines.

    Raises ``ValueError`` for bad numbers, as :func:`assign`, and for an assignment that does not fit.
    """
    check_numbers("cost", costs)
    check_numbers("load", loads)
    if len(assignment) != len(costs):
        raise ValueError(f"an assignment of {len(assignment)} for {len(costs)} costs: expected equal lengths")
    ends = list(loads)
    for cost, machine in zip(costs, assignment, strict=True):
        if not 0 <= machine < len(ends):
            raise ValueError(f"machine {machine} in an assignment: expected 0 to {len(ends) - 1}")
        ends[machine] += cost
    return max(ends, default=0.0)


def optimal_makespan(costs: Sequence[float], machines: int, steps: int = STEPS) -> float:
    """The least makespan that any assignment to so many idle machines has, by branch and bound.

    Exact (for floats: to a relative 1e-12).  16 costs take a few milliseconds.

    Raises ``ValueError`` for bad numbers, as :func:`assign`, for less than one machine, and where the proof
    would take more than ``steps``.
    """
    check_numbers("cost", costs)
    if machines < 1:
        raise ValueError(f"machines={machines}: expected at least 1")
    pieces = sorted((cost for cost in costs if cost > 0), reverse=True)
    best = makespan(pieces, [0] * machines, assign(pieces, [0] * machines))
    floor = lower_bound(pieces, machines)
    search = _Search(pieces, machines, steps)
    # Halving first: from LPT straight down, every success would be a small one.
    while best > floor * (1 + _CLOSE):
        halving = best - floor > 1e-4 * best
        limit = (best + floor) / 2 if halving else best * (1 - _CLOSE)
        found = search.below(limit)
        if found is not None:
            best = found
        elif halving:
            floor = limit
        else:
            break
    return best


def lower_bound(costs: Sequence[float], machines: int) -> float:
    """What no assignment to so many idle machines can go below: cheap, at most the optimum."""
    if not costs:
        return 0.0
    pieces = sorted(costs, reverse=True)
    bound = max(sum(pieces) / machines, pieces[0])
    if len(pieces) > machines:  # two of the m + 1 longest share a machine
        bound = max(bound, pieces[machines - 1] + pieces[machines])
    return bound


class _Search:
    """Fills machine after machine: the next one takes the longest piece that is left, and others with it."""

    def __init__(self, pieces: Sequence[float], machines: int, steps: int) -> None:
        self._pieces, self._machines = pieces, machines
        self._steps = 0
        self._most_steps = steps

    def below(self, limit: float) -> float | None:
        """The makespan of some assignment with none above ``limit``, or ``None``: there is none."""
        self._limit = limit
        self._hopeless: set[tuple[int, tuple[int, ...]]] = set()
        return self._fill(tuple(range(len(self._pieces))), self._machines)

    def _fill(self, left: tuple[int, ...], machines: int) -> float | None:
        if not left:
            return 0.0
        total = sum(self._pieces[i] for i in left)
        if machines == 1:
            return total if total <= self._limit else None
        if total > machines * self._limit or (machines, left) in self._hopeless:
            return None
        # The others can take (machines - 1) * limit at most: this one must take the rest.
        least = total - (machines - 1) * self._limit
        for taken in self._subsets(left, least):
            rest = self._fill(tuple(i for i in left if i not in taken), machines - 1)
            if rest is not None:
                return max(rest, sum(self._pieces[i] for i in taken))
        self._hopeless.add((machines, left))
        return None

    def _subsets(self, left: tuple[int, ...], least: float) -> Iterator[frozenset[int]]:
        """What the next machine may take: the first of ``left`` and others, ``least`` to the limit together.

        Only those to which nothing can be added: what fits here need not burden the other machines.
        """
        pieces, limit = self._pieces, self._limit
        after = [0.0] * (len(left) + 1)  # of all pieces from here on
        for i in reversed(range(len(left))):
            after[i] = after[i + 1] + pieces[left[i]]
        stack: list[tuple[int, float, tuple[int, ...], float]] = [(1, pieces[left[0]], left[:1], math.inf)]
        while stack:
            at, load, taken, smallest_out = stack.pop()
            self._steps += 1
            if self._steps > self._most_steps:
                what = f"{len(pieces)} costs on {self._machines} machines"
                raise ValueError(f"{what}: the optimum takes more than {self._most_steps} steps")
            if load + after[at] < least:
                continue
            if at == len(left):
                if load + smallest_out > limit:
                    yield frozenset(taken)
                continue
            cost = pieces[left[at]]
            other = at + 1
            while other < len(left) and pieces[left[other]] == cost:  # equal pieces: which of them is all one
                other += 1
            stack.append((other, load, taken, cost))  # longest first, so the last left out is the smallest
            if load + cost <= limit:
                stack.append((at + 1, load + cost, (*taken, left[at]), smallest_out))
