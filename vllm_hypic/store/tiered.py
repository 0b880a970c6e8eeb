"""The store: tiers, the fastest first, behind one facade that never waits for a tier.

A fetch asks the tiers in turn; the queue serves a record on its way to the tiers (``write_behind.py``).  Each
tier has its own threads, deadlines and circuit breakers (``async_tier.py``).  One thread watches deadlines,
so that they hold whatever the caller does.  One lock guards all state; the store holds it for bookkeeping
only, never during an operation of a tier.  Fetches and writes are coroutines (``tasks.py``).
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from .async_tier import AsyncTier, Item
from .executor import Clock
from .protocol import CacheValue, Fetched, LookupResult, ObjectName, Reader, Reservation, StoreStats, Verdict
from .settings import StoreSettings
from .tasks import Task, Unavailable
from .tiers.base import Tier
from .write_behind import WriteBehind, Writing

logger = logging.getLogger("vllm.hypic.store")

_STEP_S = 0.01
_EXPIRIES_KEPT = 100_000

Appraise = Callable[[memoryview], CacheValue | None]
"""Returns an object's cache value from its bytes, or ``None`` if the bytes do not contain the value."""


Source = AsyncTier | Writing
"""A place that a fetch asks for an object: a tier or the queue."""


@dataclass
class _Fetch:
    """A fetch without a report yet.  The reader never runs after ``ended`` is set, nor twice at a time."""

    name: ObjectName
    limit: int
    reader: Reader
    started: float
    deadline: float
    all_asked: bool
    """Whether no tier was bypassed at the start."""
    give_up_at: float | None = None
    """The time at which the fetch leaves the current source; ``None`` while the reader runs."""
    current: bool = True
    """False after the object's deletion: the reader may take the object, but no tier may keep it."""
    ended: Fetched | None = None
    task: Task[None] = field(init=False)

    def expire(self, now: float) -> None:
        """Leave the current source if its time is over at ``now``."""
        if self.give_up_at is not None and now >= self.give_up_at:
            self.task.interrupt(Unavailable("the deadline has passed"))

    def read(self, data: memoryview) -> Verdict | None:
        """Run the reader on the thread that brought the object; return ``None`` if the reader fails."""
        try:
            return self.reader(data) if data.nbytes <= self.limit else Verdict.DAMAGED
        except Exception:
            logger.exception("record %s could not be read", self.name)
            return None


class TieredStore:
    """Records outside the pool.  One thread, the worker's, makes all calls, :meth:`open` first.  Only
    :meth:`open`, :meth:`drain` and :meth:`close` wait for a tier, and no call raises for a tier's fault."""

    def __init__(
        self,
        tiers: Sequence[Tier],
        settings: StoreSettings | None = None,
        *,
        appraise: Appraise | None = None,
        clock: Clock = time.monotonic,
        wall: Clock = time.time,
    ) -> None:
        """``appraise`` gives faster tiers, for eviction, the cache value of an object that moves up."""
        names = [tier.name for tier in tiers]
        if len(set(names)) < len(names) or "queue" in names:
            raise ValueError(f"names of tiers {names}: expected distinct names other than 'queue'")
        self._settings = settings or StoreSettings()
        self._appraise, self._clock, self._wall = appraise, clock, wall
        self._lock = threading.RLock()
        self._begun = threading.Condition(self._lock)
        """Notified when an operation begins that may need watching."""
        self._tiers = [
            AsyncTier(tier, self._settings, self._lock, clock, wall, self._remember_expiry) for tier in tiers
        ]
        self._writes = WriteBehind(self._tiers, self._settings, self._lock, clock)
        self._fetches: dict[ObjectName, _Fetch] = {}
        self._expiries: dict[ObjectName, float | None] = {}
        self._threaded = self._closed = False

    # -- life

    def open(self) -> None:
        """Start the threads; wait at most ``open_s`` for the tiers to open.  Slower tiers join when open."""
        self._threaded = True
        with self._lock:
            self._writes.start()
        for tier in self._tiers:
            tier.start()
        threading.Thread(target=self._watch, name="hypic-store (deadlines)", daemon=True).start()
        open_s = self._settings.open_s
        _wait_until(lambda: all(tier.settled for tier in self._tiers), open_s)
        for tier in self._tiers:
            if not tier.settled:
                logger.warning("tier %s: not open after %.3g s; bypassed until open", tier.name, open_s)

    def drain(self, timeout_s: float) -> bool:
        """Wait until the tiers that are up have all committed objects; return False after ``timeout_s``."""
        return _wait_until(self._drained, timeout_s)

    def _drained(self) -> bool:
        self.tick()
        with self._lock:
            return self._writes.idle() and all(tier.idle() for tier in self._tiers)

    def close(self) -> None:
        """Write queued objects for at most ``close_s`` seconds; then close the tiers, for at most as long."""
        if self._closed:
            return
        close_s = self._settings.close_s
        if not self.drain(close_s if self._threaded else 0):
            with self._lock:
                records, nbytes = self._writes.unwritten()
            logger.warning(
                "the engine ends: %d records (%d bytes) were not written to all tiers within close_s=%g s; "
                "the next request that needs them computes them again",
                *(records, nbytes, close_s),
            )
        with self._lock:
            self._closed = True
            self._writes.stop()
            for tier in self._tiers:
                tier.stop()
            self._begun.notify_all()
        end = time.monotonic() + close_s
        _wait_until(self._fetches_stopped, close_s)
        closers = [
            threading.Thread(target=tier.close, name=f"hypic-{tier.name} (close)", daemon=True)
            for tier in self._tiers
        ]
        for closer in closers:
            closer.start()
        for tier, closer in zip(self._tiers, closers, strict=True):
            closer.join(max(0.0, end - time.monotonic()))
            if closer.is_alive():
                logger.warning("tier %s: not closed after %.3g s; the engine ends anyway", tier.name, close_s)

    def _fetches_stopped(self) -> bool:
        """End all fetches whose reader does not run; return whether all fetches have ended."""
        with self._lock:
            for fetch in self._fetches.values():
                fetch.deadline = -math.inf
                fetch.expire(math.inf)
            return all(fetch.ended for fetch in self._fetches.values())

    # -- writing

    def reserve(self, name: ObjectName, value: CacheValue) -> Reservation | None:
        """Return room for an object of ``value.nbytes``, or ``None`` when writes lag behind (try later)."""
        return self._writes.reserve(name, value)

    def commit(
        self,
        reservation: Reservation,
        finish: Callable[[memoryview], None] | None = None,
        rests_on: tuple[ObjectName, ...] = (),
    ) -> None:
        """Take over the filled buffer; ``finish`` (checksum) and the tiers' writes follow in the background.
        The write counts as a use of the objects in ``rests_on``, so that tiers keep them longer."""
        expires = self._latest()
        with self._lock:
            if self._writes.commit(reservation, finish, expires, rests_on):
                self._remember_expiry(reservation.name, expires)
            self._begun.notify_all()

    def abort(self, reservation: Reservation) -> None:
        """Give the room back without a write."""
        with self._lock:
            self._writes.abort(reservation)

    # -- reading

    def prefetch(self, name: ObjectName, limit: int, reader: Reader, spent_s: float = 0.0) -> bool | None:
        """Start a fetch and return True.  Without a fetch or a report return False when no tier has the
        object, ``None`` when only bypassed tiers may have the object.

        A fetch also finds objects in the queue.  ``spent_s``: the part of the deadline that fetches of
        preceding objects took.  Raises ``ValueError`` before the report of an earlier fetch of ``name``.
        """
        with self._lock:
            if name in self._fetches:
                raise ValueError(f"{name}: an earlier fetch of this name is not reported yet")
            all_asked = not self._closed and all(tier.readable for tier in self._tiers)
            if self._closed or not (sources := self._sources(name, limit)):
                return False if all_asked else None
            now = self._clock()
            deadline = now + self._settings.deadline_s - spent_s
            fetch = self._fetches[name] = _Fetch(name, limit, reader, now, deadline, all_asked)
            fetch.task = Task(self._fetch(fetch, sources))
            self._begun.notify_all()
            return True

    def _sources(self, name: ObjectName, limit: int) -> list[Source]:
        writing = self._writes.find(name)
        sources: list[Source] = [writing] if writing else []
        for tier in self._tiers:
            if not tier.readable:
                tier.probe(name, limit, self._settings.deadline_s)
            elif tier.may_hold(name):
                sources.append(tier)
            elif not sources:
                tier.stats.misses += 1
        return sources

    async def _fetch(self, fetch: _Fetch, sources: Sequence[Source]) -> None:
        """Ask the sources in turn; each source gets its even share of the time that is left."""
        found: tuple[Source, memoryview] | None = None
        lacking = 0
        for i, source in enumerate(sources):
            now = self._clock()
            if now >= fetch.deadline:
                break
            share = (fetch.deadline - now) / (len(sources) - i)
            fetch.give_up_at = now + share
            try:
                io = await source.get(fetch.name, fetch.limit, share)
            except Unavailable:
                continue
            finally:
                fetch.give_up_at = None
            data = await io
            if data is None:
                source.stats.misses += 1
                lacking += 1
                continue
            verdict = await io.follow(partial(fetch.read, data))
            if verdict is None:
                source.stats.errors += 1
                break
            if verdict is Verdict.TAKEN:
                source.stats.hits += 1
                found = source, data
                break
            logger.warning("record %s in tier %s is %s: deleting it", fetch.name, source.name, verdict.value)
            source.stats.corrupt += 1
            source.delete(fetch.name)
            lacking += 1
        absent = fetch.all_asked and lacking == len(sources)
        seconds = self._clock() - fetch.started
        fetch.ended = Fetched(fetch.name, found[0].name if found else None, seconds, absent)
        if found and fetch.current:
            self._promote(fetch.name, *found)

    def _promote(self, name: ObjectName, source: Source, data: memoryview) -> None:
        """Copy the object into the open tiers above its source."""
        if isinstance(source, Writing):
            return
        above = [tier for tier in self._tiers[: self._tiers.index(source)] if tier.opened]
        if above:
            value = self._appraise(data) if self._appraise else None
            value = value or CacheValue(data.nbytes, float(data.nbytes), data.nbytes)
            self._writes.promote(Item(name, data, value, self._expiries.get(name, self._latest())), above)

    def poll(self) -> list[Fetched]:
        """Return the fetches that ended since the last call, each fetch once and within its deadline."""
        self.tick()
        with self._lock:
            ended = [f.ended for f in self._fetches.values() if f.ended is not None]
            for fetched in ended:
                del self._fetches[fetched.name]
            return ended

    def holds(self, name: ObjectName) -> bool:
        """Return whether a tier certainly has the object, or its write is under way.  Changes nothing."""
        with self._lock:
            return self._writes.find(name) is not None or any(tier.holds(name) for tier in self._tiers)

    def in_all_tiers(self, name: ObjectName) -> bool | None:
        """Return whether every tier has the object, or will get it.  ``None``: some tier cannot tell, and
        no tier is known to lack the object.  Changes nothing."""
        with self._lock:
            if self._writes.find(name) is not None:
                return True
            if any(tier.opened and not tier.may_hold(name) for tier in self._tiers):
                return False
            return True if all(tier.holds(name) for tier in self._tiers) else None

    def look_for(self, names: Sequence[ObjectName], tier: str | None = None) -> LookupResult:
        """Start a search for ``names``, which ends within the deadline.  A tier that cannot tell at once
        finds at least the first name that it has.  ``tier``: ask only this tier, after its present writes
        of ``names`` (``KeyError``: no such tier).  ``None``: ask all tiers; objects in the queue count as
        found."""
        asked = [t for t in self._tiers if tier in (None, t.name)]
        if not asked:
            raise KeyError(f"no tier is named {tier!r}: there are {[t.name for t in self._tiers]}")
        look = LookupResult()
        with self._lock:
            Task(self._look_for(look, tuple(names), asked, None if tier is None else asked[0]))
            self._begun.notify_all()
        return look

    async def _look_for(
        self,
        look: LookupResult,
        names: tuple[ObjectName, ...],
        tiers: Sequence[AsyncTier],
        only: AsyncTier | None,
    ) -> None:
        there: set[ObjectName] = set()
        look.error = "the store is closed" if self._closed else ""
        for name in names:
            if (writing := self._writes.find(name)) is None:
                continue
            if only is not None and writing.ended[only.name].done:
                continue  # the write has ended: the tier itself answers
            fault = "" if only is None else await writing.ended[only.name]
            look.error = look.error or fault
            there.update(() if fault else (name,))
        until = self._clock() + self._settings.deadline_s
        for tier in () if look.error else tiers:
            found, fault = await tier.look_for([name for name in names if name not in there], until)
            there.update(found)
            look.error = look.error or fault
        look.found = frozenset(there)

    # -- managing

    def delete(self, name: ObjectName) -> None:
        with self._lock:
            self._expiries.pop(name, None)
            self._writes.withdraw(name)
            if fetch := self._fetches.get(name):
                fetch.current = False
            self._tell_tiers(AsyncTier.delete, name)

    def pin(self, name: ObjectName) -> None:
        self._tell_tiers(AsyncTier.pin, name)

    def unpin(self, name: ObjectName) -> None:
        with self._lock:
            self._tell_tiers(AsyncTier.unpin, name)
            if self._settings.ttl_s is not None:  # a tier does not know the expiry of before a restart
                self._tell_tiers(AsyncTier.set_expiry, name, self._expiries.get(name, self._latest()))

    def expire(self, name: ObjectName, at: float | None) -> None:
        with self._lock:
            self._remember_expiry(name, at)
            if writing := self._writes.find(name):
                writing.expires = at
            self._tell_tiers(AsyncTier.set_expiry, name, at)

    def clear(self) -> None:
        with self._lock:
            self._expiries.clear()
            self._writes.withdraw_all()
            for fetch in self._fetches.values():
                fetch.current = False
            self._tell_tiers(AsyncTier.clear)

    def _tell_tiers(self, control: Callable[..., None], *about: Any) -> None:
        with self._lock:
            for tier in self._tiers if not self._closed else ():
                control(tier, *about)
            self._begun.notify_all()

    def stats(self) -> StoreStats:
        with self._lock:
            return StoreStats(
                tiers={tier.name: tier.report() for tier in self._tiers},
                queued_bytes=self._writes.queued,
                dropped_writes=self._writes.dropped,
                inflight=sum(f.ended is None for f in self._fetches.values()),
                failed_writes=self._writes.failed,
            )

    def _remember_expiry(self, name: ObjectName, at: float | None) -> None:
        """Keep the expiry for copies that move up later: a tier does not return an object's expiry."""
        with self._lock:
            if at is None and self._settings.ttl_s is None:
                self._expiries.pop(name, None)
                return
            self._expiries[name] = at
            if len(self._expiries) > _EXPIRIES_KEPT:
                del self._expiries[next(iter(self._expiries))]

    def _latest(self) -> float | None:
        """Return the expiry (Unix time) of an object written now, unless a later call sets another expiry."""
        return None if self._settings.ttl_s is None else self._wall() + self._settings.ttl_s

    # -- deadlines

    def tick(self) -> None:
        """Give up the operations and fetches whose time is over.  Never blocks; any thread may call it."""
        now = self._clock()
        with self._lock:
            for tier in self._tiers:
                tier.expire(now)
            for fetch in self._fetches.values():
                fetch.expire(now)

    def _watch(self) -> None:
        beat = min(1.0, max(0.005, min(self._settings.deadline_s, self._settings.write_deadline_s) / 20))
        with self._lock:
            while not self._closed:
                self.tick()
                at_rest = self._writes.idle() and all(tier.at_rest() for tier in self._tiers)
                at_rest = at_rest and all(fetch.ended for fetch in self._fetches.values())
                self._begun.wait(None if at_rest else beat)


def _wait_until(fact: Callable[[], bool], timeout_s: float) -> bool:
    """Return whether ``fact()`` becomes true within ``timeout_s`` seconds."""
    end = time.monotonic() + timeout_s
    while not fact():
        left = end - time.monotonic()
        if left <= 0:
            return False
        time.sleep(min(_STEP_S, left))
    return True
