"""Islands as linear layers run them: from the state where they begin, which goes on behind them as it was.

One state stands beside a request between two passes.  Inside a run it would have to be two, the island's and
the one that is gone back to.  So no pass ends inside a run, and islands are cut into runs where vLLM keeps
states for its prefix cache.  Runs depend on plan and engine, on nothing that happens.
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
"""Tokens.  Hardly an island is longer, as neighbouring windows rarely rank alike."""


@dataclass(frozen=True)
class IslandRuns:
    """``unit``: vLLM may keep a stream's states at multiples of it; ``longest``: most tokens of a run."""

    unit: int
    longest: int = LONGEST_RUN

    @staticmethod
    def for_engine(unit: int, max_pass_tokens: int) -> IslandRuns:
        """Runs that have room in every pass of ``max_pass_tokens`` that is half free."""
        return IslandRuns(unit, max(1, min(LONGEST_RUN, max_pass_tokens // 2)))

    def of(self, plan: PromptPlan) -> Runs:
        """The islands of a plan, each cut into runs."""
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
    """Where a pass ends that would end before stream index ``end``: before the run that it would cut."""
    at = bisect_right(runs, end, key=lambda run: run[0]) - 1
    begin, stop = runs[at] if at >= 0 else (end, end)
    return begin if begin < end < stop else end
