"""The store: tiers, fastest first, behind one facade that never waits for them.

A fetch asks the tiers in turn (``fetch.py``); a record on its way to them is served from the queue
(``write_behind.py``); each tier has threads, deadlines and a bypass of its own (``lane.py``).  One thread
watches deadlines, so that they hold whatever the caller does.  One lock guards all state: it is held for
bookkeeping only, never during an operation of a tier.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence

from .crew import Clock
from .fetch import Fetch, Source
from .lane import Lane
from .protocol import Fetched, Located, Presence, Reader, Reservation, StoreStats
from .settings import StoreSettings
from .tiers.base import Tier
from .worth import ObjectName, Worth
from .write_behind import WriteBehind

logger = logging.getLogger("vllm.hypic.store")

_DRAIN_STEP_S = 0.01
_EXPIRIES_KEPT = 100_000

Appraise = Callable[[memoryview], Worth | None]
"""An object's worth, from its bytes; ``None`` if they do not say."""


class TieredStore:
    """:class:`~.protocol.SegmentStore` over tiers.  Call :meth:`open` first; all methods from one thread."""

    def __init__(
        self,
        tiers: Sequence[Tier],
        settings: StoreSettings | None = None,
        *,
        appraise: Appraise | None = None,
        clock: Clock = time.monotonic,
        wall: Clock = time.time,
    ) -> None:
        """``appraise`` tells eviction in the faster tiers what an object that moves up is worth."""
        names = [tier.name for tier in tiers]
        if len(set(names)) < len(names) or "queue" in names:
            raise ValueError(f"names of tiers {names}: expected different ones, and none called 'queue'")
        self._settings = settings or StoreSettings()
        self._appraise = appraise
        self._clock = clock
        self._wall = wall
        self._lock = threading.RLock()
        self._work = threading.Condition(self._lock)
        self._lanes = [Lane(tier, self._settings, self._lock, clock=clock, wall=wall) for tier in tiers]
        self._writes = WriteBehind(self._lanes, self._settings, self._lock, clock=clock)
        self._fetches: dict[ObjectName, Fetch] = {}
        self._expiries: dict[ObjectName, float | None] = {}
        self._located: list[Located] = []
        self._tickets = 0
        self._threaded = False
        self._closed = False

    # -- life

    def open(self) -> None:
        """Start the threads and wait for the tiers to open, for a bounded time; others join when they can."""
        self._threaded = True
        self._writes.start()
        for lane in self._lanes:
            lane.start()
        threading.Thread(target=self._watch, name="hypic-store (deadlines)", daemon=True).start()
        end = time.monotonic() + self._settings.open_s
        while time.monotonic() < end and not all(lane.settled for lane in self._lanes):
            time.sleep(_DRAIN_STEP_S)
        for lane in self._lanes:
            if not lane.settled:
                logger.warning(
                    "tier %s: bypassed, not open after %.3g s, still opening",
                    lane.name,
                    self._settings.open_s,
                )

    def drain(self, timeout_s: float) -> bool:
        end = time.monotonic() + timeout_s
        while True:
            self.tick()
            if self._writes.idle() and all(lane.idle() for lane in self._lanes):
                return True
            if time.monotonic() >= end:
                return False
            time.sleep(min(_DRAIN_STEP_S, max(0.0, end - time.monotonic())))

    def close(self) -> None:
        """Write what is queued, for ``close_s`` at most; then close the tiers, for as long at most."""
        if self._closed:
            return
        if not self.drain(self._settings.close_s if self._threaded else 0):
            logger.warning("closing: %d bytes were not written in time", self._writes.queued)
        with self._lock:
            self._closed = True
            self._writes.stop()
            for lane in self._lanes:
                lane.stop()
            self._work.notify_all()
        end = time.monotonic() + self._settings.close_s
        while time.monotonic() < end and not all([f.stop() for f in self._fetches.values()]):
            time.sleep(_DRAIN_STEP_S)
        closers = [
            threading.Thread(target=lane.close, name=f"hypic-{lane.name} (close)", daemon=True)
            for lane in self._lanes
        ]
        for closer in closers:
            closer.start()
        for lane, closer in zip(self._lanes, closers, strict=True):
            closer.join(max(0.0, end - time.monotonic()))
            if closer.is_alive():
                logger.warning("tier %s: not closed after %.3g s: left", lane.name, self._settings.close_s)

    # -- writing

    def reserve(self, name: ObjectName, worth: Worth) -> Reservation | None:
        return self._writes.reserve(name, worth)

    def commit(self, reservation: Reservation, finish: Callable[[memoryview], None] | None = None) -> None:
        expires = self._latest()
        if self._writes.commit(reservation, finish, expires):
            self._remember_expiry(reservation.name, expires)
        self._busy()

    def abort(self, reservation: Reservation) -> None:
        self._writes.abort(reservation)

    # -- reading

    def prefetch(self, name: ObjectName, limit: int, reader: Reader) -> bool:
        """As the protocol says.  ``ValueError`` while an earlier fetch of ``name`` was not reported."""
        if name in self._fetches:
            raise ValueError(f"{name}: a fetch of it was not reported yet")
        if self._closed:
            return False
        writing = self._writes.find(name)
        sources: list[Source] = [writing] if writing else []
        for lane in self._lanes:
            if not lane.readable:
                lane.probe(name, limit, self._settings.deadline_s)
            elif lane.may_hold(name):
                sources.append(_LaneSource(lane))
            elif not sources:
                lane.count_miss()
        if not sources:
            return False
        fetch = Fetch(
            name,
            limit,
            reader,
            sources,
            deadline_s=self._settings.deadline_s,
            taken=self._promote,
            lock=self._lock,
            clock=self._clock,
        )
        self._fetches[name] = fetch
        fetch.start()
        self._busy()
        return True

    def poll(self) -> list[Fetched]:
        self.tick()
        with self._lock:
            ended = [f.ended for f in self._fetches.values() if f.ended is not None]
            for fetched in ended:
                del self._fetches[fetched.name]
            return ended

    def holds(self, name: ObjectName) -> bool:
        return self._writes.find(name) is not None or any(lane.holds(name) for lane in self._lanes)

    def locate(self, name: ObjectName, tier: str) -> int:
        lane = next((lane for lane in self._lanes if lane.name == tier), None)
        if lane is None:
            raise KeyError(f"no tier is named {tier!r}: there are {[lane.name for lane in self._lanes]}")
        self._tickets += 1
        ticket = self._tickets

        def found(presence: Presence, reason: str) -> None:
            with self._lock:
                self._located.append(Located(ticket, presence, reason))

        def written(fault: str) -> None:
            found(Presence.FAILED if fault else Presence.THERE, fault)

        if self._closed:
            found(Presence.FAILED, "the store is closed")
        elif not self._writes.follow(name, tier, written):
            lane.look(name, found)
        self._busy()
        return ticket

    def located(self) -> list[Located]:
        self.tick()
        with self._lock:
            located, self._located = self._located, []
            return located

    def _promote(self, fetch: Fetch, source: Source, data: memoryview) -> None:
        """Into the tiers above the one that had it, unless it was deleted meanwhile."""
        if not fetch.current or not isinstance(source, _LaneSource):
            return
        above = [lane for lane in self._lanes[: self._lanes.index(source.lane)] if lane.opened]
        worth = self._appraise(data) if self._appraise else None
        if worth is None:
            worth = Worth(data.nbytes, float(data.nbytes), data.nbytes)
        self._writes.promote(fetch.name, data, worth, self._expiries.get(fetch.name, self._latest()), above)

    # -- managing

    def delete(self, name: ObjectName) -> None:
        with self._lock:
            if self._closed:
                return
            self._expiries.pop(name, None)
            self._writes.withdraw(name)
            if fetch := self._fetches.get(name):
                fetch.current = False
            for lane in self._lanes:
                lane.delete(name)
        self._busy()

    def pin(self, name: ObjectName) -> None:
        for lane in self._lanes if not self._closed else ():
            lane.pin(name)
        self._busy()

    def unpin(self, name: ObjectName) -> None:
        for lane in self._lanes if not self._closed else ():
            lane.unpin(name)
        self._busy()

    def expire(self, name: ObjectName, at: float | None) -> None:
        with self._lock:
            if self._closed:
                return
            self._remember_expiry(name, at)
            self._writes.set_expiry(name, at)
            for lane in self._lanes:
                lane.set_expiry(name, at)
        self._busy()

    def clear(self) -> None:
        with self._lock:
            if self._closed:
                return
            self._expiries.clear()
            self._writes.withdraw_all()
            for fetch in self._fetches.values():
                fetch.current = False
            for lane in self._lanes:
                lane.clear()
        self._busy()

    def stats(self) -> StoreStats:
        with self._lock:
            return StoreStats(
                tiers={lane.name: lane.report() for lane in self._lanes},
                queued_bytes=self._writes.queued,
                dropped_writes=self._writes.dropped,
                inflight=sum(f.ended is None for f in self._fetches.values()),
            )

    def _remember_expiry(self, name: ObjectName, at: float | None) -> None:
        """For copies that move up later: a tier does not say when its object expires."""
        if at is None and self._settings.ttl_s is None:
            self._expiries.pop(name, None)
            return
        self._expiries[name] = at
        if len(self._expiries) > _EXPIRIES_KEPT:
            del self._expiries[next(iter(self._expiries))]

    def _latest(self) -> float | None:
        """When an object written now expires, if nobody says otherwise."""
        return None if self._settings.ttl_s is None else self._wall() + self._settings.ttl_s

    # -- deadlines

    def tick(self) -> None:
        """Give up what is too late.  Never blocks; any thread may call it."""
        now = self._clock()
        with self._lock:
            for lane in self._lanes:
                lane.expire(now)
            for fetch in self._fetches.values():
                fetch.expire(now)

    def _busy(self) -> None:
        with self._lock:
            self._work.notify_all()

    def _watch(self) -> None:
        beat = min(1.0, max(0.005, min(self._settings.deadline_s, self._settings.write_deadline_s) / 20))
        with self._lock:
            while not self._closed:
                self.tick()
                self._work.wait(None if self._at_rest() else beat)

    def _at_rest(self) -> bool:
        return (
            self._writes.idle()
            and all(f.ended is not None for f in self._fetches.values())
            and all(lane.at_rest() for lane in self._lanes)
        )


class _LaneSource:
    """A tier that may hold the object."""

    def __init__(self, lane: Lane) -> None:
        self.name = lane.name
        self.lane = lane

    def ask(
        self,
        name: ObjectName,
        limit: int,
        patience_s: float,
        fetched: Callable[[memoryview | None], None],
        lost: Callable[[], None],
    ) -> Callable[[], None] | None:
        return self.lane.get(name, limit, patience_s, fetched, lost)

    def hit(self) -> None:
        self.lane.stats.hits += 1

    def missed(self) -> None:
        self.lane.count_miss()

    def damaged(self, name: ObjectName) -> None:
        self.lane.stats.corrupt += 1
        self.lane.delete(name)
