"""Requests whose records are yet to be pinned, and whose turn it is.  The scheduler's thread only."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator
from heapq import heapify, heappop, heappush
from itertools import count

_Turn = tuple[int, float, int, str]
"""A priority, a tenant's share, the number of its first request, and the tenant: the least comes first."""


class PendingQueue:
    """Smaller priorities come first, then the tenant that holds the least at present, then who came first.

    A tenant's requests of one priority keep their order.  So a request waits for more urgent ones, for those
    that its tenant was given room for before, and for those that came before it: nobody else can keep it
    waiting, however many there are.  ``held(tenant)``: the share of the pool that a tenant holds.
    """

    def __init__(self, held: Callable[[str], float]) -> None:
        self._held = held
        self._lines: dict[tuple[int, str], OrderedDict[str, int]] = {}
        """Requests of each priority and tenant in the order in which they came, and their numbers in it."""
        self._line_of: dict[str, tuple[int, str]] = {}
        self._numbers = count()

    def __len__(self) -> int:
        return len(self._line_of)

    def __iter__(self) -> Iterator[str]:
        """All requests, in no particular order."""
        return iter(self._line_of)

    def add(self, request_id: str, tenant: str, priority: int) -> None:
        line = (priority, tenant)
        self._lines.setdefault(line, OrderedDict())[request_id] = next(self._numbers)
        self._line_of[request_id] = line

    def discard(self, request_id: str) -> None:
        """The request waits no longer, if it did."""
        line = self._line_of.pop(request_id, None)
        if line is not None:
            del self._lines[line][request_id]
            if not self._lines[line]:
                del self._lines[line]

    def in_turn(self) -> Iterator[str]:
        """The request whose turn it is, then the next one, and so on.

        Whoever takes one discards it before asking for the next; if one is left, its tenant's others are
        passed by.  Takes time in proportion to the number of tenants that wait, not of requests.
        """
        turns = [self._turn(line) for line in self._lines]
        heapify(turns)
        passed: set[str] = set()
        while turns:
            turn = heappop(turns)
            line = (turn[0], turn[3])
            if line not in self._lines or turn[3] in passed:
                continue
            if (now := self._turn(line)) != turn:  # the tenant was given room since
                heappush(turns, now)
                continue
            request_id = next(iter(self._lines[line]))
            yield request_id
            if request_id in self._line_of:
                passed.add(turn[3])
            elif line in self._lines:
                heappush(turns, self._turn(line))

    def _turn(self, line: tuple[int, str]) -> _Turn:
        priority, tenant = line
        return (priority, self._held(tenant), next(iter(self._lines[line].values())), tenant)
