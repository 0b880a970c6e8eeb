"""Objects on their way into the tiers: a bounded number of bytes, written behind the caller's back."""

from __future__ import annotations

import logging
import threading
from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import partial

from .async_tier import AsyncTier, Item
from .cache_value import CacheValue, ObjectName
from .executor import Clock, IoTask, WatchdogExecutor
from .protocol import Reservation, TierStats
from .settings import StoreSettings
from .tasks import Future, Task, Unavailable

logger = logging.getLogger("vllm.hypic.store")

Finish = Callable[[memoryview], None]


class Writing:
    """An object that was committed and is not yet in every tier; a source of fetches meanwhile."""

    name = "queue"
    stats = TierStats()
    """Counted like a tier's; nobody asks for these."""

    def __init__(
        self,
        owner: WriteBehind,
        reservation: Reservation,
        expires: float | None,
        rests_on: tuple[ObjectName, ...],
    ) -> None:
        self.object, self.value, self.buffer = reservation.name, reservation.value, reservation.buffer
        self.expires, self.rests_on = expires, rests_on
        self.withdrawn = False
        self.finished: Future[None] = Future()
        """Fails when the object is deleted before, or cannot be finished."""
        self.ended: defaultdict[str, Future[str]] = defaultdict(Future)
        """Ends, for each tier, with why that has not got the object, or with nothing."""
        self._owner = owner

    async def get(self, name: ObjectName, limit: int, patience_s: float) -> IoTask[memoryview | None]:
        """Read the object, like :meth:`AsyncTier.get`, once it is finished."""
        await self.finished
        io: IoTask[memoryview | None] = IoTask(f"read {name}", self.buffer.toreadonly)
        try:
            await self._owner.server.submit(io)
        except Unavailable:
            self._owner.server.withdraw(io)
            raise
        return io

    def delete(self, name: ObjectName) -> None:
        """Withdraw the object, and delete it where it has reached a tier, or is about to."""
        self._owner.withdraw(name)
        for tier in self._owner.tiers:
            tier.delete(name)

    def turn_away(self) -> None:
        """Tell those who wait that they do so in vain."""
        fault = "the record was deleted, or could not be completed"
        self.finished.fail(Unavailable(fault))
        for ended in list(self.ended.values()):
            ended.set(fault)


class WriteBehind:
    """Room, finishing and writing to the tiers.

    ``lock`` is the store's: all methods but :meth:`reserve` are called with it held.
    """

    def __init__(
        self,
        tiers: Sequence[AsyncTier],
        settings: StoreSettings,
        lock: threading.RLock,
        clock: Clock,
    ) -> None:
        self.tiers = tiers
        self.dropped = 0
        self.failed = 0
        """Objects that could not be finished."""
        self.nbytes = 0
        """Bytes that are reserved, committed or being promoted."""
        self.queued = 0
        """Bytes that are committed."""
        self._settings, self._lock = settings, lock
        self._reserved: dict[int, Reservation] = {}
        self._writing: dict[ObjectName, Writing] = {}
        self._under_way = 0
        self._closing = False
        # Their work is local: it is not watched, and does not fail.
        self.finisher = WatchdogExecutor("queue (finish)", 1, lock, settings, clock)
        self.server = WatchdogExecutor("queue (reads)", 1, lock, settings, clock)

    def start(self) -> None:
        self.finisher.start()
        self.server.start()

    def stop(self) -> None:
        """Drop what is not finished."""
        self._closing = True
        self.finisher.stop()
        self.server.stop()

    def unwritten(self) -> tuple[int, int]:
        """Objects that are not in all tiers yet, and their bytes."""
        return len(self._writing), self.queued

    def idle(self) -> bool:
        return not self._under_way and self.server.idle()

    # -- the caller's

    def reserve(self, name: ObjectName, value: CacheValue) -> Reservation | None:
        """See :meth:`.tiered.TieredStore.reserve`.  Allocates without the lock."""
        if value.nbytes < 1:
            raise ValueError(f"nbytes={value.nbytes} of {name}: expected an integer >= 1")
        with self._lock:
            if self._closing or not self._has_room(value.nbytes):
                self.dropped += 1
                return None
            self.nbytes += value.nbytes
        try:
            reservation = Reservation(name, self._settings.allocate(value.nbytes), value)
        except MemoryError:
            with self._lock:
                self.nbytes -= value.nbytes
                self.dropped += 1
            return None
        with self._lock:
            self._reserved[id(reservation)] = reservation
        return reservation

    def commit(
        self,
        reservation: Reservation,
        finish: Finish | None,
        expires: float | None,
        rests_on: tuple[ObjectName, ...],
    ) -> bool:
        """Whether the object is new."""
        name, nbytes = reservation.name, reservation.value.nbytes
        self.abort(reservation)
        opened = [tier for tier in self.tiers if tier.opened]
        held = bool(opened) and all(tier.holds(name) for tier in opened)
        if held or name in self._writing or self._closing:
            return False
        writing = self._writing[name] = Writing(self, reservation, expires, rests_on)
        self.nbytes += nbytes
        self.queued += nbytes
        self._under_way += 1
        Task(self._write(writing, finish))
        return True

    def abort(self, reservation: Reservation) -> None:
        if self._reserved.pop(id(reservation), None) is None:
            raise ValueError(
                f"{reservation.name}: not a reservation of this store, or committed or aborted before"
            )
        self.nbytes -= reservation.value.nbytes

    def find(self, name: ObjectName) -> Writing | None:
        return self._writing.get(name)

    def withdraw(self, name: ObjectName) -> None:
        """Turn the object away: where it has not reached a tier it never will."""
        writing = self._writing.pop(name, None)
        if writing is not None:
            writing.withdrawn = True
            writing.turn_away()

    def withdraw_all(self) -> None:
        for name in list(self._writing):
            self.withdraw(name)

    def promote(self, item: Item, tiers: Sequence[AsyncTier]) -> None:
        """Put an object that was fetched into ``tiers`` too, if there is room to keep it meanwhile."""
        if not self._closing and self._has_room(item.data.nbytes):
            self.nbytes += item.data.nbytes
            self._under_way += 1
            Task(self._promote(item.data.nbytes, [tier.put(item) for tier in tiers]))

    # -- behind the caller's back

    async def _write(self, writing: Writing, finish: Finish | None) -> None:
        """Finish the object, then put it into every tier that has not got it."""
        try:
            finished = await self.finisher.submit(
                IoTask(f"finish {writing.object}", partial(self._finish, writing, finish))
            )
        except Unavailable:
            finished = False  # dropped, as the store closes
        if not finished:
            writing.turn_away()
        elif not writing.withdrawn:
            writing.finished.set(None)
            missing = [tier for tier in self.tiers if not tier.holds(writing.object)]
            puts = [Task(self._put(writing, tier)) for tier in missing]
            for tier in self.tiers:
                if tier not in missing:
                    writing.ended[tier.name].set("")
            for put in puts:
                await put
        if self._writing.get(writing.object) is writing:
            del self._writing[writing.object]
        self.queued -= writing.value.nbytes
        self._left(writing.value.nbytes)

    def _finish(self, writing: Writing, finish: Finish | None) -> bool:
        """Run ``finish``, on the finisher's thread.  Whether it succeeded."""
        try:
            if finish is not None and not writing.withdrawn:
                finish(writing.buffer)
            return True
        except Exception:
            logger.exception("record %s could not be completed, and is dropped", writing.object)
            with self._lock:
                self.failed += 1
            return False

    async def _put(self, writing: Writing, tier: AsyncTier) -> None:
        data, rests_on = writing.buffer.toreadonly(), writing.rests_on
        item = Item(writing.object, data, writing.value, writing.expires, rests_on)
        writing.ended[tier.name].set(await tier.put(item))

    async def _promote(self, nbytes: int, puts: Sequence[Future[str]]) -> None:
        for put in puts:
            await put
        self._left(nbytes)

    def _has_room(self, nbytes: int) -> bool:
        return self.nbytes + nbytes <= self._settings.queue_bytes

    def _left(self, nbytes: int) -> None:
        self.nbytes -= nbytes
        self._under_way -= 1
