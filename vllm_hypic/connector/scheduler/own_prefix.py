"""What a request captures of its own prefix while it runs: see :mod:`.prefixes`."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from ...primitives.plan import PromptPlan
from .entries import Entry


@dataclass(frozen=True)
class PrefixStretch:
    """Tokens ``[first, stop)`` of a prefix.  States behind them go to ``target``: its record, or a
    checkpoint, which is pinned."""

    first: int
    stop: int
    target: Entry


@dataclass(frozen=True)
class OwnPrefix:
    """A request captures the record of its prefix, which has the place ``entry``.

    ``plan``: what it runs, behind ``base``, which is pinned as long as it lives; ``ahead``: stretches that
    are not complete, ascending.
    """

    entry: Entry
    plan: PromptPlan
    base: Entry | None
    ahead: deque[PrefixStretch]

    @property
    def first(self) -> int:
        """Tokens that it does not compute."""
        return 0 if self.base is None else self.base.columns

    def makes(self, entry: Entry) -> bool:
        """Whether this is a record that it has yet to complete."""
        return any(stretch.target is entry for stretch in self.ahead)
