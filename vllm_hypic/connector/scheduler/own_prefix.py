"""Plan of a request that captures its own prefix while it runs: see :mod:`.prefixes`."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from ...primitives.plan import PromptPlan
from .entries import Entry


@dataclass(frozen=True)
class PrefixStretch:
    """Tokens ``[first, stop)`` of a prefix.  ``target``: takes the states behind these tokens; the prefix's
    record, or a pinned checkpoint."""

    first: int
    stop: int
    target: Entry


@dataclass(frozen=True)
class OwnPrefix:
    """The prefix that a request captures into the record at the place ``entry``.

    ``plan``: the plan that the request runs, behind ``base``, which stays pinned until the request ends;
    ``ahead``: incomplete stretches, ascending.
    """

    entry: Entry
    plan: PromptPlan
    base: Entry | None
    ahead: deque[PrefixStretch]

    @property
    def first(self) -> int:
        """Number of the prefix's tokens that the request does not compute."""
        return 0 if self.base is None else self.base.columns

    def makes(self, entry: Entry) -> bool:
        """Whether the request has yet to complete this record."""
        return any(stretch.target is entry for stretch in self.ahead)
