"""Records on their way to another instance, for requests that ask for the transfer.

For the scheduler's thread only.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from ...pool.plans import RecordPlace
from ..orders import OrderQueue, PushRecord


@dataclass
class _Delivery:
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
        self._deliveries: dict[str, _Delivery] = {}
        self._number = 0

    def __len__(self) -> int:
        """Return the number of requests with a delivery that have not ended."""
        return len(self._deliveries)

    def started(self, request_id: str) -> bool:
        return request_id in self._deliveries

    def start(
        self, request_id: str, places: Iterable[RecordPlace], destination: str, deadline_s: float
    ) -> None:
        """Order the sending of these records, each within ``deadline_s`` seconds."""
        delivery = self._deliveries[request_id] = _Delivery()
        for place in places:
            self._number += 1
            delivery.open.add(self._number)
            self._orders.submit(PushRecord(self._number, place, destination, deadline_s))

    def refuse(self, request_id: str, reason: str) -> None:
        """Send none of the request's records, for ``reason``."""
        self._deliveries[request_id] = _Delivery(faults=[reason])

    def over(self, request_id: str) -> bool:
        """Whether all of a started request's orders have ended."""
        return not self._deliveries[request_id].open

    def fault(self, request_id: str) -> str | None:
        """Return why a record of the request was not delivered; ``None`` without a failed delivery."""
        delivery = self._deliveries.get(request_id)
        return delivery.faults[0] if delivery is not None and delivery.faults else None

    def reported(self, number: int, faults: tuple[str, ...]) -> str | None:
        """Note the ``faults`` of ranks for which an order has ended; an empty fault means a delivered part.

        Returns the record's fault after the last rank's report, empty if it was delivered; else ``None``.
        """
        faults = self._reported.pop(number, ()) + faults
        if len(faults) < self._ranks:
            self._reported[number] = faults
            return None
        fault = next(filter(None, faults), "")
        for delivery in self._deliveries.values():
            if number in delivery.open:
                delivery.open.discard(number)
                if fault:
                    delivery.faults.append(fault)
        return fault

    def forget(self, request_id: str) -> None:
        """Forget a request that has ended."""
        self._deliveries.pop(request_id, None)
