"""Records on their way to another instance, on behalf of requests that ask for it.

The scheduler's thread only.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from ...pool.plans import RecordPlace
from ..orders import OrderQueue, PushRecord


@dataclass
class _Delivery:
    """The records of one request."""

    open: set[int] = field(default_factory=set)
    """Orders that have not ended, by number."""
    faults: list[str] = field(default_factory=list)


class Deliveries:
    """Deliveries by request.  Orders are numbered through; each of ``ranks`` workers, which send a part of
    every record, reports each once."""

    def __init__(self, orders: OrderQueue, ranks: int = 1) -> None:
        self._orders, self._ranks = orders, ranks
        self._reported: dict[int, tuple[str, ...]] = {}
        """What some ranks said of their parts, by number of the order."""
        self._deliveries: dict[str, _Delivery] = {}
        self._number = 0

    def __len__(self) -> int:
        """Requests that are not over."""
        return len(self._deliveries)

    def started(self, request_id: str) -> bool:
        return request_id in self._deliveries

    def start(
        self, request_id: str, places: Iterable[RecordPlace], destination: str, deadline_s: float
    ) -> None:
        """Have these records sent; ``deadline_s`` for each."""
        delivery = self._deliveries[request_id] = _Delivery()
        for place in places:
            self._number += 1
            delivery.open.add(self._number)
            self._orders.submit(PushRecord(self._number, place, destination, deadline_s))

    def refuse(self, request_id: str, reason: str) -> None:
        """Have none of the request's records sent."""
        self._deliveries[request_id] = _Delivery(faults=[reason])

    def over(self, request_id: str) -> bool:
        """Whether all of a started request's orders have ended."""
        return not self._deliveries[request_id].open

    def fault(self, request_id: str) -> str | None:
        """Why a record of the request was not delivered; ``None``: all were, or none had to be."""
        delivery = self._deliveries.get(request_id)
        return delivery.faults[0] if delivery is not None and delivery.faults else None

    def reported(self, number: int, faults: tuple[str, ...]) -> str | None:
        """Some ranks say that an order has ended; a fault is empty where the part was delivered.

        Returns the record's fault, empty if it was delivered, when these were the last ranks.
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
        """The request is over."""
        self._deliveries.pop(request_id, None)
