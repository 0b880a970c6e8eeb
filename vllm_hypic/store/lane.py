"""A tier with threads of its own: operations with deadlines, in order for each name, bypassed while it fails.

Reading and writing are two crews with a health each: a disk that has become read-only is still read, and a
slow write holds no read up.  All writing operations (put, delete, pin, expire, clear) pass through one queue.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Protocol, runtime_checkable

from .crew import Clock, Crew, Job
from .health import Health
from .protocol import Presence, TierStats
from .settings import StoreSettings
from .tiers.base import Tier, TierFull
from .tiers.ledger import Counts
from .worth import ObjectName, Worth

logger = logging.getLogger("vllm.hypic.store")

UNHELD = ObjectName("0" * 64 + ".0-0")
"""Names no object: a world has at least one rank."""

Ended = Callable[[str], None]
"""Runs when a write has ended; with why the tier does not have the object, or nothing."""

_CONTROL_TRIES = 8
_LATENCIES_KEPT = 10_000
_REFRESH_S = 1.0


@runtime_checkable
class Counting(Protocol):
    """A tier that counts what left it."""

    @property
    def counts(self) -> Counts: ...


@dataclass
class _Intent:
    """What the operations of one name that have not ended (hanging ones included) leave behind."""

    present: bool
    jobs: int = 0


class Lane:
    """Everything the store does with one tier.  No method waits for the tier.

    ``lock`` is the store's; callbacks of operations run on the lane's threads, or with the lock held on
    whichever thread notices that an operation is over.
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
        self.reads = self._crew("reads", settings.readers)
        self.writes = self._crew("writes", 1)
        self.opened = False
        self._tells = False
        self._failing = False
        self._closing = False
        self._reopen = threading.Condition(lock)
        self._threaded = False
        self._intents: dict[ObjectName, _Intent] = {}
        self._clears = 0
        self._probe: _Probe | None = None
        self._levels: _Levels | None = None
        self._levels_at = -float("inf")

    def _crew(self, what: str, size: int) -> Crew:
        health = Health(self._settings.back_off_s, self._settings.most_back_off_s)
        return Crew(
            f"{self.name} ({what})",
            size,
            self._lock,
            health,
            clock=self._clock,
            most_hung=self._settings.most_hung,
        )

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

    @property
    def settled(self) -> bool:
        """Opened, or known to fail: nothing to wait for."""
        with self._lock:
            return self.opened or self._failing

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

    # -- asking

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

    def expire(self, now: float) -> None:
        """Give up operations that outlasted their patience at ``now``."""
        self.reads.expire(now)
        self.writes.expire(now)

    def count_miss(self) -> None:
        with self._lock:
            self.stats.misses += 1

    def at_rest(self) -> bool:
        """Opened, and nothing to watch."""
        with self._lock:
            return self.opened and self.reads.idle() and self.writes.idle()

    def report(self) -> TierStats:
        """Counts so far, and levels as the tier's threads last saw them; forgets the latencies."""
        with self._lock:
            seen = replace(self.stats, up=self.up)
            self.stats.read_seconds, self.stats.write_seconds = [], []
            return seen

    # -- reading

    def get(
        self,
        name: ObjectName,
        limit: int,
        patience_s: float,
        fetched: Callable[[memoryview | None], None],
        lost: Callable[[], None],
    ) -> Callable[[], None] | None:
        """Start reading; ``None`` while bypassed.  What is returned calls it off.

        Then either ``fetched`` runs with what the tier has, or ``lost``: the tier failed or took too long.
        """
        with self._lock:
            job = _Get(self, name, limit, patience_s, fetched, lost)
            if not self.readable or not self.reads.submit(job):
                return None
            return lambda: self._call_off(job)

    def _call_off(self, job: _Get) -> None:
        if self.reads.cancel(job):
            self.stats.timeouts += 1  # its whole time went by in the queue

    def probe(self, name: ObjectName, limit: int, patience_s: float) -> None:
        """If reading is bypassed and may be tried again: read the object for nobody, so that nobody waits."""
        with self._lock:
            if not self.opened or self.readable or self._probe or not self.reads.accepts():
                return
            job = _Probe(self, name, limit, patience_s)
            if self.reads.submit(job):
                self._probe = job

    def look(self, name: ObjectName, found: Callable[[Presence, str], None]) -> None:
        """Ask the tier whether it has the object, after the writes that have ended; ``found`` runs once, with
        a reason if the tier cannot say."""
        with self._lock:
            intent = self._intents.get(name)
            if intent is not None and not intent.present:
                found(Presence.ABSENT, "")  # once what is queued is worked off
            elif not (self.opened and self.reads.accepts() and self.reads.submit(_Look(self, name, found))):
                found(Presence.FAILED, "the tier is bypassed")

    # -- writing

    def put(
        self,
        name: ObjectName,
        data: memoryview,
        worth: Worth,
        expires: float | None,
        ended: Ended,
    ) -> None:
        """Write the object; ``ended`` runs when the lane no longer needs ``data``, stored or not."""
        with self._lock:
            job = _Put(self, name, data, worth, expires, ended)
            if self.opened and self.writes.accepts() and self.writes.submit(job):
                self._intend(name, present=True)
                return
            self.stats.refused += 1
        ended("the tier is bypassed")

    def delete(self, name: ObjectName) -> None:
        """Wins over every put before it, also over one that is running or hanging."""
        with self._lock:
            self._intend(name, present=False)
            self._control(f"delete {name}", lambda: self.tier.delete(name), name=name, again=True)

    def pin(self, name: ObjectName) -> None:
        self._control(f"pin {name}", lambda: self.tier.pin(name))

    def unpin(self, name: ObjectName) -> None:
        self._control(f"unpin {name}", lambda: self.tier.unpin(name))

    def set_expiry(self, name: ObjectName, at: float | None) -> None:
        self._control(f"expire {name}", lambda: self.tier.expire(name, at))

    def clear(self) -> None:
        """Wins over every put before it."""
        with self._lock:
            for intent in self._intents.values():
                intent.present = False
            self._clears += 1
            self._control("clear", self.tier.clear, clears=True, again=True)

    def _control(
        self,
        what: str,
        call: Callable[[], object],
        *,
        name: ObjectName | None = None,
        clears: bool = False,
        again: bool = False,
    ) -> None:
        with self._lock:
            job = _Control(self, what, call, name, clears, again)
            if not self.writes.submit(job):
                self._gave_up(job, "the queue is full")

    def _gave_up(self, job: _Control, reason: str) -> None:
        if not self._closing or job.again_after_timeout:
            logger.error("tier %s: gave up: %s: %s", self.name, job.what, reason)
        self._control_over(job)

    def _control_over(self, job: _Control) -> None:
        with self._lock:
            if job.clears:
                self._clears -= 1
            if job.name is not None:
                self._over(job.name)
            self._refresh_soon()

    # -- order for each name

    def _intend(self, name: ObjectName, present: bool) -> None:
        intent = self._intents.setdefault(name, _Intent(present))
        intent.present = present
        intent.jobs += 1

    def _wanted(self, name: ObjectName) -> bool:
        with self._lock:
            return self._intents[name].present

    def _over(self, name: ObjectName, *, stored: bool = True) -> None:
        intent = self._intents[name]
        intent.jobs -= 1
        if not intent.jobs:
            del self._intents[name]
        elif not stored:
            intent.present = False

    def _late_put(self, name: ObjectName) -> None:
        """A put that was given up came back, perhaps with the object in the tier."""
        with self._lock:
            if not self._wanted(name):
                self.delete(name)
            self._over(name)

    # -- levels

    def _refresh_soon(self) -> None:
        """Once the queue is empty, and now and then before."""
        if not self.writes.backlog() or self._clock() >= self._levels_at + _REFRESH_S:
            self._refresh()

    def _refresh(self) -> None:
        """Not while writing is bypassed: that looking works does not say that writing does."""
        with self._lock:
            if self._levels is None and self.writes.up and not self._closing:
                job = _Levels(self)
                if self.writes.submit(job):
                    self._levels = job


class _Get(Job):
    def __init__(
        self,
        lane: Lane,
        name: ObjectName,
        limit: int,
        patience_s: float,
        fetched: Callable[[memoryview | None], None],
        lost: Callable[[], None],
    ) -> None:
        self.what = f"get {name}"
        self.patience_s = patience_s
        self._lane = lane
        self._name = name
        self._limit = limit
        self._fetched = fetched
        self._lost = lost
        self._data: memoryview | None = None
        self._seconds = 0.0

    def work(self) -> None:
        started = time.perf_counter()
        self._data = self._lane.tier.get(self._name, self._limit)
        self._seconds = time.perf_counter() - started

    def done(self) -> None:
        with self._lane._lock:
            stats = self._lane.stats
            if self._data is not None:
                stats.read_bytes += self._data.nbytes
                _keep(stats.read_seconds, self._seconds)
        self._fetched(self._data)

    def failed(self, error: Exception) -> None:
        with self._lane._lock:
            self._lane.stats.errors += 1
        self._lost()

    def dropped(self) -> None:
        self._lost()

    def timed_out(self) -> None:
        self._lane.stats.timeouts += 1
        self._lost()

    def late(self) -> None:
        self._data = None


class _Look(Job):
    def __init__(self, lane: Lane, name: ObjectName, found: Callable[[Presence, str], None]) -> None:
        self.what = f"look for {name}"
        self.patience_s = lane._settings.deadline_s
        self._lane = lane
        self._name = name
        self._found = found
        self._there = False

    def work(self) -> None:
        self._there = self._lane.tier.has(self._name)

    def done(self) -> None:
        self._found(Presence.THERE if self._there else Presence.ABSENT, "")

    def failed(self, error: Exception) -> None:
        with self._lane._lock:
            self._lane.stats.errors += 1
        self._found(Presence.FAILED, f"{type(error).__name__}: {error}")

    def dropped(self) -> None:
        self._found(Presence.FAILED, "the tier is bypassed")

    def timed_out(self) -> None:
        self._lane.stats.timeouts += 1
        self._found(Presence.FAILED, f"it did not answer within {self.patience_s:.3g} s")


class _Probe(Job):
    def __init__(self, lane: Lane, name: ObjectName, limit: int, patience_s: float) -> None:
        self.what = f"get {name}"
        self.patience_s = patience_s
        self._lane = lane
        self._name = name
        self._limit = limit

    def work(self) -> None:
        self._lane.tier.get(self._name, self._limit)

    def done(self) -> None:
        self._over()

    def failed(self, error: Exception) -> None:
        with self._lane._lock:
            self._lane.stats.errors += 1
        self._over()

    def dropped(self) -> None:
        self._over()

    def timed_out(self) -> None:
        self._lane.stats.timeouts += 1
        self._over()

    def _over(self) -> None:
        with self._lane._lock:
            self._lane._probe = None


class _Put(Job):
    def __init__(
        self,
        lane: Lane,
        name: ObjectName,
        data: memoryview,
        worth: Worth,
        expires: float | None,
        ended: Ended,
    ) -> None:
        self.what = f"put {name}"
        self.patience_s = lane._settings.write_deadline_s
        self._lane = lane
        self._name = name
        self._data = data
        self._worth = worth
        self._expires = expires
        self._ended = ended
        self._stored = False
        self._seconds = 0.0

    def work(self) -> None:
        if not self._lane._wanted(self._name):
            return
        if self._expires is not None and self._expires <= self._lane._wall():
            return
        started = time.perf_counter()
        self._lane.tier.put(self._name, self._data, self._worth)
        if self._expires is not None:
            self._lane.tier.expire(self._name, self._expires)
        self._seconds = time.perf_counter() - started
        self._stored = True

    def done(self) -> None:
        with self._lane._lock:
            if self._stored:
                stats = self._lane.stats
                stats.stored += 1
                stats.written_bytes += self._data.nbytes
                _keep(stats.write_seconds, self._seconds)
            self._lane._over(self._name, stored=self._stored)
            self._end("" if self._stored else "it was deleted or has expired")

    def failed(self, error: Exception) -> None:
        with self._lane._lock:
            if isinstance(error, TierFull):
                self._lane.stats.refused += 1
            else:
                self._lane.stats.errors += 1
            self._lane._over(self._name, stored=False)
            self._end(f"{type(error).__name__}: {error}")

    def dropped(self) -> None:
        self._lane.stats.refused += 1
        self._lane._over(self._name, stored=False)
        self._end("the tier is bypassed")

    def timed_out(self) -> None:
        self._lane.stats.timeouts += 1
        self._end(f"writing took longer than {self.patience_s:.3g} s")

    def late(self) -> None:
        self._lane._late_put(self._name)

    def _end(self, fault: str) -> None:
        self._ended(fault)
        self._lane._refresh_soon()


class _Control(Job):
    """Delete, pin, unpin, expire, clear: kept while the tier is bypassed, tried again when it fails."""

    def __init__(
        self,
        lane: Lane,
        what: str,
        call: Callable[[], object],
        name: ObjectName | None,
        clears: bool,
        again: bool,
    ) -> None:
        self.what = what
        self.patience_s = lane._settings.write_deadline_s
        self.tries = _CONTROL_TRIES
        self.again_after_timeout = again
        self.name = name
        self.clears = clears
        self._lane = lane
        self._call = call

    def work(self) -> None:
        self._call()

    def done(self) -> None:
        self._lane._control_over(self)

    def failed(self, error: Exception) -> None:
        with self._lane._lock:
            self._lane.stats.errors += 1
        self._lane._gave_up(self, f"{type(error).__name__}: {error}")

    def dropped(self) -> None:
        self._lane._gave_up(self, "the tier is closed")

    def timed_out(self) -> None:
        self._lane.stats.timeouts += 1
        self._lane._gave_up(self, f"took longer than {self.patience_s:.3g} s")


class _Levels(Job):
    """Looks how full the tier is."""

    def __init__(self, lane: Lane) -> None:
        self.what = "look how full it is"
        self.patience_s = lane._settings.write_deadline_s
        self._lane = lane
        self._used: tuple[int, int | None] = (0, None)
        self._objects = 0
        self._counts: Counts | None = None

    def work(self) -> None:
        tier = self._lane.tier
        self._used = tier.used()
        self._objects = sum(1 for _ in tier.held() or ()) if self._lane._tells else 0
        self._counts = tier.counts if isinstance(tier, Counting) else None

    def done(self) -> None:
        with self._lane._lock:
            stats = self._lane.stats
            stats.bytes_used, stats.bytes_budget = self._used[0], self._used[1] or 0
            stats.objects = self._objects
            if self._counts is not None:
                stats.evictions, stats.expired = self._counts.evicted, self._counts.expired
            self._lane._levels_at = self._lane._clock()
            self._over()

    def failed(self, error: Exception) -> None:
        with self._lane._lock:
            self._lane.stats.errors += 1
            self._over()

    def dropped(self) -> None:
        self._over()

    def timed_out(self) -> None:
        self._lane.stats.timeouts += 1
        self._over()

    def _over(self) -> None:
        self._lane._levels = None


def _keep(latencies: list[float], seconds: float) -> None:
    if len(latencies) < _LATENCIES_KEPT:
        latencies.append(seconds)
