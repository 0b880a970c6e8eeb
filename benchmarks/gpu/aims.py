"""What a GPU must reach, beside what it did."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ..lib import report


@dataclass(frozen=True)
class Aim:
    """``value`` must be at least ``limit``, or at most, as ``at_least`` says."""

    what: str
    value: float
    limit: float
    at_least: bool

    @property
    def reached(self) -> bool:
        return self.value >= self.limit if self.at_least else self.value <= self.limit


def aims_table(aims: Sequence[Aim]) -> Any:
    rows = [
        (
            a.what,
            f"{a.value:.3g}",
            f"{'at least' if a.at_least else 'at most'} {a.limit:g}",
            "reached" if a.reached else "missed",
        )
        for a in aims
    ]
    return report.table("aims", ("", "measured", "aim", " "), rows)
