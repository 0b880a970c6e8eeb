"""A tier that nobody waits for: operations with deadlines, in order for each name, bypassed while it fails.

Reading and writing have threads and a circuit breaker each: a disk that has become read-only is still read,
and a slow write holds no read up.  All that changes the tier (put, delete, pin, expire, clear) passes through
one queue.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol, TypeVar, runtime_checkable

from .cache_value import CacheValue, ObjectName
from .circuit_breaker import CircuitBreaker
from .executor import Clock, Dropped, Failed, IoTask, TimedOut, WatchdogExecutor
from .protocol import Presence, TierStats
from .settings import StoreSettings
from .tasks import Future, Task, Unavailable
from .tiers.base import Tier, TierFull
from .tiers.capacity_index import Counts

logger = logging.getLogger("vllm.hypic.store")

T = TypeVar("T")

UNHELD = ObjectName("0" * 64 + ".0-0")
"""Names no object: a world has at least one rank."""

_BYPASSED = "the tier is bypassed"
_CONTROL_TRIES = 8
_LATENCIES_KEPT = 10_000
_REFRESH_S = 1.0


class TimeOver(Unavailable):
    """Whoever asks has no more time."""


class Aside(Protocol):
    """Runs a function on the thread that brought an object, unwatched and without the lock."""

    def __call__(self, call: Callable[[], T], /) -> Future[T]: ...


@runtime_checkable
class Counting(Protocol):
    """A tier that counts what left it."""

    @property
    def counts(self) -> Counts: ...


@dataclass
class _Intent:
    """What the operations of one name that have not ended (hanging ones included) leave behind."""

    present: bool
    operations: int = 0


class AsyncTier:
    """Everything the store does with one tier.  No method but :meth:`open_once` and :meth:`close` blocks.

    ``lock`` is the store's.  Coroutines are run with it held (``tasks.py``).
    """

    def __init__(
        self,
        tier: Tier,
        settings: StoreSettings,
        lock: threading.RLock,
        *,
        clock: Clock = time.monotonic,
        wall: Clock = time.time,
    ) -> None:
        self.name = tier.name
        self.tier = tier
        self.stats = TierStats()
        self._settings = settings
        self._lock = lock
        self._clock = clock
        self._wall = wall
        self.reads = self._executor("reads", settings.readers)
        self.writes = self._executor("writes", 1)
        self.opened = False
        self._tells = False
        self._failing = False
        self._closing = False
        self._reopen = threading.Condition(lock)
        self._threaded = False
        self._intents: dict[ObjectName, _Intent] = {}
        self._clears = 0
        self._probing = False
        self._refreshing = False
        self._refreshed_at = -float("inf")

    def _executor(self, what: str, size: int) -> WatchdogExecutor:
        breaker = CircuitBreaker(self._settings.back_off_s, self._settings.most_back_off_s)
        name, most_hung = f"{self.name} ({what})", self._settings.most_hung
        return WatchdogExecutor(name, size, self._lock, breaker, clock=self._clock, most_hung=most_hung)

    # -- life

    def start(self) -> None:
        """Open the tier in the background, again and again until it is open, then serve."""
        self._threaded = True
        threading.Thread(target=self._keep_opening, name=f"hypic-{self.name} (open)", daemon=True).start()

    def open_once(self) -> bool:
        """Blocks on the tier.  Whether it is open now."""
        try:
            self.tier.open()
            tells = not self.tier.may_hold(UNHELD)
            self._limit_lives()
        except Exception as e:
            with self._lock:
                self.stats.errors += 1
                if not self._failing:
                    logger.warning(
                        "tier %s: bypassed, cannot be opened: %s: %s", self.name, type(e).__name__, e
                    )
                self._failing = True
            return False
        with self._lock:
            if self._failing:
                logger.info("tier %s: open now", self.name)
            self.opened, self._failing, self._tells = True, False, tells
            closed = self._closing
            self._refresh()
            if self._threaded:
                self.reads.start()
                self.writes.start()
        if closed:  # while it was opening
            self.close()
        return True

    def _limit_lives(self) -> None:
        """Tiers forget expiries when the process ends: what they bring along expires as if written now."""
        if self._settings.ttl_s is None:
            return
        latest = self._wall() + self._settings.ttl_s
        for held in list(self.tier.held() or ()):
            if held.expires is None or held.expires > latest:
                self.tier.expire(held.name, latest)

    def _keep_opening(self) -> None:
        back_off = self._settings.back_off_s
        while not self.open_once():
            with self._lock:
                if not self._closing:
                    self._reopen.wait(back_off)
                if self._closing:
                    return
            back_off = min(2 * back_off, self._settings.most_back_off_s)

    def stop(self) -> None:
        """Drop what is queued, start nothing more."""
        with self._lock:
            self._closing = True
            self._reopen.notify_all()
            self.reads.stop()
            self.writes.stop()

    def close(self) -> None:
        """Blocks on the tier."""
        try:
            self.tier.close()
        except Exception as e:
            logger.warning("tier %s: closing: %s: %s", self.name, type(e).__name__, e)

    # -- its state

    @property
    def settled(self) -> bool:
        """Opened, or known to fail: nothing to wait for."""
        with self._lock:
            return self.opened or self._failing

    @property
    def up(self) -> bool:
        with self._lock:
            return self.opened and self.reads.up and self.writes.up

    @property
    def readable(self) -> bool:
        """Not bypassed for reading."""
        with self._lock:
            return self.opened and self.reads.up

    def may_hold(self, name: ObjectName) -> bool:
        """False when the object is certainly absent, or will be once the queue is worked off."""
        with self._lock:
            if not self.opened or self._closing:
                return False
            intent = self._intents.get(name)
            if not intent.present if intent else self._clears > 0:
                return False
        try:
            return self.tier.may_hold(name)
        except Exception:
            logger.exception("tier %s: may_hold must not fail", self.name)
            return False

    def holds(self, name: ObjectName) -> bool:
        """Whether the tier has it for certain; always False for tiers that cannot tell."""
        return self._tells and self.may_hold(name)

    def idle(self) -> bool:
        """Nothing to be written any more, or no way to write it."""
        with self._lock:
            return not self.opened or not self.writes.up or self.writes.idle()

    def at_rest(self) -> bool:
        """Opened, and nothing to watch."""
        with self._lock:
            return self.opened and self.reads.idle() and self.writes.idle()

    def expire(self, now: float) -> None:
        """Give up operations that outlasted their patience at ``now``."""
        self.reads.expire(now)
        self.writes.expire(now)

    def report(self) -> TierStats:
        """Counts so far, and levels as the tier's threads last saw them; forgets the latencies."""
        with self._lock:
            seen = replace(self.stats, up=self.up)
            self.stats.read_seconds, self.stats.write_seconds = [], []
            return seen

    # -- reading

    async def get(self, name: ObjectName, limit: int, patience_s: float) -> tuple[memoryview | None, Aside]:
        """What the tier has, and its thread.  :class:`Unavailable`: it is bypassed, or failed, or hangs.

        A caller whose time is over waits no longer; what the tier still does is counted all the same.
        """
        if not self.readable:
            raise Unavailable(_BYPASSED)
        io = IoTask(f"get {name}", partial(_timed, self.tier.get, name, limit), patience_s)
        try:
            return await Task(self._read(self.reads.submit(io))), io.follow
        except TimeOver:
            if self.reads.withdraw(io):
                self.stats.timeouts += 1  # its whole time went by in the queue
            raise

    async def _read(self, io: IoTask[tuple[memoryview | None, float]]) -> memoryview | None:
        data, seconds = await self._counted(io)
        if data is not None:
            self.stats.read_bytes += data.nbytes
            _keep(self.stats.read_seconds, seconds)
        return data

    def discard(self, name: ObjectName) -> None:
        """What :meth:`get` gave is no sound object."""
        self.delete(name)

    def probe(self, name: ObjectName, limit: int, patience_s: float) -> None:
        """If reading is bypassed and may be tried again: read the object for nobody, so that nobody waits."""
        with self._lock:
            if self.opened and not self.readable and not self._probing and self.reads.accepts():
                io = IoTask(f"get {name}", partial(self.tier.get, name, limit), patience_s)
                self._probing = True
                Task(self._probe(io))

    async def _probe(self, io: IoTask[memoryview | None]) -> None:
        with suppress(Unavailable):
            await self._counted(self.reads.submit(io))
        self._probing = False

    async def look(self, name: ObjectName) -> tuple[Presence, str]:
        """Whether the tier has the object, after the writes that have ended, and why it cannot say."""
        intent = self._intents.get(name)
        if intent is not None and not intent.present:
            return Presence.ABSENT, ""  # once what is queued is worked off
        if not (self.opened and self.reads.accepts()):
            return Presence.FAILED, _BYPASSED
        io = IoTask(f"look for {name}", partial(self.tier.has, name), self._settings.deadline_s)
        try:
            there = await self._counted(self.reads.submit(io))
        except TimedOut:
            return Presence.FAILED, f"it did not answer within {io.patience_s:.3g} s"
        except Unavailable as e:
            return Presence.FAILED, str(e)
        return (Presence.THERE if there else Presence.ABSENT), ""

    async def _counted(self, io: IoTask[T]) -> T:
        try:
            return await io
        except TimedOut:
            self.stats.timeouts += 1
            raise
        except Failed:
            self.stats.errors += 1
            raise

    # -- writing

    def put(
        self, name: ObjectName, data: memoryview, value: CacheValue, expires: float | None
    ) -> Future[str]:
        """Write the object.  Ends when ``data`` is no longer needed, with why the tier has not got it, or
        with nothing."""
        ended: Future[str] = Future()
        with self._lock:
            if self.opened and self.writes.accepts():
                self._intend(name, present=True)
                Task(self._put(name, data, value, expires, ended))
            else:
                self.stats.refused += 1
                ended.set(_BYPASSED)
        return ended

    async def _put(
        self,
        name: ObjectName,
        data: memoryview,
        value: CacheValue,
        expires: float | None,
        ended: Future[str],
    ) -> None:
        stored, fault, returned = False, "", None
        call = partial(self._put_now, name, data, value, expires)
        try:
            seconds = await self.writes.submit(IoTask(f"put {name}", call, self._settings.write_deadline_s))
            if seconds is None:
                fault = "it was deleted or has expired"
            else:
                stored = True
                self.stats.stored += 1
                self.stats.written_bytes += data.nbytes
                _keep(self.stats.write_seconds, seconds)
        except TimedOut as e:
            self.stats.timeouts += 1
            fault, returned = f"writing {e}", e.returned
        except Failed as e:
            if isinstance(e.error, TierFull):
                self.stats.refused += 1
            else:
                self.stats.errors += 1
            fault = str(e)
        except Dropped as e:
            self.stats.refused += 1
            fault = str(e)
        del data, call
        if returned is None:
            self._over(name, stored=stored)
        ended.set(fault)
        self._refresh_soon()
        if returned is not None:
            await returned  # perhaps with the object in the tier
            if not self._wanted(name):
                self.delete(name)
            self._over(name)

    def _put_now(
        self, name: ObjectName, data: memoryview, value: CacheValue, expires: float | None
    ) -> float | None:
        """Blocks on the tier.  Returns the seconds that it took; ``None``: the object is no longer wanted."""
        if not self._wanted(name) or (expires is not None and expires <= self._wall()):
            return None
        started = time.perf_counter()
        self.tier.put(name, data, value)
        if expires is not None:
            self.tier.expire(name, expires)
        return time.perf_counter() - started

    def delete(self, name: ObjectName) -> None:
        """Wins over every put before it, also over one that is running or hanging."""
        with self._lock:
            self._intend(name, present=False)
            Task(self._delete(name))

    async def _delete(self, name: ObjectName) -> None:
        await self._control(f"delete {name}", partial(self.tier.delete, name), again=True)
        self._over(name)

    def clear(self) -> None:
        """Wins over every put before it."""
        with self._lock:
            for intent in self._intents.values():
                intent.present = False
            self._clears += 1
            Task(self._clear())

    async def _clear(self) -> None:
        await self._control("clear", self.tier.clear, again=True)
        self._clears -= 1

    def pin(self, name: ObjectName) -> None:
        self._manage(f"pin {name}", partial(self.tier.pin, name))

    def unpin(self, name: ObjectName) -> None:
        self._manage(f"unpin {name}", partial(self.tier.unpin, name))

    def set_expiry(self, name: ObjectName, at: float | None) -> None:
        self._manage(f"expire {name}", partial(self.tier.expire, name, at))

    def _manage(self, what: str, call: Callable[[], object]) -> None:
        with self._lock:
            Task(self._control(what, call, again=False))

    async def _control(self, what: str, call: Callable[[], object], *, again: bool) -> None:
        """Kept while the tier is bypassed, tried again when it fails."""
        patience_s = self._settings.write_deadline_s
        io = IoTask(what, call, patience_s, tries=_CONTROL_TRIES, again_after_timeout=again)
        try:
            await self._counted(self.writes.submit(io))
        except Unavailable as e:
            if not self._closing or again:
                logger.error("tier %s: gave up: %s: %s", self.name, what, e)
        self._refresh_soon()

    # -- order for each name

    def _intend(self, name: ObjectName, present: bool) -> None:
        intent = self._intents.setdefault(name, _Intent(present))
        intent.present = present
        intent.operations += 1

    def _wanted(self, name: ObjectName) -> bool:
        with self._lock:
            return self._intents[name].present

    def _over(self, name: ObjectName, *, stored: bool = True) -> None:
        intent = self._intents[name]
        intent.operations -= 1
        if not intent.operations:
            del self._intents[name]
        elif not stored:
            intent.present = False

    # -- levels

    def _refresh_soon(self) -> None:
        """Once the queue is empty, and now and then before."""
        if not self.writes.backlog() or self._clock() >= self._refreshed_at + _REFRESH_S:
            self._refresh()

    def _refresh(self) -> None:
        """Not while writing is bypassed: that looking works does not say that writing does."""
        if not self._refreshing and self.writes.up and not self._closing:
            self._refreshing = True
            Task(self._look_how_full())

    async def _look_how_full(self) -> None:
        io = IoTask("look how full it is", self._levels, self._settings.write_deadline_s)
        with suppress(Unavailable):
            used, budget, objects, counts = await self._counted(self.writes.submit(io))
            self.stats.bytes_used, self.stats.bytes_budget, self.stats.objects = used, budget or 0, objects
            if counts is not None:
                self.stats.evictions, self.stats.expired = counts.evicted, counts.expired
            self._refreshed_at = self._clock()
        self._refreshing = False

    def _levels(self) -> tuple[int, int | None, int, Counts | None]:
        """Blocks on the tier."""
        objects = sum(1 for _ in self.tier.held() or ()) if self._tells else 0
        return (*self.tier.used(), objects, self.tier.counts if isinstance(self.tier, Counting) else None)


def _timed(
    get: Callable[[ObjectName, int], memoryview | None], name: ObjectName, limit: int
) -> tuple[memoryview | None, float]:
    started = time.perf_counter()
    return get(name, limit), time.perf_counter() - started


def _keep(latencies: list[float], seconds: float) -> None:
    if len(latencies) < _LATENCIES_KEPT:
        latencies.append(seconds)
