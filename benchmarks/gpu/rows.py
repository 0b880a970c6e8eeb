"""Rows of the table of kernels."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from vllm_hypic.harness.report import percent

from ..lib import report
from ..lib.report import seconds
from ..lib.stats import Spread
from .floors import Floor, Rates, Work
from .timing import Timer

OURS = "ours"
Calls = dict[str, Callable[[], object]]


@dataclass(frozen=True)
class KernelTimes:
    """A kernel in one case. ``seconds``: of ours and of what it is held against, by name, which ran in turns;
    ``floor`` is ours'."""

    kernel: str
    case: str
    seconds: dict[str, Spread]
    work: Work | None
    floor: Floor | None

    @staticmethod
    def measure(
        kernel: str, case: str, calls: Calls, work: Work | None, timer: Timer, rates: Rates
    ) -> KernelTimes:
        """``calls``: ours first; without ``work`` there is no floor."""
        floor = None if work is None else Floor.of(work, rates)
        return KernelTimes(kernel, case, timer.measure(calls), work, floor)

    @property
    def share(self) -> float | None:
        """How much of our time the floor is."""
        return None if self.floor is None else self.floor.seconds / self.seconds[OURS].median

    def ratio(self, other: str) -> Spread:
        """Ours over another, repeat by repeat."""
        return self.seconds[OURS].over(self.seconds[other])


def rows_table(title: str, rows: Sequence[KernelTimes]) -> Any:
    columns = ("kernel", "case", "median", "floor", "of floor", "beside", "median", "ours / it")
    lines = []
    for row in rows:
        floor = "" if row.floor is None else f"{seconds(row.floor.seconds)} {row.floor.by}"
        share = "" if row.share is None else percent(row.share)
        mine = (row.kernel, row.case, seconds(row.seconds[OURS].median), floor, share)
        others = [name for name in row.seconds if name != OURS]
        if not others:
            lines.append((*mine, "", "", ""))
        for i, name in enumerate(others):
            ratio = f"{row.ratio(name).median:.3f}"
            lines.append(
                (*(mine if not i else ("", "", "", "", "")), name, seconds(row.seconds[name].median), ratio)
            )
    return report.table(title, columns, lines)
