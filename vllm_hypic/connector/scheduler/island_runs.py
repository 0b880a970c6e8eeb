"""Islands in linear layers: an island starts from the state before it, which then resumes unchanged.

A request has one state between two passes.  Inside a run it would need two: the island's state and the state
to restore.  So no pass ends inside a run.  Islands are cut into runs where vLLM ends passes and
keeps states for its prefix cache.  Runs depend only on plan and engine, not on other requests.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from ...primitives.plan import PromptPlan

Runs = tuple[tuple[int, int], ...]
"""Ranges ``[begin, end)`` of stream indices, ascending."""

LONGEST_RUN = 64
"""The most tokens of a run.  Few islands are longer, as neighbouring windows rarely rank alike."""


@dataclass(frozen=True)
class IslandRuns:
    """Cuts islands into runs.  ``unit``: vLLM may end a pass over a stream at multiples of this number of
    tokens; ``longest``: the most tokens of a run."""

    unit: int
    longest: int = LONGEST_RUN

    @staticmethod
    def for_engine(unit: int, max_pass_tokens: int) -> IslandRuns:
        """Return a cutter whose runs fit every pass of ``max_pass_tokens`` that is half free."""
        return IslandRuns(unit, max(1, min(LONGEST_RUN, max_pass_tokens // 2)))

    def of(self, plan: PromptPlan) -> Runs:
        """Return the islands of a plan, each cut into runs, in ascending order."""
        islands = [(a.at, b.at) for s in plan.segments for a, b in pairwise(s.parts)]
        return tuple(run for begin, end in islands for run in self._cut(begin, end))

    def _cut(self, begin: int, end: int) -> list[tuple[int, int]]:
        runs = []
        while begin < end:
            stop = min(end, begin + self.longest, (begin // self.unit + 1) * self.unit)
            runs.append((begin, stop))
            begin = stop
        return runs


def whole_runs(runs: Runs | Sequence[tuple[int, int]], end: int) -> int:
    """Return the stream index at which a pass must end: ``end``, or the begin of a run that contains it."""
    at = bisect_right(runs, end, key=lambda run: run[0]) - 1
    begin, stop = runs[at] if at >= 0 else (end, end)
    return begin if begin < end < stop else end
