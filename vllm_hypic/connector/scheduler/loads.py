"""Records under way: from the store, or from another instance.

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


@dataclass
class Load:
    """One record; how many ranks have said what."""

    key: SegmentKey
    remote: bool = False
    """Another instance sends it; else the store is asked."""
    at_store: bool = False
    """The other instance left it in a shared tier: from there the store fetches it now."""
    until: float = math.inf
    """Monotonic time at which waiting for another instance ends."""
    count: LoadCount = field(default_factory=LoadCount)

    @property
    def found(self) -> bool:
        """Every rank has its part; of a load that has ended."""
        return not self.count.missed


@dataclass(frozen=True)
class LoadOrders:
    """For the worker: places to load from the store, to await from others, and serials to await no longer."""

    loads: list[RecordPlace]
    awaited: list[RecordPlace]
    unawaited: list[int]


class Loads:
    """``ranks``: workers that each have a part of every record."""

    def __init__(self, ranks: int) -> None:
        self._ranks = ranks
        self._loads: dict[int, Load] = {}
        """By the serial of the entry that waits for it."""
        self._to_load: list[RecordPlace] = []
        self._to_await: list[RecordPlace] = []
        self._to_unawait: list[int] = []

    def __len__(self) -> int:
        """Records under way."""
        return len(self._loads)

    def fetch(self, place: RecordPlace) -> None:
        """Ask the store."""
        self._loads[place.serial] = Load(place.key)
        self._to_load.append(place)

    def await_remote(self, place: RecordPlace, deadline_s: float) -> None:
        """Take the record from whoever sends it, for ``deadline_s`` from now on."""
        self._loads[place.serial] = Load(place.key, remote=True, until=time.monotonic() + deadline_s)
        self._to_await.append(place)

    def awaited(self) -> set[SegmentKey]:
        """Records that other instances are to send."""
        return {load.key for load in self._loads.values() if load.remote}

    @property
    def awaiting(self) -> bool:
        """Whether records are on their way from other instances, and none from the store."""
        return bool(self._loads) and all(load.remote and not load.at_store for load in self._loads.values())

    def at_store(self, serial: int) -> None:
        """An awaited record is in a shared tier: the store fetches it."""
        self._loads[serial].at_store = True

    def give_up_late(self) -> None:
        """On awaited records whose time is over; the worker reports them like any load."""
        now = time.monotonic()
        for serial, load in self._loads.items():
            if now >= load.until:
                load.until = math.inf
                self._to_unawait.append(serial)

    def give_up_unwanted(self, wanted: Set[SegmentKey]) -> None:
        """On awaited records that no request wants now: their room is given back."""
        for load in self._loads.values():
            if load.remote and load.key not in wanted:
                load.until = min(load.until, 0.0)

    def take_orders(self) -> LoadOrders:
        """Those that came up since the last call."""
        orders = LoadOrders(self._to_load, self._to_await, self._to_unawait)
        self._to_load, self._to_await, self._to_unawait = [], [], []
        return orders

    def reported(self, serial: int, count: LoadCount) -> Load | None:
        """A rank has reported; the load, if that was the last one."""
        load = self._loads[serial]
        load.count += count
        if load.count.taken + load.count.missed < self._ranks:
            return None
        return self._loads.pop(serial)
