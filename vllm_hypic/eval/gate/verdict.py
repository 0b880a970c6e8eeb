"""The gate's judgement: a verdict and its reasons."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any


class Verdict(StrEnum):
    GO = "go"
    NO_GO = "no-go"
    CANNOT_JUDGE = "cannot judge"
    """Full recompute itself answers too little, so that no loss by reuse could show."""


@dataclass(frozen=True)
class Reason:
    """A criterion and its finding."""

    criterion: str
    holds: bool | None
    """Whether the criterion holds; ``None``: the criterion says nothing here."""
    measured: float | None
    limit: float | None
    says: str
    """Sentence with value and limit."""


@dataclass(frozen=True)
class Judgement:
    verdict: Verdict
    reasons: tuple[Reason, ...]

    @property
    def against(self) -> list[Reason]:
        """Return the reasons that speak against a go: failed criteria, or silent criteria if the gate cannot
        judge."""
        kept_from_go = None if self.verdict is Verdict.CANNOT_JUDGE else False
        return [r for r in self.reasons if r.holds is kept_from_go]

    @staticmethod
    def of(reasons: Sequence[Reason], *, answers: str, alone: Collection[str]) -> Judgement:
        """Return a no-go if a criterion does not hold, else a go.

        If all criteria called ``answers`` say nothing, only criteria named in ``alone`` make a no-go, and the
        verdict is never a go.
        """
        judged = any(r.holds is not None and r.criterion == answers for r in reasons)
        if any(r.holds is False and (judged or r.criterion in alone) for r in reasons):
            verdict = Verdict.NO_GO
        elif judged:
            verdict = Verdict.GO
        else:
            verdict = Verdict.CANNOT_JUDGE
        return Judgement(verdict, tuple(reasons))

    @staticmethod
    def from_mapping(values: Mapping[str, Any]) -> Judgement:
        """Undo ``dataclasses.asdict``.  Raises ``ValueError``, ``KeyError`` or ``TypeError``."""
        names = [f.name for f in dataclasses.fields(Reason)]
        reasons = tuple(Reason(**{name: reason[name] for name in names}) for reason in values["reasons"])
        return Judgement(Verdict(values["verdict"]), reasons)
