"""Worker's side of the segment store: complete records go there, missing ones come from there.

load plan -> blocks offered -> prefetch (reader fills the pool on the store's thread) -> poll -> report
capture complete -> reserve -> copied out of the pool -> commit (checksum and tiers in the background)

Where the pool is on a device, copies end in later steps (``pool/copy/``).
"""

from __future__ import annotations

import time
from collections import OrderedDict
from functools import partial

from vllm.logger import init_logger

from ...pool.codec import RecordCodec
from ...pool.copy.base import RecordMover
from ...pool.plans import RecordPlace
from ...pool.tensors import DevicePool
from ...primitives.keys import SegmentKey
from ...store.cache_value import CacheValue, ObjectName
from ...store.protocol import Fetched, Reservation, SegmentStore, StoreStats
from ...store.record import record_nbytes, seal_record
from ...store.totals import since
from ..metadata import HypicMetadata, LoadCount, StoreAction, StoreOrder

logger = init_logger("vllm.hypic.store")

REPORT_EVERY_S = 1.0
"""Statistics travel to the scheduler no more often."""
_STORES_PER_STEP = 4
"""Records that one step copies out of the pool at most; each takes as long as a copy of its bytes."""
_MOST_EXPIRIES = 4096
"""That are kept for records on their way to the store."""


class StoreLink:
    """Moves records between one worker's pool and its store.  Called by the worker's thread only."""

    def __init__(self, store: SegmentStore, codec: RecordCodec, pool: DevicePool, mover: RecordMover) -> None:
        self.store, self.codec, self.pool, self.mover = store, codec, pool, mover
        self._loading: dict[ObjectName, RecordPlace] = {}
        self._unstored: OrderedDict[int, RecordPlace] = OrderedDict()
        self._copying: dict[int, tuple[SegmentKey, Reservation]] = {}
        """By serial: records whose reservations are being filled."""
        self._expiries: OrderedDict[SegmentKey, float | None] = OrderedDict()
        """Said of records that the store has not got, as far as it can tell: they may be on their way."""
        self._ended: dict[int, LoadCount] = {}
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
            self._expiries.clear()
            self._abort(list(self._copying))
            self.store.clear()
            self.codec.new_epoch()
            return
        name = self.codec.name_of(order.key)
        match order.action:
            case StoreAction.DELETE:
                self._expiries.pop(order.key, None)
                for serial in [s for s, place in self._unstored.items() if place.key == order.key]:
                    del self._unstored[serial]
                self._abort([s for s, (key, _) in self._copying.items() if key == order.key])
                self.store.delete(name)
            case StoreAction.PIN:
                self.store.pin(name)
            case StoreAction.UNPIN:
                self.store.unpin(name)
            case StoreAction.EXPIRE:
                self.store.expire(name, order.at)
                if not self.store.holds(name):
                    self._expiries[order.key] = order.at
                    if len(self._expiries) > _MOST_EXPIRIES:
                        self._expiries.popitem(last=False)

    def _abort(self, serials: list[int]) -> None:
        """These records do not go to the store; what their copies still bring is not looked at."""
        for serial in serials:
            _, reservation = self._copying.pop(serial)
            self.store.abort(reservation)

    def load(self, place: RecordPlace) -> None:
        """Fetch a record; :meth:`take_ended` tells how that ends."""
        name, expected = self.codec.name_of(place.key), self.codec.expected(place)
        if not place.leading:
            self.pool.transition_blocks.offer(place.slot)
        # The scheduler asks for a record again only when its last fetch was reported.
        if self.store.prefetch(name, expected.max_nbytes, self.codec.reader(place, expected)):
            self._loading[name] = place
        else:
            self._ended[place.serial] = LoadCount(missed=1)

    def _poll(self) -> None:
        for fetched in self.store.poll():
            place = self._loading.pop(fetched.name)
            if fetched.tier is None:
                self.mover.discard(place)
                self._ended[place.serial] = LoadCount(missed=1)
            else:
                self.mover.settle(place, partial(self._loaded, place, fetched))

    def _loaded(self, place: RecordPlace, fetched: Fetched, transition_blocks: int) -> None:
        self._ended[place.serial] = LoadCount(
            taken=1, tier=fetched.tier or "", transition_blocks=transition_blocks
        )

    def completed(self, place: RecordPlace) -> None:
        """A capture is complete, its transition blocks are settled: its record goes to the store."""
        self._unstored[place.serial] = place

    def is_handing_over(self, place: RecordPlace) -> bool:
        """Whether the record is still to be copied to the store."""
        return place.serial in self._unstored or place.serial in self._copying

    def end_step(self) -> None:
        """Copy complete records out of the pool, as far as the store takes them, oldest first."""
        self.behind = False
        for place in list(self._unstored.values())[:_STORES_PER_STEP]:
            name, header = self.codec.name_of(place.key), self.codec.header(place)
            value = CacheValue(place.value_tokens, place.value_flops, record_nbytes(header))
            reservation = self.store.reserve(name, value)
            if reservation is None:
                self.behind = True
                break  # writing lags behind: later, if the record is still here
            del self._unstored[place.serial]
            self._copying[place.serial] = place.key, reservation
            self.mover.write(place, header, reservation.buffer, partial(self._copied, place))
        self._poll()

    def _copied(self, place: RecordPlace, whole: bool) -> None:
        if place.serial not in self._copying:
            return  # deleted meanwhile
        if not whole:
            self._abort([place.serial])
            return
        _, reservation = self._copying.pop(place.serial)
        self.store.commit(reservation, seal_record)
        self._handed.add(place.key)
        at = self._expiries.pop(place.key, 0.0)
        if at is None or at > time.time():
            self.store.expire(reservation.name, at)

    def take_ended(self) -> dict[int, LoadCount]:
        """Loads that ended since the last call."""
        ended, self._ended = self._ended, {}
        return ended

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
