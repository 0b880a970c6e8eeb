"""Worker's side of the segment store: it saves complete records and fetches missing records.

fetch order -> blocks offered -> prefetch (reader fills the pool on the store's thread) -> poll -> outcome
            -> no tier has it: the store looks for the records ``fallback_keys`` -> outcome
save order -> reserve -> copied out of the pool -> commit (checksum and tiers in the background) -> outcome

Where the pool is on a device, copies end in later steps (``pool/copy/staged.py``).
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace
from functools import partial

from ...pool.codec import RecordCodec
from ...pool.copy.base import LEFT_THE_POOL
from ...pool.incoming import IncomingRecord
from ...pool.plans import RecordPlace
from ...primitives.keys import SegmentKey
from ...store.protocol import CacheValue, LookupResult, ObjectName, Reservation, StoreStats
from ...store.record import record_nbytes, seal_record
from ...store.tiered import TieredStore
from ...store.totals import since
from ..orders import ClearCaches, FetchRecord, Order, Result, SaveRecord, StoreAction, StoreOrder
from .link import RecordLink

REPORT_EVERY_S = 1.0
"""The least seconds between two reports of statistics to the scheduler."""
_SAVES_PER_STEP = 4
"""The most records that one step copies out of the pool; each takes as long as a copy of its bytes."""
_MOST_EXPIRIES = 4096
"""The most expiries kept for records on their way to the store."""


@dataclass
class _Fetch:
    """A record on its way; ``route``: the tier of its first object."""

    order: FetchRecord
    incoming: IncomingRecord
    route: str = ""
    seconds: float = 0.0
    """The seconds that the record's objects have taken; all share one deadline."""


@dataclass(frozen=True)
class _Search:
    """A search for the records ``fallback_keys`` of one that no tier has."""

    order: FetchRecord
    names: dict[ObjectName, SegmentKey]
    look: LookupResult
    reason: str
    """The reason why the record itself was not fetched."""


class StoreLink(RecordLink):
    """Moves records between one worker's pool and its store."""

    def __init__(self, store: TieredStore, codec: RecordCodec) -> None:
        super().__init__()
        self.store, self.codec = store, codec
        self._fetching: dict[ObjectName, _Fetch] = {}
        """Running fetches, by the name of the object that each reads now; no two read the same object."""
        self._queued: list[_Fetch] = []
        """Fetches that wait, as another fetch reads their next object."""
        self._searching: list[_Search] = []
        self._unsaved: OrderedDict[int, SaveRecord] = OrderedDict()
        """Records to be copied, by serial number, oldest first."""
        self._copying: dict[int, tuple[SaveRecord, Reservation]] = {}
        """Records whose copies fill reservations, by serial number."""
        self._expiries: OrderedDict[SegmentKey, float | None] = OrderedDict()
        """Expiries, in Unix time, of records that the store does not know, but that may be on their way."""
        self._failed = 0
        """Number of records that could not be copied."""
        self._reported: StoreStats | None = None
        self._reported_at = float("-inf")
        self.behind = False
        """Whether the store had no room for a record in the last step."""

    def drop(self, slots: Collection[int]) -> None:
        self._forget(s for s, save in self._unsaved.items() if save.place.slot in slots)

    def submit(self, order: Order) -> bool:
        match order:
            case FetchRecord():
                self._fetch(order)
            case SaveRecord(place):
                if place.serial not in self._copying:  # else this record is on its way
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

    @property
    def unfinished(self) -> int:
        return 0 if self.behind else len(self._unsaved)

    def is_saving(self, place: RecordPlace) -> bool:
        """Whether the record waits for its copy to the store, or is being copied."""
        return place.serial in self._unsaved or place.serial in self._copying

    # -- out of the pool -----------------------------------------------------------------------

    def advance(self) -> None:
        """Copy complete records out of the pool, oldest first, while the store has room."""
        self.behind = False
        for save in list(self._unsaved.values())[:_SAVES_PER_STEP]:
            place = self._storable(save.place)
            if place is None:
                self._forget([save.place.serial])
                continue
            name, header = self.codec.name_of(place.key), self.codec.header(place)
            value = CacheValue(header.value_tokens, header.value_flops, record_nbytes(header))
            reservation = self.store.reserve(name, value)
            if reservation is None:
                self.behind = True
                break  # writes lag behind: a later step retries while the pool has the record
            del self._unsaved[place.serial]
            self._copying[place.serial] = save, reservation
            then = partial(self._copied, place.serial, reservation)
            self.codec.mover.write(place, header, reservation.buffer, then)

    def _storable(self, place: RecordPlace) -> RecordPlace | None:
        """Return the place for storing: with its base if all tiers have the base, else for the whole record.
        ``None``: do not store a checkpoint whose record is not in all tiers."""
        if place.base is None:
            return place
        there = [self.store.in_all_tiers(self.codec.name_of(key)) for key in place.base.keys]
        if place.base.columns == len(place.slot_mapping):
            return None if False in there else place
        return place if all(there) else replace(place, base=None)

    def _copied(self, serial: int, reservation: Reservation, fault: str) -> None:
        save, wanted = self._copying.get(serial, (None, None))
        if save is None or wanted is not reservation:
            return  # deleted meanwhile, perhaps to be stored again
        if fault:
            self._failed += fault != LEFT_THE_POOL
            self._abort([serial], fault)
            return
        del self._copying[serial]
        keys = () if save.place.base is None else save.place.base.keys
        self.store.commit(reservation, seal_record, tuple(self.codec.name_of(key) for key in keys))
        self._finish(save, Result.DONE)
        at = self._expiries.pop(save.place.key, 0.0)
        if at is None or at > time.time():
            self.store.expire(reservation.name, at)

    def _forget(self, serials: Iterable[int]) -> None:
        for serial in list(serials):
            self._finish(self._unsaved.pop(serial), Result.FAILED, "the record is gone")

    def _abort(self, serials: Iterable[int], reason: str = "the record is gone") -> None:
        """End the saves of these records in failure; later results of their copies are ignored."""
        for serial in list(serials):
            save, reservation = self._copying.pop(serial)
            self.store.abort(reservation)
            self._finish(save, Result.FAILED, reason)

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
        if not place.leading:
            self.codec.pool.transition_blocks.offer(place.slot)
        self._read_next(_Fetch(order, self.codec.incoming(place)))

    def _read_next(self, fetch: _Fetch) -> None:
        incoming = fetch.incoming
        name = self.codec.name_of(incoming.next or fetch.order.place.key)
        if name in self._fetching:
            self._queued.append(fetch)
            return
        started: bool | None = False
        if incoming.goes_on:
            started = self.store.prefetch(name, incoming.most_nbytes, incoming.read, fetch.seconds)
        if started:
            self._fetching[name] = fetch
        else:
            self._missed(fetch, "no tier has the record", absent=started is False)

    def _missed(self, fetch: _Fetch, reason: str, *, absent: bool) -> None:
        order = fetch.order
        self.codec.mover.discard(order.place)
        # A base record is missing: the records that rest on it are stored anew only after their deletion.
        # While a tier is down or slow, the base may be there, and no record is deleted.
        for key in fetch.incoming.read_keys if absent else ():
            self.store.delete(self.codec.name_of(key))
        if not order.fallback_keys:
            self._finish(order, Result.FAILED, reason)
            return
        names = {self.codec.name_of(key): key for key in order.fallback_keys}
        self._searching.append(_Search(order, names, self.store.look_for(list(names)), reason))

    def _look_at_searches(self) -> None:
        searches, self._searching = self._searching, []
        for search in searches:
            if (there := search.look.found) is None:
                self._searching.append(search)
            else:
                fallback_keys = frozenset(search.names[name] for name in there)
                self._finish(search.order, Result.FAILED, search.reason, fallback_keys=fallback_keys)

    def _poll(self) -> None:
        for fetched in self.store.poll():
            fetch = self._fetching.pop(fetched.name)
            fetch.route = fetch.route or fetched.tier or ""
            fetch.seconds += fetched.seconds
            if fetched.tier is None:
                self._missed(fetch, "no tier had the record in time", absent=fetched.absent)
            elif fetch.incoming.next is not None:
                self._read_next(fetch)
            else:
                self.codec.mover.settle(fetch.order.place, partial(self._fetched, fetch))
        queued, self._queued = self._queued, []
        for fetch in queued:
            self._read_next(fetch)
        self._look_at_searches()

    def _fetched(self, fetch: _Fetch, transition_blocks: int) -> None:
        self._finish(fetch.order, Result.DONE, route=fetch.route, transition_blocks=transition_blocks)

    # -- reports -------------------------------------------------------------------------------

    def take_stats(self) -> StoreStats | None:
        now = time.monotonic()
        if now - self._reported_at < REPORT_EVERY_S:
            return None
        stats = self.store.stats()
        stats.failed_writes += self._failed
        counted, self._reported, self._reported_at = since(stats, self._reported), stats, now
        return counted

    def close(self) -> None:
        """Close the store, which writes its queue for a bounded time."""
        self.store.close()
