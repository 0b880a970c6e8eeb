"""Records on their way out of the pool: to other instances, for requests that ask for it, and to the store.

For the scheduler's thread only.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from ...pool.plans import RecordPlace
from ...primitives.keys import SegmentKey
from ..orders import OrderQueue, PushRecord

_REMEMBERED = 4096
"""The most records remembered with parts of some ranks; the other ranks may never store their parts."""


@dataclass
class _PendingPush:
    """The push orders of one request's records."""

    open: set[int] = field(default_factory=set)
    """Numbers of orders that have not ended."""
    faults: list[str] = field(default_factory=list)


class PendingPushes:
    """Tracks deliveries by request.  All orders have different numbers.  Each of ``ranks`` workers sends its
    part of every record, and reports every order once."""

    def __init__(self, orders: OrderQueue, ranks: int = 1) -> None:
        self._orders, self._ranks = orders, ranks
        self._reported: dict[int, tuple[str, ...]] = {}
        """The faults that some ranks reported so far (empty: delivered), by number of the order."""
        self._pushes: dict[str, _PendingPush] = {}
        self._number = 0

    def __len__(self) -> int:
        """Return the number of requests with a delivery that have not ended."""
        return len(self._pushes)

    def started(self, request_id: str) -> bool:
        return request_id in self._pushes

    def start(
        self, request_id: str, places: Iterable[RecordPlace], destination: str, deadline_s: float
    ) -> None:
        """Order the sending of these records, each within ``deadline_s`` seconds."""
        push = self._pushes[request_id] = _PendingPush()
        for place in places:
            self._number += 1
            push.open.add(self._number)
            self._orders.submit(PushRecord(self._number, place, destination, deadline_s))

    def refuse(self, request_id: str, reason: str) -> None:
        """Send none of the request's records, for ``reason``."""
        self._pushes[request_id] = _PendingPush(faults=[reason])

    def over(self, request_id: str) -> bool:
        """Whether all of a started request's orders have ended."""
        return not self._pushes[request_id].open

    def fault(self, request_id: str) -> str | None:
        """Return why a record of the request was not delivered; ``None`` without a failed push."""
        push = self._pushes.get(request_id)
        return push.faults[0] if push is not None and push.faults else None

    def reported(self, number: int, faults: tuple[str, ...]) -> str | None:
        """Note the ``faults`` of ranks for which an order has ended; an empty fault means a delivered part.

        Returns the record's fault after the last rank's report, empty if it was delivered; else ``None``.
        """
        faults = self._reported.pop(number, ()) + faults
        if len(faults) < self._ranks:
            self._reported[number] = faults
            return None
        fault = next(filter(None, faults), "")
        for push in self._pushes.values():
            if number in push.open:
                push.open.discard(number)
                if fault:
                    push.faults.append(fault)
        return fault

    def forget(self, request_id: str) -> None:
        """Forget a request that has ended."""
        self._pushes.pop(request_id, None)


class Saves:
    """Counts stored parts of records.  ``ranks``: number of workers; each stores its part once."""

    def __init__(self, ranks: int) -> None:
        self._ranks = ranks
        self._parts: OrderedDict[int, int] = OrderedDict()
        """Number of stored parts, by serial number, for records with missing parts."""

    def reported(self, saved: Mapping[tuple[int, SegmentKey], int]) -> list[SegmentKey]:
        """Count the parts that ranks report as stored; return the keys of records that are whole now."""
        whole = []
        for (serial, key), parts in saved.items():
            parts += self._parts.pop(serial, 0)
            if parts >= self._ranks:
                whole.append(key)
                continue
            self._parts[serial] = parts
            if len(self._parts) > _REMEMBERED:
                self._parts.popitem(last=False)
        return whole
