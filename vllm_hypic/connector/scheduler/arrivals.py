"""Records on their way into the pool: from the store's tiers, or from another instance.

ordered -> the ranks report -> ended.  The scheduler's thread only.
"""

from __future__ import annotations

import math
import time
from collections.abc import Set
from dataclasses import dataclass, field

from ...pool.plans import RecordPlace
from ...primitives.keys import SegmentKey
from ..metadata import LoadCount
from ..orders import AwaitRecord, FetchRecord, OrderQueue, StopAwaiting


@dataclass
class Arrival:
    """One record on its way, and how many ranks have said what."""

    key: SegmentKey
    remote: bool
    """Another instance sends it; else the store is asked."""
    until: float = math.inf
    """Monotonic time at which waiting for another instance ends."""
    at_store: bool = False
    """The other instance left it in a shared tier: from there the store fetches it now."""
    count: LoadCount = field(default_factory=LoadCount)

    @property
    def sent(self) -> bool:
        """Whether another instance's own sending is what is waited for, or was."""
        return self.remote and not self.at_store

    @property
    def found(self) -> bool:
        """Whether every rank has its part, once the arrival has ended."""
        return not self.count.missed


class Arrivals:
    """Arrivals by the serials of the entries that wait for them.

    ``has_store``: there are tiers to ask; ``ranks``: workers that each have a part of every record.
    """

    def __init__(self, orders: OrderQueue, *, has_store: bool, ranks: int) -> None:
        self._orders, self._has_store, self._ranks = orders, has_store, ranks
        self._arrivals: dict[int, Arrival] = {}

    def __len__(self) -> int:
        """Records under way."""
        return len(self._arrivals)

    def start(self, place: RecordPlace, remote_s: float | None) -> bool:
        """Get the record into its reserved place.  False: it can only be computed.

        ``remote_s``: another instance is said to send it within so many seconds; ``None``: none is.
        One record comes to one place at a time: to that of a deleted one that requests still wait for.
        """
        if any(arrival.key == place.key for arrival in self._arrivals.values()):
            return False
        if remote_s is not None:
            until = time.monotonic() + remote_s
            self._arrivals[place.serial] = Arrival(place.key, remote=True, until=until)
            self._orders.submit(AwaitRecord(place))
        elif self._has_store:
            self._arrivals[place.serial] = Arrival(place.key, remote=False)
            self._orders.submit(FetchRecord(place))
        else:
            return False
        return True

    def awaited(self) -> set[SegmentKey]:
        """Records that other instances are to send."""
        return {arrival.key for arrival in self._arrivals.values() if arrival.remote}

    @property
    def all_sent(self) -> bool:
        """Whether records are on their way from other instances, and none from the store."""
        return bool(self._arrivals) and all(arrival.sent for arrival in self._arrivals.values())

    def at_store(self, serial: int) -> None:
        """An awaited record is in a shared tier: the store fetches it."""
        self._arrivals[serial].at_store = True

    def give_up_late(self) -> None:
        """Await no longer what is past its deadline; the workers report it like any arrival."""
        now = time.monotonic()
        for serial, arrival in self._arrivals.items():
            if now >= arrival.until:
                arrival.until = math.inf
                self._orders.submit(StopAwaiting(serial))

    def give_up_unwanted(self, wanted: Set[int]) -> None:
        """Have the next :meth:`give_up_late` end awaiting all but the serials ``wanted``: their room is given
        back."""
        for serial, arrival in self._arrivals.items():
            if arrival.remote and serial not in wanted:
                arrival.until = min(arrival.until, 0.0)

    def reported(self, serial: int, count: LoadCount) -> Arrival | None:
        """Count what ranks reported; the arrival, if that was the last of them."""
        arrival = self._arrivals[serial]
        arrival.count += count
        if arrival.count.taken + arrival.count.missed < self._ranks:
            return None
        return self._arrivals.pop(serial)
