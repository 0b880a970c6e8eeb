"""Records on their way into the pool: from the store's tiers, or from another instance.

ordered -> the ranks report -> ended.  The scheduler's thread only.
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
"""Source of what is in the pool already.  Sources have vLLM's names: values of its ``CacheHitSource``."""
INSTANCE = "p2p"
"""Source of what another instance sent."""
ELSEWHERE = "external_unspecified"
_TIERS = {"memory": "host", "disk": "disk"}
"""Sources by types of tiers; the others are :data:`ELSEWHERE`."""
PATIENCE_S = 10.0
"""Seconds after which a record that nobody offers is given up, if a request waits for room."""


@dataclass
class Arrival:
    """One record on its way, and how many ranks have said what."""

    key: SegmentKey
    remote: bool
    """Another instance sends it; else the store is asked."""
    space: Space = field(default_factory=Space)
    """What is reserved for it."""
    asked: float = 0.0
    """Monotonic time at which it was first awaited, or last found to be offered, or not."""
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


@dataclass
class Allowance:
    """What records of others that one request awaits may take: all it needs while nobody else's are awaited,
    and with those of others no more than ``share``.  ``taken``: by all that are awaited."""

    share: Space
    taken: Space

    def __post_init__(self) -> None:
        self._alone = self.taken == Space()

    def take(self, space: Space) -> bool:
        """Whether one more may be awaited, which then counts."""
        taken = self.taken + space
        if not self._alone and not self.share.covers(taken):
            return False
        self.taken = taken
        return True


class Arrivals:
    """Arrivals by the serials of the entries that wait for them.

    ``tiers``: those that are asked; ``ranks``: workers that each have a part of every record;
    ``share``: of the pool, for awaited records of several requests.
    """

    def __init__(self, orders: OrderQueue, *, tiers: Iterable[TierConfig], ranks: int, share: Space) -> None:
        self._orders, self._ranks, self._share = orders, ranks, share
        self._sources = {tier.name: _TIERS.get(tier.type, ELSEWHERE) for tier in tiers}
        self._arrivals: dict[int, Arrival] = {}
        self._keys: set[SegmentKey] = set()
        """Keys of all arrivals, no two of which have the same."""

    def __len__(self) -> int:
        """Records under way."""
        return len(self._arrivals)

    def allowance(self) -> Allowance:
        """What the next request may await."""
        return Allowance(self._share, sum((a.space for a in self._arrivals.values() if a.remote), Space()))

    def start(
        self,
        place: RecordPlace,
        space: Space,
        remote_s: float | None,
        instead: tuple[SegmentKey, ...] = (),
    ) -> bool:
        """Get the record into its reserved place.  False: it can only be computed.

        ``remote_s``: another instance is said to send it within so many seconds; ``None``: none is.
        ``instead``: of which the store says whether it has them, where it does not have the record.
        One record comes to one place at a time: to that of a deleted one that requests still wait for.
        """
        if place.key in self._keys:
            return False
        if remote_s is not None:
            now = time.monotonic()
            self._arrivals[place.serial] = Arrival(
                place.key, remote=True, space=space, asked=now, until=now + remote_s
            )
            self._orders.submit(AwaitRecord(place))
        elif self._sources:
            self._arrivals[place.serial] = Arrival(place.key, remote=False)
            self._orders.submit(FetchRecord(place, instead))
        else:
            return False
        self._keys.add(place.key)
        return True

    def awaited(self) -> set[SegmentKey]:
        """Records that other instances are to send."""
        return {arrival.key for arrival in self._arrivals.values() if arrival.remote}

    def at_store(self, serial: int) -> None:
        """An awaited record is in a shared tier: the store fetches it."""
        self._arrivals[serial].at_store = True

    def source(self, arrival: Arrival) -> str:
        """Where the record came from that has arrived.  The queue before the tiers is memory, too."""
        return INSTANCE if arrival.sent else self._sources.get(arrival.count.route, _TIERS["memory"])

    def give_up_late(self) -> None:
        """Await no longer what is past its deadline; the workers report it like any arrival."""
        now = time.monotonic()
        for serial, arrival in self._arrivals.items():
            if now >= arrival.until:
                arrival.until = math.inf
                self._orders.submit(StopAwaiting(serial))

    def give_up_unoffered(self) -> None:
        """Somebody waits for room: await no longer what nobody has offered for :data:`PATIENCE_S`.

        It is computed in its place, so that who holds the room goes on.
        """
        now = time.monotonic()
        for serial, arrival in self._arrivals.items():
            if arrival.sent and now >= arrival.asked + PATIENCE_S:
                arrival.asked = now
                self._orders.submit(StopAwaiting(serial, unless_offered=True))

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
            if arrival.count.missed and arrival.remote:
                arrival.until = min(arrival.until, 0.0)  # without this part the others are of no use
            return None
        self._keys.discard(arrival.key)
        return self._arrivals.pop(serial)
