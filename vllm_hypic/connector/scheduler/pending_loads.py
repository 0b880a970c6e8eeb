"""Records on their way into the pool: from the store's tiers, or from another instance.

ordered -> the ranks report -> ended.  For the scheduler's thread only.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Set
from dataclasses import dataclass, field

from ...config.store import TierConfig
from ...pool.plans import RecordPlace, Space
from ...primitives.keys import SegmentKey
from ..metadata import LoadCount
from ..orders import AwaitRecord, FetchRecord, OrderQueue, StopAwaiting

POOL = "device"
"""Source of records already in the pool.  Sources have vLLM's names: values of its ``CacheHitSource``."""
INSTANCE = "p2p"
"""Source of records that another instance sent."""
ELSEWHERE = "external_unspecified"
_TIERS = {"memory": "host", "disk": "disk"}
"""Sources by types of tiers; all other types are :data:`ELSEWHERE`."""
PATIENCE_S = 10.0
"""Seconds after which a record that no instance offers is given up, if a request waits for room."""


@dataclass
class PendingLoad:
    """A record on its way, and the ranks' reports about it."""

    key: SegmentKey
    remote: bool
    """Whether another instance sends the record; otherwise the store is asked for it."""
    space: Space = field(default_factory=Space)
    """The space reserved for the record; empty for records from the store."""
    asked: float = 0.0
    """Monotonic time of the first await, or of the last check for an offer."""
    until: float = math.inf
    """Monotonic time at which waiting for another instance ends."""
    at_store: bool = False
    """Whether the other instance left the record in a shared tier, from which the store now fetches it."""
    count: LoadCount = field(default_factory=LoadCount)

    @property
    def sent(self) -> bool:
        """Whether the record comes, or came, directly from another instance."""
        return self.remote and not self.at_store

    @property
    def found(self) -> bool:
        """Whether every rank has its part of the record; valid once the load has ended."""
        return not self.count.missed


@dataclass
class LoadBudget:
    """The space that records awaited by one request may take: unlimited if no other request awaits records,
    else no more than ``share`` with theirs.  ``taken``: the space of all awaited records."""

    share: Space
    taken: Space

    def __post_init__(self) -> None:
        self._alone = self.taken == Space()

    def take(self, space: Space) -> bool:
        """Return whether a record of this space may be awaited; if so, add its space to ``taken``."""
        taken = self.taken + space
        if not self._alone and not self.share.covers(taken):
            return False
        self.taken = taken
        return True


class PendingLoads:
    """Tracks loads, by the serial numbers of the entries that wait for them.

    ``tiers``: the tiers to ask; ``ranks``: number of workers, each with a part of every record;
    ``share``: the part of the pool for awaited records of several requests.
    """

    def __init__(self, orders: OrderQueue, *, tiers: Iterable[TierConfig], ranks: int, share: Space) -> None:
        self._orders, self._ranks, self._share = orders, ranks, share
        self._sources = {tier.name: _TIERS.get(tier.type, ELSEWHERE) for tier in tiers}
        self._loads: dict[int, PendingLoad] = {}
        self._keys: set[SegmentKey] = set()
        """Keys of all loads, each of a different record."""

    def __len__(self) -> int:
        """Return the number of records on their way."""
        return len(self._loads)

    def budget(self) -> LoadBudget:
        """Return the budget for records that the next request may await."""
        return LoadBudget(self._share, sum((a.space for a in self._loads.values() if a.remote), Space()))

    def start(
        self,
        place: RecordPlace,
        space: Space,
        remote_s: float | None,
        fallback_keys: tuple[SegmentKey, ...] = (),
    ) -> bool:
        """Order the record into its reserved place; return false if the record can only be computed.

        ``remote_s``: seconds within which another instance should send the record; ``None``: no instance
        sends it.  ``fallback_keys``: keys for which the store reports its hits if the record is missing.
        A record comes to one place at a time, maybe that of a deleted, still awaited entry.
        """
        if place.key in self._keys:
            return False
        if remote_s is not None:
            now = time.monotonic()
            self._loads[place.serial] = PendingLoad(
                place.key, remote=True, space=space, asked=now, until=now + remote_s
            )
            self._orders.submit(AwaitRecord(place))
        elif self._sources:
            self._loads[place.serial] = PendingLoad(place.key, remote=False)
            self._orders.submit(FetchRecord(place, fallback_keys))
        else:
            return False
        self._keys.add(place.key)
        return True

    def awaited(self) -> set[SegmentKey]:
        """Return the keys of the records that other instances are to send."""
        return {load.key for load in self._loads.values() if load.remote}

    def at_store(self, serial: int) -> None:
        """Note that an awaited record is in a shared tier, from which the store fetches it."""
        self._loads[serial].at_store = True

    def source(self, load: PendingLoad) -> str:
        """Return the source of an arrived record.  The queue before the tiers counts as memory, too."""
        return INSTANCE if load.sent else self._sources.get(load.count.route, _TIERS["memory"])

    def give_up_late(self) -> None:
        """Stop awaiting records past their deadlines; the workers report these like any load."""
        now = time.monotonic()
        for serial, load in self._loads.items():
            if now >= load.until:
                load.until = math.inf
                self._orders.submit(StopAwaiting(serial))

    def give_up_unoffered(self) -> None:
        """Stop awaiting records not offered for :data:`PATIENCE_S` seconds, as a request waits for room.

        The engine computes these records in their places, so that the requests that hold the room continue.
        """
        now = time.monotonic()
        for serial, load in self._loads.items():
            if load.sent and now >= load.asked + PATIENCE_S:
                load.asked = now
                self._orders.submit(StopAwaiting(serial, unless_offered=True))

    def give_up_unwanted(self, wanted: Set[int]) -> None:
        """Let the next :meth:`give_up_late` stop awaiting all serials but ``wanted``, to free room."""
        for serial, load in self._loads.items():
            if load.remote and serial not in wanted:
                load.until = min(load.until, 0.0)

    def reported(self, serial: int, count: LoadCount) -> PendingLoad | None:
        """Count the ranks' reports; return the load after the last rank's report, else ``None``."""
        load = self._loads[serial]
        load.count += count
        if load.count.taken + load.count.missed < self._ranks:
            if load.count.missed and load.remote:
                load.until = min(load.until, 0.0)  # a record with a missing part is of no use
            return None
        self._keys.discard(load.key)
        return self._loads.pop(serial)
