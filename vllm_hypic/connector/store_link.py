"""Worker's side of the segment store: complete records go there, missing ones come from there.

load plan -> tiles offered -> prefetch (reader fills the pool on the store's thread) -> poll -> report
capture complete -> reserve -> copied out of the pool -> commit (checksum and tiers in the background)
"""

from __future__ import annotations

import time
from collections import OrderedDict

from vllm.logger import init_logger

from ..primitives.keys import SegmentKey
from ..store.protocol import SegmentStore, StoreStats
from ..store.record import record_nbytes, seal_record
from ..store.totals import since
from ..store.worth import ObjectName, Worth
from .metadata import HypicMetadata, LoadCount, RecordPlace, StoreAction, StoreOrder
from .pool import DevicePool
from .record_codec import RecordCodec

logger = init_logger("vllm.hypic.store")

REPORT_EVERY_S = 1.0
"""Statistics travel to the scheduler no more often."""
_STORES_PER_STEP = 4
"""Records that one step copies out of the pool at most; each takes as long as a copy of its bytes."""


class StoreLink:
    """Moves records between one worker's pool and its store.  Called by the worker's thread only."""

    def __init__(self, store: SegmentStore, codec: RecordCodec, pool: DevicePool) -> None:
        self.store, self.codec, self.pool = store, codec, pool
        self._loading: dict[ObjectName, RecordPlace] = {}
        self._unstored: OrderedDict[int, RecordPlace] = OrderedDict()
        self._ended: dict[int, LoadCount] = {}
        self._tiles: dict[int, int] = {}
        self._handed: set[SegmentKey] = set()
        self._reported: StoreStats | None = None
        self._reported_at = float("-inf")
        self.behind = False
        """The store had no room for a record in the last step."""

    def absorb(self, metadata: HypicMetadata) -> None:
        """Carry out a step's orders and start its loads."""
        for slot in metadata.dropped_slots:
            for serial in [s for s, place in self._unstored.items() if place.slot == slot]:
                del self._unstored[serial]
        for order in metadata.orders:
            self._obey(order)
        for place in metadata.loads:
            self.load(place)
        self._poll()

    def _obey(self, order: StoreOrder) -> None:
        if order.key is None:
            self._unstored.clear()
            self.store.clear()
            self.codec.new_epoch()
            return
        name = self.codec.name_of(order.key)
        match order.action:
            case StoreAction.DELETE:
                for serial in [s for s, place in self._unstored.items() if place.key == order.key]:
                    del self._unstored[serial]
                self.store.delete(name)
            case StoreAction.PIN:
                self.store.pin(name)
            case StoreAction.UNPIN:
                self.store.unpin(name)
            case StoreAction.EXPIRE:
                self.store.expire(name, order.at)

    def load(self, place: RecordPlace) -> None:
        """Fetch a record; :meth:`take_ended` tells how that ends."""
        name, expected = self.codec.name_of(place.key), self.codec.expected(place)
        if not place.leading:
            self.pool.offer_tiles(place.slot)
        # The scheduler asks for a record again only when its last fetch was reported.
        if self.store.prefetch(name, expected.max_nbytes, self.codec.reader(place, expected)):
            self._loading[name] = place
        else:
            self._ended[place.serial] = LoadCount(missed=1)

    def _poll(self) -> None:
        for fetched in self.store.poll():
            place = self._loading.pop(fetched.name)
            if fetched.tier is None:
                self._ended[place.serial] = LoadCount(missed=1)
                continue
            self._ended[place.serial] = LoadCount(taken=1, tier=fetched.tier)
            if not place.leading:
                self._tiles[place.serial] = self.pool.settle_tiles(place.slot)

    def completed(self, place: RecordPlace) -> None:
        """A capture is complete, its tiles are settled: its record goes to the store."""
        self._unstored[place.serial] = place

    def is_handing_over(self, place: RecordPlace) -> bool:
        """Whether the record is still to be copied to the store."""
        return place.serial in self._unstored

    def end_step(self) -> None:
        """Copy complete records out of the pool, as far as the store takes them, oldest first."""
        self.behind = False
        for place in list(self._unstored.values())[:_STORES_PER_STEP]:
            name, header = self.codec.name_of(place.key), self.codec.header(place)
            worth = Worth(place.worth_tokens, place.worth_flops, record_nbytes(header))
            reservation = self.store.reserve(name, worth)
            if reservation is None:
                self.behind = True
                break  # writing lags behind: later, if the record is still here
            del self._unstored[place.serial]
            self.codec.write(place, header, reservation.buffer)
            self.store.commit(reservation, seal_record)
            self._handed.add(place.key)
        self._poll()

    def take_ended(self) -> dict[int, LoadCount]:
        """Loads that ended since the last call."""
        ended, self._ended = self._ended, {}
        return ended

    def take_tiles(self) -> dict[int, int]:
        """Tiles that loaded records keep."""
        tiles, self._tiles = self._tiles, {}
        return tiles

    def take_handed(self) -> set[SegmentKey]:
        """Records that the store got since the last call."""
        handed, self._handed = self._handed, set()
        return handed

    def take_stats(self) -> StoreStats | None:
        """What the store counted since the last report, or ``None``: not yet time for another."""
        now = time.monotonic()
        if now - self._reported_at < REPORT_EVERY_S:
            return None
        stats = self.store.stats()
        counted, self._reported, self._reported_at = since(stats, self._reported), stats, now
        return counted

    def close(self) -> None:
        self.store.close()
