"""Objects on their way into the tiers: a bounded number of bytes, written behind the caller's back."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial

from .async_tier import Aside, AsyncTier, TimeOver
from .cache_value import CacheValue, ObjectName
from .circuit_breaker import CircuitBreaker
from .executor import Clock, IoTask, WatchdogExecutor
from .protocol import Reservation, TierStats
from .settings import StoreSettings
from .tasks import Future, Task, Unavailable

logger = logging.getLogger("vllm.hypic.store")

Finish = Callable[[memoryview], None]


class Writing:
    """An object that was committed and is not yet in every tier; a source of fetches meanwhile."""

    name = "queue"

    def __init__(self, owner: WriteBehind, reservation: Reservation, expires: float | None) -> None:
        self.object = reservation.name
        self.value = reservation.value
        self.expires = expires
        self.buffer = reservation.buffer
        self.data = reservation.buffer.toreadonly()
        self.finished: Future[None] = Future()
        """Fails when the object is deleted before, or cannot be finished."""
        self.withdrawn = False
        self.ended: dict[str, Future[str]] = {tier.name: Future() for tier in owner.tiers}
        """By tier: why it has not got the object, or nothing."""
        self.stats = TierStats()
        """Nobody asks for these."""
        self._owner = owner

    async def get(self, name: ObjectName, limit: int, patience_s: float) -> tuple[memoryview | None, Aside]:
        """As :meth:`AsyncTier.get`, once the object is finished."""
        if self.withdrawn:
            raise Unavailable("it was deleted")
        await self.finished
        io = IoTask(f"read {name}", lambda: self.data)
        try:
            return await self._owner.server.submit(io), io.follow
        except TimeOver:
            self._owner.server.withdraw(io)
            raise

    def discard(self, name: ObjectName) -> None:
        """Nor shall it stay where it has reached a tier, or is about to."""
        self._owner.withdraw(name)
        for tier in self._owner.tiers:
            tier.delete(name)

    def turn_away(self) -> None:
        """Tell those who wait that they do so in vain."""
        fault = "it was deleted, or could not be finished"
        self.finished.fail(Unavailable(fault))
        for ended in self.ended.values():
            ended.set(fault)


class WriteBehind:
    """Room, finishing and writing to the tiers.  No method waits; the store's lock guards all state."""

    def __init__(
        self,
        tiers: Sequence[AsyncTier],
        settings: StoreSettings,
        lock: threading.RLock,
        *,
        clock: Clock = time.monotonic,
    ) -> None:
        self.tiers = tiers
        self.dropped = 0
        self.nbytes = 0
        """Reserved, committed, promoted."""
        self.queued = 0
        """Committed."""
        self._settings = settings
        self._lock = lock
        self._reserved: dict[int, Reservation] = {}
        self._writing: dict[ObjectName, Writing] = {}
        self._under_way = 0
        self._closing = False
        # Their work is local: it is not watched, and does not fail.
        self.finisher = WatchdogExecutor("queue (finish)", 1, lock, CircuitBreaker(), clock=clock)
        self.server = WatchdogExecutor("queue (reads)", 1, lock, CircuitBreaker(), clock=clock)

    def start(self) -> None:
        self.finisher.start()
        self.server.start()

    def stop(self) -> None:
        """Drop what is not finished."""
        with self._lock:
            self._closing = True
            self.finisher.stop()
            self.server.stop()

    def idle(self) -> bool:
        with self._lock:
            return not self._under_way and self.server.idle()

    # -- the caller's

    def reserve(self, name: ObjectName, value: CacheValue) -> Reservation | None:
        if value.nbytes < 1:
            raise ValueError(f"nbytes={value.nbytes} of {name}: expected an integer >= 1")
        with self._lock:
            if self._closing or not self._has_room(value.nbytes):
                self.dropped += 1
                return None
            self.nbytes += value.nbytes
        try:
            buffer = self._settings.allocate(value.nbytes)
        except MemoryError:
            with self._lock:
                self.nbytes -= value.nbytes
                self.dropped += 1
            return None
        reservation = Reservation(name, buffer, value)
        with self._lock:
            self._reserved[id(reservation)] = reservation
        return reservation

    def commit(self, reservation: Reservation, finish: Finish | None, expires: float | None) -> bool:
        """Whether the object is new."""
        name = reservation.name
        opened = [tier for tier in self.tiers if tier.opened]
        held = bool(opened) and all(tier.holds(name) for tier in opened)
        with self._lock:
            self._forget(reservation)
            if held or name in self._writing or self._closing:
                self.nbytes -= reservation.value.nbytes
                return False
            writing = Writing(self, reservation, expires)
            self._writing[name] = writing
            self._under_way += 1
            self.queued += reservation.value.nbytes
            Task(self._write(writing, finish))
            return True

    def abort(self, reservation: Reservation) -> None:
        with self._lock:
            self._forget(reservation)
            self.nbytes -= reservation.value.nbytes

    def find(self, name: ObjectName) -> Writing | None:
        with self._lock:
            return self._writing.get(name)

    def withdraw(self, name: ObjectName) -> None:
        """What has not reached a tier never will."""
        with self._lock:
            writing = self._writing.pop(name, None)
            if writing is not None:
                writing.withdrawn = True
                writing.turn_away()

    def withdraw_all(self) -> None:
        with self._lock:
            for name in list(self._writing):
                self.withdraw(name)

    def set_expiry(self, name: ObjectName, at: float | None) -> None:
        with self._lock:
            if writing := self._writing.get(name):
                writing.expires = at

    def promote(
        self,
        name: ObjectName,
        data: memoryview,
        value: CacheValue,
        expires: float | None,
        tiers: Sequence[AsyncTier],
    ) -> None:
        """Put an object that was fetched into ``tiers`` too, if there is room to keep it meanwhile."""
        with self._lock:
            if tiers and not self._closing and self._has_room(data.nbytes):
                self.nbytes += data.nbytes
                self._under_way += 1
                Task(self._promote(name, data, value, expires, tiers))

    # -- behind the caller's back

    async def _write(self, writing: Writing, finish: Finish | None) -> None:
        missing: list[AsyncTier] | None = None
        with suppress(Unavailable):  # dropped, as the store closes
            call = partial(self._finish, writing, finish)
            missing = await self.finisher.submit(IoTask(f"finish {writing.object}", call))
        if missing is None:
            writing.turn_away()
        elif not writing.withdrawn:
            writing.finished.set(None)
            for tier in self.tiers:
                if tier not in missing:
                    writing.ended[tier.name].set("")
            for put in [Task(self._put(writing, tier)) for tier in missing]:
                await put
        if self._writing.get(writing.object) is writing:
            del self._writing[writing.object]
        self.queued -= writing.value.nbytes
        self._written(writing.value.nbytes)

    def _finish(self, writing: Writing, finish: Finish | None) -> list[AsyncTier] | None:
        """On the finisher's thread.  Tiers that have not got the object; ``None``: it cannot be finished."""
        if finish is not None and not writing.withdrawn:
            try:
                finish(writing.buffer)
            except Exception:
                logger.exception("%s: dropped, it could not be finished", writing.object)
                return None
        return [tier for tier in self.tiers if not tier.holds(writing.object)]

    async def _put(self, writing: Writing, tier: AsyncTier) -> None:
        fault = await tier.put(writing.object, writing.data, writing.value, writing.expires)
        writing.ended[tier.name].set(fault)

    async def _promote(
        self,
        name: ObjectName,
        data: memoryview,
        value: CacheValue,
        expires: float | None,
        tiers: Sequence[AsyncTier],
    ) -> None:
        for put in [tier.put(name, data, value, expires) for tier in tiers]:
            await put
        self._written(data.nbytes)

    def _has_room(self, nbytes: int) -> bool:
        return self.nbytes + nbytes <= self._settings.queue_bytes

    def _forget(self, reservation: Reservation) -> None:
        if self._reserved.pop(id(reservation), None) is None:
            raise ValueError(
                f"{reservation.name}: not a reservation of this store, or committed or aborted before"
            )

    def _written(self, nbytes: int) -> None:
        self.nbytes -= nbytes
        self._under_way -= 1
