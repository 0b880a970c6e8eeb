"""A tier that nobody waits for: operations with deadlines, in order for each name, bypassed while it fails.

Reading and writing have threads and a circuit breaker each: a disk that has become read-only is still read,
and a slow write holds no read up.  All that changes the tier (put, delete, pin, expire, clear) passes through
one queue.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeVar

from .cache_value import CacheValue, ObjectName
from .executor import Clock, Dropped, Failed, IoTask, Refused, TimedOut, WatchdogExecutor
from .protocol import TierStats
from .settings import StoreSettings
from .tasks import Future, Task, Unavailable
from .tiers.base import Tier
from .tiers.capacity_index import Counts

logger = logging.getLogger("vllm.hypic.store")

T = TypeVar("T")

UNHELD = ObjectName("0" * 64 + ".0-0")
"""Names no object: a world has at least one rank."""

_BYPASSED = "the tier is bypassed"
_CONTROL_TRIES = 8
_LATENCIES_KEPT = 10_000
_REFRESH_S = 1.0
_LOOKS = 64
"""Names that one call looks for at most."""


@dataclass(frozen=True)
class Item:
    """An object to be written; it expires at a Unix time, or never.  It is of no use without those that it
    ``rests_on``."""

    name: ObjectName
    data: memoryview
    value: CacheValue
    expires: float | None
    rests_on: tuple[ObjectName, ...] = ()


@dataclass
class _Intent:
    """Whether the object will be there once the operations on its name, hanging ones included, have ended."""

    present: bool
    operations: int = 0


class AsyncTier:
    """Everything the store does with one tier.

    ``lock`` is the store's.  All methods are called with it held, but for :meth:`open_once`, :meth:`close`
    and those that are a call to the tier: these block.
    """

    def __init__(
        self,
        tier: Tier,
        settings: StoreSettings,
        lock: threading.RLock,
        clock: Clock,
        wall: Clock,
    ) -> None:
        self.name, self.tier = tier.name, tier
        self.stats = TierStats()
        self.opened = False
        self._settings, self._lock, self._clock, self._wall = settings, lock, clock, wall
        self.reads = WatchdogExecutor(f"{tier.name} (reads)", settings.readers, lock, settings, clock)
        self.writes = WatchdogExecutor(f"{tier.name} (writes)", 1, lock, settings, clock)
        self._tells = self._failing = self._closing = self._threaded = self._refreshing = False
        self._reopen = threading.Condition(lock)
        self._intents: dict[ObjectName, _Intent] = {}
        self._clears = 0
        self._refreshed_at = -float("inf")

    # -- life

    def start(self) -> None:
        """Open the tier in the background, again and again until it is open, then serve."""
        self._threaded = True
        threading.Thread(target=self._keep_opening, name=f"hypic-{self.name} (open)", daemon=True).start()

    def open_once(self) -> bool:
        """Whether the tier is open now."""
        try:
            self.tier.open()
            tells = not self.tier.may_hold(UNHELD)
            self._limit_lives()
        except Exception as e:
            with self._lock:
                self.stats.errors += 1
                if not self._failing:
                    fault = f"{type(e).__name__}: {e}"
                    logger.warning("tier %s: bypassed, as it cannot be opened: %s", self.name, fault)
                self._failing = True
            return False
        with self._lock:
            if self._failing:
                logger.info("tier %s: open now", self.name)
            self.opened, self._failing, self._tells = True, False, tells
            closing = self._closing
            self._refresh()
            if self._threaded:
                self.reads.start()
                self.writes.start()
        if closing:  # while it was opening
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
        self._closing = True
        self._reopen.notify_all()
        self.reads.stop()
        self.writes.stop()

    def close(self) -> None:
        try:
            self.tier.close()
        except Exception as e:
            logger.warning("tier %s: closing it failed: %s: %s", self.name, type(e).__name__, e)

    # -- its state

    @property
    def settled(self) -> bool:
        """Whether the tier is open, or known to fail: nothing to wait for."""
        return self.opened or self._failing

    @property
    def readable(self) -> bool:
        """Whether reads are not bypassed."""
        return self.opened and self.reads.up

    def may_hold(self, name: ObjectName) -> bool:
        """False when the object is certainly absent, or will be once the queue is worked off."""
        intent = self._intents.get(name)
        leaving = not intent.present if intent else self._clears > 0
        if not self.opened or self._closing or leaving:
            return False
        try:
            return self.tier.may_hold(name)
        except Exception:
            logger.exception("tier %s: may_hold must not fail", self.name)
            self.stats.errors += 1
            return False

    def holds(self, name: ObjectName) -> bool:
        """Whether the tier has it for certain; always False for tiers that cannot tell."""
        return self._tells and self.may_hold(name)

    def idle(self) -> bool:
        """Whether nothing is to be written any more, or there is no way to write it."""
        return not self.opened or not self.writes.up or self.writes.idle()

    def at_rest(self) -> bool:
        """Whether the tier is open, and there is nothing to watch."""
        return self.opened and self.reads.idle() and self.writes.idle()

    def expire(self, now: float) -> None:
        """Give up operations that outlasted their patience at ``now``."""
        self.reads.expire(now)
        self.writes.expire(now)

    def report(self) -> TierStats:
        """Counts so far, and levels as the tier's threads last saw them; forgets the latencies."""
        seen = replace(self.stats, up=self.readable and self.writes.up)
        self.stats.read_seconds, self.stats.write_seconds = [], []
        return seen

    # -- reading

    async def get(self, name: ObjectName, limit: int, patience_s: float) -> IoTask[memoryview | None]:
        """Read the object: the task that brought it, or that found none.

        :class:`Unavailable`: the tier is bypassed, failed or hangs.  A caller whose time is over may be
        interrupted; what the tier still does is counted all the same.
        """
        if not self.readable:
            raise Unavailable(_BYPASSED)
        io = self.reads.submit(IoTask(f"get {name}", partial(self.tier.get, name, limit), patience_s))
        try:
            await self._read(io)
        except Unavailable:
            if not io.done:  # the caller's time is over
                self.reads.withdraw(io)
                Task(self._read(io))
            raise
        return io

    async def _read(self, io: IoTask[memoryview | None]) -> None:
        data = await self._counted(io)
        if data is not None:
            self.stats.read_bytes += data.nbytes
            _keep(self.stats.read_seconds, io.seconds)

    def probe(self, name: ObjectName, limit: int, patience_s: float) -> None:
        """If reading is bypassed and may be tried again: read the object for nobody, so that nobody waits."""
        if self.opened and not self.readable and not self.reads.backlog() and self.reads.accepts():
            io = IoTask(f"get {name}", partial(self.tier.get, name, limit), patience_s)
            Task(self._counted(self.reads.submit(io)))

    async def look_for(self, names: Sequence[ObjectName], until: float) -> tuple[Sequence[ObjectName], str]:
        """Those that the tier has, after the writes that have ended, if it can tell; else the first of them,
        if it is found by ``until``; and why it cannot say."""
        if not (self.opened and self.reads.accepts()):
            return (), _BYPASSED
        there = [name for name in names if self.may_hold(name)]
        if self._tells:
            return there, ""
        for at in range(0, len(there), _LOOKS):
            some, patience_s = there[at : at + _LOOKS], until - self._clock()
            if patience_s <= 0:
                return (), "the tier did not answer in time"
            io = IoTask(f"look for {some[0]}", partial(self.tier.first, some), patience_s, until=until)
            try:
                first = await self._counted(self.reads.submit(io))
            except TimedOut:
                return (), f"the tier did not answer within {self._settings.deadline_s:.3g} s"
            except Unavailable as e:
                return (), str(e)
            if first is not None:
                return (first,), ""
        return (), ""

    async def _counted(self, io: IoTask[T]) -> T:
        try:
            return await io
        except Unavailable as e:
            self._count(e)
            raise

    def _count(self, fault: Unavailable) -> None:
        if isinstance(fault, TimedOut):
            self.stats.timeouts += 1
        elif isinstance(fault, Failed):
            self.stats.errors += 1

    # -- writing

    def put(self, item: Item) -> Future[str]:
        """Write the object.  Ends when its bytes are no longer needed, with why the tier has not got it, or
        with nothing."""
        ended: Future[str] = Future()
        if self.opened and self.writes.accepts():
            self._intend(item.name, present=True)
            Task(self._put(item, ended))
        else:
            self.stats.refused += 1
            ended.set(_BYPASSED)
        return ended

    async def _put(self, item: Item, ended: Future[str]) -> None:
        name, call, patience_s = item.name, partial(self._put_now, item), self._settings.write_deadline_s
        seconds, fault, returned = None, "", None
        try:
            # The task gets no name here: its error would keep it, and the object, for the garbage collector.
            seconds = await self.writes.submit(IoTask(f"put {name}", call, patience_s))
            fault = "the record was deleted or has expired" if seconds is None else ""
        except Unavailable as e:
            fault, returned = str(e), e.returned if isinstance(e, TimedOut) else None
            if isinstance(e, (Dropped, Refused)):
                self.stats.refused += 1
            else:
                self._count(e)
        if seconds is not None:
            self.stats.stored += 1
            self.stats.written_bytes += item.data.nbytes
            _keep(self.stats.write_seconds, seconds)
        if returned is None:
            self._over(name, stored=seconds is not None)
        ended.set(fault)
        self._refresh_soon()
        if returned is not None:
            await returned  # perhaps with the object in the tier
            if not self._intents[name].present:
                self.delete(name)
            self._over(name)

    def _put_now(self, item: Item) -> float | None:
        """Call the tier.  Returns the seconds that it took; ``None``: the object is no longer wanted."""
        with self._lock:
            expired = item.expires is not None and item.expires <= self._wall()
            if expired or not self._intents[item.name].present:
                return None
        started = time.perf_counter()
        for base in item.rests_on:
            self.tier.touch(base)  # so that it does not make room for this one
        self.tier.put(item.name, item.data, item.value)
        for base in item.rests_on:
            self.tier.touch(base)  # so that it leaves after this one
        if item.expires is not None:
            self.tier.expire(item.name, item.expires)
        return time.perf_counter() - started

    def delete(self, name: ObjectName) -> None:
        """Delete the object: wins over every put before it, also over one that is running or hanging."""
        self._intend(name, present=False)
        Task(self._delete(name))

    async def _delete(self, name: ObjectName) -> None:
        await self._control(f"delete {name}", partial(self.tier.delete, name), again_after_timeout=True)
        self._over(name)

    def clear(self) -> None:
        """Delete everything: wins over every put before it."""
        for intent in self._intents.values():
            intent.present = False
        self._clears += 1
        Task(self._clear())

    async def _clear(self) -> None:
        await self._control("clear", self.tier.clear, again_after_timeout=True)
        self._clears -= 1

    def pin(self, name: ObjectName) -> None:
        Task(self._control(f"pin {name}", partial(self.tier.pin, name)))

    def unpin(self, name: ObjectName) -> None:
        Task(self._control(f"unpin {name}", partial(self.tier.unpin, name)))

    def set_expiry(self, name: ObjectName, at: float | None) -> None:
        Task(self._control(f"expire {name}", partial(self.tier.expire, name, at)))

    async def _control(
        self, what: str, call: Callable[[], object], again_after_timeout: bool = False
    ) -> None:
        """Make a call that waits while the tier is bypassed; if it fails, it is the first to be tried."""
        for tries in range(1, _CONTROL_TRIES + 1):
            io = IoTask(what, call, self._settings.write_deadline_s, stays=True)
            try:
                await self.writes.submit(io, first=tries > 1)
                break
            except Unavailable as e:
                again = isinstance(e, Failed) and not isinstance(e, Refused)
                again |= isinstance(e, TimedOut) and again_after_timeout
                if again and tries < _CONTROL_TRIES:
                    continue
                self._count(e)
                if not self._closing or again_after_timeout:
                    logger.error("tier %s: could not %s (%d tries): %s", self.name, what, tries, e)
                break
        self._refresh_soon()

    # -- order for each name

    def _intend(self, name: ObjectName, present: bool) -> None:
        intent = self._intents.setdefault(name, _Intent(present))
        intent.present = present
        intent.operations += 1

    def _over(self, name: ObjectName, *, stored: bool = True) -> None:
        intent = self._intents[name]
        intent.operations -= 1
        if not intent.operations:
            del self._intents[name]
        elif not stored:
            intent.present = False

    # -- levels

    def _refresh_soon(self) -> None:
        """Refresh the levels once the queue is empty, and now and then before."""
        if not self.writes.backlog() or self._clock() >= self._refreshed_at + _REFRESH_S:
            self._refresh()

    def _refresh(self) -> None:
        """Refresh the levels unless writing is bypassed: looking may work when writing does not."""
        if not self._refreshing and self.writes.up and not self._closing:
            self._refreshing = True
            Task(self._look_how_full())

    async def _look_how_full(self) -> None:
        io = IoTask("look how full it is", self._levels, self._settings.write_deadline_s)
        try:
            (used, budget), objects, counts = await self._counted(self.writes.submit(io))
        except Unavailable:
            self._refreshing = False
            return
        self.stats.bytes_used, self.stats.bytes_budget, self.stats.objects = used, budget or 0, objects
        if counts is not None:
            self.stats.evictions, self.stats.expired = counts.evicted, counts.expired
        self._refreshed_at = self._clock()
        self._refreshing = False

    def _levels(self) -> tuple[tuple[int, int | None], int, Counts | None]:
        """Call the tier: bytes used and budget, objects held, and what left it."""
        objects = sum(1 for _ in self.tier.held() or ()) if self._tells else 0
        return self.tier.used(), objects, getattr(self.tier, "counts", None)


def _keep(latencies: list[float], seconds: float) -> None:
    if len(latencies) < _LATENCIES_KEPT:
        latencies.append(seconds)
