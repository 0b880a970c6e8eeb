"""Joins the answers of a server's replicas: data-parallel engines, each with its own pool and registry.

All replicas execute a command; the first replica decides which ids exist, and all replicas have these ids.  A
replica that missed commands, because it started late or its server stopped meanwhile, lacks those segments.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar, cast

from msgspec.structs import replace

from .answers import CacheStats, Segment, SegmentPage
from .commands import Failure

_AnswerT = TypeVar("_AnswerT")


def joined(first: _AnswerT, others: Sequence[_AnswerT | Failure]) -> _AnswerT | Failure:
    """Return the joined answer of all replicas; ``first`` answers for the replica that was asked first.  A
    failure of another replica becomes the answer, except for a segment that this replica does not know."""
    for other in others:
        if isinstance(other, Failure) and other.status != 404:
            return other
    found = [other for other in others if not isinstance(other, Failure)]
    answer: object = first
    if isinstance(first, Segment):
        answer = _segment(first, [one for one in found if isinstance(one, Segment)], 1 + len(others))
    elif isinstance(first, SegmentPage):
        pages = [{s.id: s for s in page.segments} for page in found if isinstance(page, SegmentPage)]
        segments = [
            _segment(s, [page[s.id] for page in pages if s.id in page], 1 + len(others))
            for s in first.segments
        ]
        answer = replace(first, segments=segments)
    elif isinstance(first, CacheStats):
        tiers = [first.tiers, *(one.tiers for one in found if isinstance(one, CacheStats))]
        answer = replace(first, tiers=_summed(tiers))
    return cast(_AnswerT, answer)


def _segment(first: Segment, others: list[Segment], replicas: int) -> Segment:
    """Join a segment's answers; ``resident`` needs a record on every replica, as any may serve a request."""
    every = [first, *others]
    return replace(
        first,
        bytes=sum(s.bytes for s in every),
        resident=len(every) == replicas and all(s.resident for s in every),
        stored=any(s.stored for s in every),
    )


def _summed(replicas: list[dict[str, dict[str, float]]]) -> dict[str, dict[str, float]]:
    """Sum numbers by tier name.  A tier that several replicas share is counted once for each replica."""
    tiers: dict[str, dict[str, float]] = {}
    for of_one in replicas:
        for tier, numbers in of_one.items():
            into = tiers.setdefault(tier, {})
            for name, number in numbers.items():
                into[name] = min(into.get(name, 1), number) if name == "up" else into.get(name, 0) + number
    return tiers
