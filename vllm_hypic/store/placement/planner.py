"""Plans, for the scheduler, which boundaries of the next records keep a state.

The planner counts depths from a record's start, as in the paper, and from the record's end.  The common part
of many prompts is either a start of fixed length, or all but a tail.  The planner uses the view (start or
end) whose plans would have saved more work of late.

States must be worth their bytes.  Of 0, 1, 2, 4, ... states up to the budget, a plan has the number with
which the record saves most per byte.  Where prompts only grow, only the state at the end remains.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from .depths import DepthHistogram, Depths, Placer
from .optimal import OptimalPlacer

Plan = tuple[int, ...]
"""Depths in tokens, ascending."""
MOST_PLANS = 4096
"""Plans kept between two refreshes: records that no request shares have many lengths and refresh nothing."""


class CheckpointPlanner:
    """Learns from overlaps, and plans by them.  Not thread-safe: its owner locks.

    ``grid``: tokens from a boundary to the next.  ``budget_bytes``: the most bytes of a record's states.
    ``ends_kept``: each record also keeps the state at its end, outside the budget.  ``work``: returns the
    work of a prefill of the given tokens.  ``thrifty`` False: plans use up the budget.  The planner makes
    plans anew after ``refresh`` overlaps; in between, a planned length costs a look-up.
    """

    def __init__(
        self,
        grid: int,
        *,
        state_bytes: int,
        token_bytes: int,
        budget_bytes: int,
        work: Callable[[int], float] = float,
        placer: Placer | None = None,
        ends_kept: bool = True,
        thrifty: bool = True,
        half_life: float = 1000.0,
        refresh: int = 50,
    ) -> None:
        self.grid = grid
        self._state_bytes, self._token_bytes = state_bytes, token_bytes
        most = budget_bytes // max(1, state_bytes)
        self._counts = [c for c in (2**k for k in range(most.bit_length())) if c < most] if thrifty else []
        self._counts += [most] * (most > 0)
        self._placer, self._work = placer or OptimalPlacer(), work
        self._ends_kept, self._thrifty, self._refresh, self._fresh = ends_kept, thrifty, refresh, 0
        self._decay = 0.5 ** (1 / half_life)
        self._from_begin, self._from_end = DepthHistogram(half_life), DepthHistogram(half_life)
        self._saved = [0.0, 0.0]  # work that each view's plans saved lately
        self._plans: dict[tuple[int, int, bool], Plan] = {}
        self._works: list[float] = []  # work from the start to each boundary

    def observe(self, shared: int, tokens: int) -> None:
        """Note that a request shared the first ``shared`` of a record's ``tokens`` tokens, or all of them."""
        whole = shared >= tokens
        for view in (False, True) if not whole else ():
            resumed = max((d for d in self._plan(tokens, 0, view) if d <= shared), default=0)
            self._saved[view] = self._decay * self._saved[view] + self._work(resumed)
        self._from_begin.observe(None if whole else shared // self.grid)
        self._from_end.observe(-(-max(0, tokens - shared) // self.grid))
        self._fresh += 1
        if self._fresh >= self._refresh:
            self._fresh = 0
            self._plans.clear()

    def boundaries(self, tokens: int, shared: int = 0) -> Plan:
        """Return the depths at which a record of ``tokens`` tokens should keep a state.

        ``shared``: tokens that the record has in common with older records, whose end has, or will have, a
        state.  The planner plans and charges only the states behind these tokens.
        """
        return self._plan(tokens, shared, self._saved[True] > self._saved[False])

    def _plan(self, tokens: int, shared: int, from_end: bool) -> Plan:
        last, first = tokens // self.grid, shared // self.grid
        if first >= last:
            return ()
        key = (last, first, from_end)
        if key not in self._plans:
            if len(self._plans) >= MOST_PLANS:
                self._plans.clear()
            self._plans[key] = self._made(*key)
        return self._plans[key]

    def _made(self, last: int, first: int, from_end: bool) -> Plan:
        ends = self._from_end.weights(last)
        weights = ends[::-1].copy() if from_end else self._from_begin.weights(last)
        weights[last] = 0.0 if self._ends_kept else ends[0]
        while len(self._works) <= last:
            self._works.append(self._work(self.grid * len(self._works)))
        work = np.array(self._works[first : last + 1]) - self._works[first]
        nbytes = self._token_bytes * self.grid * (last - first)
        saved = 0.0
        if self._ends_kept:
            saved, nbytes = ends[0] * work[-1], nbytes + self._state_bytes
        plan: Plan = ()
        best = saved / nbytes if self._thrifty else -1.0
        for count in self._counts:
            found = self._placer.place(Depths(weights[first:], work), count)
            value = (saved + found.saved) / (nbytes + len(found.boundaries) * self._state_bytes)
            if value > best:
                best, plan = value, tuple(self.grid * (first + b) for b in found.boundaries)
        return plan
