"""A tier with threads, deadlines and circuit breakers, so that no caller waits for the tier.

Reads and writes have separate threads and separate circuit breakers: a read-only disk still serves reads, and
a slow write delays no read.  All changes of the tier (put, delete, pin, expire, clear) pass through one
queue, in order for each name.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeVar

from .executor import Clock, Dropped, Failed, IoTask, Refused, TimedOut, WatchdogExecutor
from .protocol import CacheValue, ObjectName, TierStats
from .settings import StoreSettings
from .tasks import Future, Task, Unavailable
from .tiers.base import Tier, TierError
from .tiers.capacity_index import Counts

logger = logging.getLogger("vllm.hypic.store")

T = TypeVar("T")

UNHELD = ObjectName("0" * 64 + ".0-0")
"""A name that no object has: its world size is 0, and every world has at least one rank."""

_BYPASSED = "the tier is bypassed"
_CONTROL_TRIES = 8
_LATENCIES_KEPT = 10_000
_REFRESH_S = 1.0
_LOOKS = 64
"""The most names that one call of :meth:`.Tier.first` receives."""


@dataclass(frozen=True)
class Item:
    """An object to write.  ``expires``: Unix time in seconds; ``None``: the object never expires.
    ``rests_on``: names of the objects without which this object is useless."""

    name: ObjectName
    data: memoryview
    value: CacheValue
    expires: float | None
    rests_on: tuple[ObjectName, ...] = ()


@dataclass
class _Intent:
    """Whether the object is ``present`` after all pending ``operations``, hanging operations included."""

    present: bool
    operations: int = 0


class AsyncTier:
    """All operations of the store on one tier.

    ``lock`` is the store's lock.  The caller holds it for all methods, except for :meth:`open_once`,
    :meth:`close` and the methods that call the tier, which block.
    """

    def __init__(
        self,
        tier: Tier,
        settings: StoreSettings,
        lock: threading.RLock,
        clock: Clock,
        wall: Clock,
        remember_expiry: Callable[[ObjectName, float], None],
    ) -> None:
        """``remember_expiry`` gets the expiries of objects that an earlier process left in the tier."""
        self.name, self.tier = tier.name, tier
        self.stats = TierStats()
        self.opened = False
        self._settings, self._lock, self._clock, self._wall = settings, lock, clock, wall
        self._remember_expiry = remember_expiry
        self.reads = WatchdogExecutor(f"{tier.name} (reads)", settings.readers, lock, settings, clock)
        self.writes = WatchdogExecutor(f"{tier.name} (writes)", 1, lock, settings, clock)
        self._tells = self._failing = self._closing = self._threaded = self._refreshing = False
        self._reopen = threading.Condition(lock)
        self._intents: dict[ObjectName, _Intent] = {}
        self._clears = 0
        self._refreshed_at = -float("inf")
        self._damaged = 0
        """Damaged objects that the tier itself deleted."""

    # -- life

    def start(self) -> None:
        """Open the tier in the background, again and again until it is open; then start reads and writes."""
        self._threaded = True
        threading.Thread(target=self._keep_opening, name=f"hypic-{self.name} (open)", daemon=True).start()

    def open_once(self) -> bool:
        """Try to open the tier; return whether the tier is open.  Statistics and log report a failure."""
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
        if closing:  # stop() came while the tier was opening
            self.close()
        return True

    def _limit_lives(self) -> None:
        """Let held objects expire as if written now: a tier forgets expiries when its process ends."""
        if self._settings.ttl_s is None:
            return
        latest = self._wall() + self._settings.ttl_s
        for held in list(self.tier.held() or ()):
            if held.expires is None or held.expires > latest:
                self.tier.expire(held.name, latest)
                self._remember_expiry(held.name, latest)

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
        """Drop queued operations, and start no further operation."""
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
        """Whether the tier is open or known to fail, so that nothing needs to wait for it."""
        return self.opened or self._failing

    @property
    def readable(self) -> bool:
        """Whether the tier is open, and its reads are not bypassed."""
        return self.opened and self.reads.up

    def may_hold(self, name: ObjectName) -> bool:
        """Return False when the object is certainly absent, or will be absent after the queued operations."""
        intent = self._intents.get(name)
        leaving = not intent.present if intent else self._clears > 0
        if not self.opened or self._closing or leaving:
            return False
        try:
            return self.tier.may_hold(name)
        except Exception:
            logger.exception("tier %s: may_hold raised an exception", self.name)
            self.stats.errors += 1
            return False

    def holds(self, name: ObjectName) -> bool:
        """Return whether the tier certainly has the object; always False for a tier that cannot tell."""
        return self._tells and self.may_hold(name)

    def idle(self) -> bool:
        """Return whether no write is pending, or the tier takes no write because it is closed or bypassed."""
        return not self.opened or not self.writes.up or self.writes.idle()

    def at_rest(self) -> bool:
        """Return whether the tier is open and no operation is pending, so that no deadline needs watching."""
        return self.opened and self.reads.idle() and self.writes.idle()

    def expire(self, now: float) -> None:
        """Give up operations that exceed their patience at ``now`` (seconds of the store's clock)."""
        self.reads.expire(now)
        self.writes.expire(now)

    def report(self) -> TierStats:
        """Return the counts so far, and the levels of their last refresh; clear the recorded latencies."""
        corrupt = self.stats.corrupt + self._damaged
        seen = replace(self.stats, up=self.readable and self.writes.up, corrupt=corrupt)
        self.stats.read_seconds, self.stats.write_seconds = [], []
        return seen

    # -- reading

    async def get(self, name: ObjectName, limit: int, patience_s: float) -> IoTask[memoryview | None]:
        """Read the object; return the finished task, whose value is ``None`` if the tier has no such object.

        ``limit``: bytes; ``patience_s``: seconds.  Raises :class:`Unavailable` when the tier is bypassed,
        fails or hangs.  The store may interrupt a caller whose time is over; statistics still count the late
        result.
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
        """Test a bypassed tier with a read, if the breaker allows a try.  No fetch waits for the read."""
        if self.opened and not self.readable and not self.reads.backlog() and self.reads.accepts():
            io = IoTask(f"get {name}", partial(self.tier.get, name, limit), patience_s)
            Task(self._counted(self.reads.submit(io)))

    async def look_for(self, names: Sequence[ObjectName], until: float) -> tuple[Sequence[ObjectName], str]:
        """Return the ``names`` that the tier has after all ended writes, and the reason if the tier cannot
        answer.  A tier that cannot tell at once returns only the first name that it finds by ``until``
        (store's clock)."""
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
        """Write the object; return a future that ends when the tier no longer needs the bytes.  The
        future's value is the reason why the tier does not have the object, or an empty text."""
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
            # No variable holds the task: its error would keep the object's bytes until a garbage collection.
            seconds = await self.writes.submit(IoTask(f"put {name}", call, patience_s))
            fault = "the record was deleted or has expired" if seconds is None else ""
        except Unavailable as e:
            fault, returned = str(e), e.returned if isinstance(e, TimedOut) else None
            if isinstance(e, (Dropped, Refused)):
                self.stats.refused += 1
            else:
                self._count(e)
                if returned is None and item.expires is not None:
                    self.delete(name)  # a server may still store the object, which would stay for good
        if seconds is not None:
            self.stats.stored += 1
            self.stats.written_bytes += item.data.nbytes
            _keep(self.stats.write_seconds, seconds)
        if returned is None:
            self._over(name, stored=seconds is not None)
        ended.set(fault)
        self._refresh_soon()
        if returned is not None:
            await returned  # the late call may have stored the object
            if not self._intents[name].present:
                self.delete(name)
            self._over(name)

    def _put_now(self, item: Item) -> float | None:
        """Call the tier; return the call's seconds, or ``None`` if the object is deleted or expired."""
        with self._lock:
            expired = item.expires is not None and item.expires <= self._wall()
            if expired or not self._intents[item.name].present:
                return None
        started = time.perf_counter()
        for base in item.rests_on:
            self.tier.touch(base)  # so that the base does not make room for this object
        self.tier.put(item.name, item.data, item.value)
        if item.expires is not None:
            try:
                self.tier.expire(item.name, item.expires)
            except TierError:
                self.tier.delete(item.name)  # without an expiry the object would stay for good
                raise
        for base in item.rests_on:
            self.tier.touch(base)  # so that the base leaves after this object
        return time.perf_counter() - started

    def delete(self, name: ObjectName) -> None:
        """Delete the object.  The delete wins over every earlier put, even a running or hanging put."""
        self._intend(name, present=False)
        Task(self._delete(name))

    async def _delete(self, name: ObjectName) -> None:
        await self._control(f"delete {name}", partial(self.tier.delete, name), again_after_timeout=True)
        self._over(name)

    def clear(self) -> None:
        """Delete all objects.  The clear wins over every earlier put."""
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
        """Make a call that waits while the tier is bypassed; a failed call is the first to be tried again."""
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
        """Refresh the levels if the queue is empty, or the last refresh is ``_REFRESH_S`` seconds old."""
        if not self.writes.backlog() or self._clock() >= self._refreshed_at + _REFRESH_S:
            self._refresh()

    def _refresh(self) -> None:
        """Refresh the levels, unless writes are bypassed: a successful look would end the bypass."""
        if not self._refreshing and self.writes.up and not self._closing:
            self._refreshing = True
            Task(self._look_how_full())

    async def _look_how_full(self) -> None:
        io = IoTask("measure the tier", self._levels, self._settings.write_deadline_s)
        try:
            (used, budget), objects, counts = await self._counted(self.writes.submit(io))
        except Unavailable:
            self._refreshing = False
            return
        self.stats.bytes_used, self.stats.bytes_budget, self.stats.objects = used, budget or 0, objects
        if counts is not None:
            self.stats.evictions, self.stats.expired = counts.evicted, counts.expired
            self._damaged = counts.damaged
        self._refreshed_at = self._clock()
        self._refreshing = False

    def _levels(self) -> tuple[tuple[int, int | None], int, Counts | None]:
        """Call the tier; return bytes used and budget, objects held, and counts of objects that left."""
        objects = sum(1 for _ in self.tier.held() or ()) if self._tells else 0
        return self.tier.used(), objects, getattr(self.tier, "counts", None)


def _keep(latencies: list[float], seconds: float) -> None:
    if len(latencies) < _LATENCIES_KEPT:
        latencies.append(seconds)
