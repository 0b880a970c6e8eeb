"""Content-defined chunking: which of the possible places cut a text depends on the text near each alone."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from .places import Place


def local_minima(places: Iterable[Place], reach: int) -> list[Place]:
    """The places that are the smallest of all that begin within ``reach`` tokens of them, in order.

    So two of them are more than ``reach`` tokens apart, on the average of a long text twice that, and an edit
    moves no cut that is further away from it than that.  Of equal places the first wins.
    """
    best: dict[int, Place] = {}
    for place in places:
        if place.start not in best or place < best[place.start]:
            best[place.start] = place
    ordered = [best[start] for start in sorted(best)]
    least: deque[Place] = deque()  # of those ahead and behind within reach, smallest first
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


def _rank(place: Place) -> tuple[int, int]:
    return place.kind, place.sign
