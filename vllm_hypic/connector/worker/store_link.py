"""Worker's side of the segment store: complete records go there, missing ones come from there.

fetch order -> blocks offered -> prefetch (reader fills the pool on the store's thread) -> poll -> outcome
            -> no tier has it: those it names instead are looked for -> outcome
save order -> reserve -> copied out of the pool -> commit (checksum and tiers in the background) -> outcome

Where the pool is on a device, copies end in later steps (``pool/copy/staged.py``).
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from functools import partial

from ...pool.codec import RecordCodec
from ...pool.plans import RecordPlace
from ...primitives.keys import SegmentKey
from ...store.cache_value import CacheValue, ObjectName
from ...store.protocol import Fetched, Reservation, SegmentStore, StoreStats
from ...store.record import record_nbytes, seal_record
from ...store.totals import since
from ..orders import ClearCaches, FetchRecord, Order, Result, SaveRecord, StoreAction, StoreOrder
from .link import RecordLink

REPORT_EVERY_S = 1.0
"""Statistics travel to the scheduler no more often."""
_SAVES_PER_STEP = 4
"""Records that one step copies out of the pool at most; each takes as long as a copy of its bytes."""
_SEARCH_S = 10.0
"""Seconds after which what was looked for counts as not found, if the store does not say."""
_MOST_EXPIRIES = 4096
"""Expiries that are kept for records on their way to the store."""


@dataclass(frozen=True)
class _Search:
    """Others are looked for than a record that no tier has, until a time on the monotonic clock."""

    order: FetchRecord
    names: dict[ObjectName, SegmentKey]
    until: float
    reason: str
    """Why the record itself was not fetched."""


class StoreLink(RecordLink):
    """Moves records between one worker's pool and its store."""

    def __init__(self, store: SegmentStore, codec: RecordCodec) -> None:
        super().__init__()
        self.store, self.codec = store, codec
        self._fetching: dict[ObjectName, FetchRecord] = {}
        self._searching: dict[int, _Search] = {}
        """Records that no tier has, and others are looked for, by the store's ticket."""
        self._unsaved: OrderedDict[int, SaveRecord] = OrderedDict()
        """Records to be copied, by serial, oldest first."""
        self._copying: dict[int, tuple[SaveRecord, Reservation]] = {}
        """Records whose reservations are being filled, by serial."""
        self._expiries: OrderedDict[SegmentKey, float | None] = OrderedDict()
        """Expiries of records that the store has not got, as far as it can tell: they may be on their way."""
        self._reported: StoreStats | None = None
        self._reported_at = float("-inf")
        self.behind = False
        """The store had no room for a record in the last step."""

    def drop(self, slots: Collection[int]) -> None:
        self._forget(s for s, save in self._unsaved.items() if save.place.slot in slots)

    def submit(self, order: Order) -> bool:
        match order:
            case FetchRecord():
                self._fetch(order)
            case SaveRecord(place):
                self._unsaved[place.serial] = order
            case StoreOrder():
                self._obey(order)
            case ClearCaches():
                self._forget(self._unsaved)
                self._expiries.clear()
                self._abort(self._copying)
                self.store.clear()
            case _:
                return False
        return True

    def is_saving(self, place: RecordPlace) -> bool:
        """Whether the record is still to be copied to the store."""
        return place.serial in self._unsaved or place.serial in self._copying

    # -- out of the pool -----------------------------------------------------------------------

    def advance(self) -> None:
        """Copy complete records out of the pool, as far as the store takes them, oldest first."""
        self.behind = False
        for save in list(self._unsaved.values())[:_SAVES_PER_STEP]:
            place = save.place
            name, header = self.codec.name_of(place.key), self.codec.header(place)
            value = CacheValue(place.value_tokens, place.value_flops, record_nbytes(header))
            reservation = self.store.reserve(name, value)
            if reservation is None:
                self.behind = True
                break  # writing lags behind: later, if the record is still here
            del self._unsaved[place.serial]
            self._copying[place.serial] = save, reservation
            self.codec.mover.write(place, header, reservation.buffer, partial(self._copied, place.serial))

    def _copied(self, serial: int, whole: bool) -> None:
        if serial not in self._copying:
            return  # deleted meanwhile
        if not whole:
            self._abort([serial])
            return
        save, reservation = self._copying.pop(serial)
        self.store.commit(reservation, seal_record)
        self._finish(save, Result.DONE)
        at = self._expiries.pop(save.place.key, 0.0)
        if at is None or at > time.time():
            self.store.expire(reservation.name, at)

    def _forget(self, serials: Iterable[int]) -> None:
        for serial in list(serials):
            self._finish(self._unsaved.pop(serial), Result.FAILED, "the record is gone")

    def _abort(self, serials: Iterable[int]) -> None:
        """These records do not go to the store; what their copies still bring is not looked at."""
        for serial in list(serials):
            save, reservation = self._copying.pop(serial)
            self.store.abort(reservation)
            self._finish(save, Result.FAILED, "the record is gone")

    def _obey(self, order: StoreOrder) -> None:
        key, name = order.key, self.codec.name_of(order.key)
        match order.action:
            case StoreAction.DELETE:
                self._expiries.pop(key, None)
                self._forget(s for s, save in self._unsaved.items() if save.place.key == key)
                self._abort(s for s, (save, _) in self._copying.items() if save.place.key == key)
                self.store.delete(name)
            case StoreAction.PIN:
                self.store.pin(name)
            case StoreAction.UNPIN:
                self.store.unpin(name)
            case StoreAction.EXPIRE:
                self.store.expire(name, order.at)
                if not self.store.holds(name):
                    self._expiries[key] = order.at
                    if len(self._expiries) > _MOST_EXPIRIES:
                        self._expiries.popitem(last=False)

    # -- into the pool -------------------------------------------------------------------------

    def _fetch(self, order: FetchRecord) -> None:
        place = order.place
        name, expected = self.codec.name_of(place.key), self.codec.expected(place)
        if not place.leading:
            self.codec.pool.transition_blocks.offer(place.slot)
        # The scheduler asks for a record again only when its last fetch was reported.
        if self.store.prefetch(name, expected.max_nbytes, self.codec.reader(place, expected)):
            self._fetching[name] = order
        else:
            self._missed(order, "no tier has it")

    def _missed(self, order: FetchRecord, reason: str) -> None:
        if not order.instead:
            self._finish(order, Result.FAILED, reason)
            return
        names = {self.codec.name_of(key): key for key in order.instead}
        ticket = self.store.find(list(names))
        self._searching[ticket] = _Search(order, names, time.monotonic() + _SEARCH_S, reason)

    def _look_at_searches(self) -> None:
        for found in self.store.found():
            if (search := self._searching.pop(found.ticket, None)) is not None:
                instead = frozenset(search.names[name] for name in found.names)
                self._finish(search.order, Result.FAILED, search.reason, instead=instead)
        now = time.monotonic()
        for ticket in [t for t, search in self._searching.items() if search.until <= now]:
            search = self._searching.pop(ticket)
            self._finish(search.order, Result.FAILED, search.reason)

    def _poll(self) -> None:
        for fetched in self.store.poll():
            order = self._fetching.pop(fetched.name)
            if fetched.tier is None:
                self.codec.mover.discard(order.place)
                self._missed(order, "no tier had it in time")
            else:
                self.codec.mover.settle(order.place, partial(self._fetched, order, fetched))
        self._look_at_searches()

    def _fetched(self, order: FetchRecord, fetched: Fetched, transition_blocks: int) -> None:
        self._finish(order, Result.DONE, route=fetched.tier or "", transition_blocks=transition_blocks)

    # -- reports -------------------------------------------------------------------------------

    def take_stats(self) -> StoreStats | None:
        now = time.monotonic()
        if now - self._reported_at < REPORT_EVERY_S:
            return None
        stats = self.store.stats()
        counted, self._reported, self._reported_at = since(stats, self._reported), stats, now
        return counted

    def close(self) -> None:
        """What the store still has to write is written, for a bounded time."""
        self.store.close()
