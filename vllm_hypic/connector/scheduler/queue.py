"""Queue of requests that wait for room for their records.  For the scheduler's thread only."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator
from heapq import heapify, heappop, heappush
from itertools import count

_Turn = tuple[int, float, int, str]
"""A priority, a tenant's share, its first request's number, and the tenant; the least comes first."""


class PendingQueue:
    """Orders requests by priority (the smallest first), then by the share that their tenants hold now (the
    least first), then by arrival.

    A tenant's requests of one priority keep their order.  So a request waits only for more urgent requests,
    for earlier requests, and for requests of its own tenant that got room before.  ``held(tenant)``: the
    share of the pool that a tenant holds.
    """

    def __init__(self, held: Callable[[str], float]) -> None:
        self._held = held
        self._lines: dict[tuple[int, str], OrderedDict[str, int]] = {}
        """Requests of each priority and tenant, in order of arrival, with their arrival numbers."""
        self._line_of: dict[str, tuple[int, str]] = {}
        self._numbers = count()

    def __len__(self) -> int:
        return len(self._line_of)

    def __iter__(self) -> Iterator[str]:
        """Iterate over all requests, in no particular order."""
        return iter(self._line_of)

    def add(self, request_id: str, tenant: str, priority: int) -> None:
        line = (priority, tenant)
        self._lines.setdefault(line, OrderedDict())[request_id] = next(self._numbers)
        self._line_of[request_id] = line

    def discard(self, request_id: str) -> None:
        """Remove the request, if it waits."""
        line = self._line_of.pop(request_id, None)
        if line is not None:
            del self._lines[line][request_id]
            if not self._lines[line]:
                del self._lines[line]

    def in_turn(self) -> Iterator[str]:
        """Yield the requests in their turn.

        The caller discards a yielded request before the next step; if it does not, the iterator skips all
        other requests of that tenant.  The time grows with the number of waiting tenants, not of requests.
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
