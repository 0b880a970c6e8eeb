"""Content-defined chunking: only the text near a possible place decides whether the place cuts the text."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from .places import CutPoint


def local_minima(places: Iterable[CutPoint], reach: int) -> list[CutPoint]:
    """Return, in order, each place that is the smallest of all places within ``reach`` tokens of it.

    Two returned places are more than ``reach`` tokens apart, and twice ``reach`` on average in a long text.
    An edit moves no cut that is further than ``reach`` tokens away.  The first of equal places wins.
    """
    best: dict[int, CutPoint] = {}
    for place in places:
        if place.start not in best or place < best[place.start]:
            best[place.start] = place
    ordered = [best[start] for start in sorted(best)]
    least: deque[CutPoint] = deque()  # places within reach that may be the smallest, smallest first
    found, ahead = [], 0
    for place in ordered:
        while ahead < len(ordered) and ordered[ahead].start <= place.start + reach:
            while least and _rank(least[-1]) > _rank(ordered[ahead]):
                least.pop()
            least.append(ordered[ahead])
            ahead += 1
        while least[0].start < place.start - reach:
            least.popleft()
        if least[0] is place:
            found.append(place)
    return found


def _rank(place: CutPoint) -> tuple[int, int]:
    return place.rank, place.content_hash
