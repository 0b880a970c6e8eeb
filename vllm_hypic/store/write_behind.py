"""Objects on their way into the tiers: a bounded number of bytes, written in the background."""

from __future__ import annotations

import logging
import threading
from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import partial

from .async_tier import AsyncTier, Item
from .executor import Clock, IoTask, WatchdogExecutor
from .protocol import CacheValue, ObjectName, Reservation, TierStats
from .record import aligned_buffer
from .settings import StoreSettings
from .tasks import Future, Task, Unavailable

logger = logging.getLogger("vllm.hypic.store")

Finish = Callable[[memoryview], None]


class Writing:
    """A committed object that is not yet in every tier; fetches may read the object from here."""

    name = "queue"
    stats = TierStats()
    """Statistics in a tier's form, which no report includes."""

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
        """Ends when the object is complete; fails when it is deleted before or cannot be completed."""
        self.ended: defaultdict[str, Future[str]] = defaultdict(Future)
        """Ends, per tier, with an empty text, or with the reason why the tier does not have the object."""
        self._owner = owner

    async def get(self, name: ObjectName, limit: int, patience_s: float) -> IoTask[memoryview | None]:
        """Read the object once it is complete, like :meth:`AsyncTier.get`."""
        await self.finished
        io: IoTask[memoryview | None] = IoTask(f"read {name}", self.buffer.toreadonly)
        try:
            await self._owner.server.submit(io)
        except Unavailable:
            self._owner.server.withdraw(io)
            raise
        return io

    def delete(self, name: ObjectName) -> None:
        """Withdraw the object, and delete it from every tier that has it or has begun to write it."""
        self._owner.withdraw(name)
        for tier in self._owner.tiers:
            tier.delete(name)

    def turn_away(self) -> None:
        """Fail all tasks that wait for the object, which was deleted or cannot be completed."""
        fault = "the record was deleted, or could not be completed"
        self.finished.fail(Unavailable(fault))
        for ended in list(self.ended.values()):
            ended.set(fault)


class WriteBehind:
    """Reserves room for objects, completes them, and writes them to the tiers.

    ``lock`` is the store's lock: callers hold it for all methods but :meth:`reserve`.
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
        """The number of objects that could not be completed."""
        self.nbytes = 0
        """Bytes of the objects that are reserved, committed, or on their way to faster tiers."""
        self.queued = 0
        """Bytes of the committed objects."""
        self._settings, self._lock = settings, lock
        self._reserved: dict[int, Reservation] = {}
        self._writing: dict[ObjectName, Writing] = {}
        self._under_way = 0
        self._closing = False
        # Both executors work locally: their calls need no deadline, and do not fail.
        self.finisher = WatchdogExecutor("queue (finish)", 1, lock, settings, clock)
        self.server = WatchdogExecutor("queue (reads)", 1, lock, settings, clock)

    def start(self) -> None:
        self.finisher.start()
        self.server.start()

    def stop(self) -> None:
        """Drop the objects that are not complete."""
        self._closing = True
        self.finisher.stop()
        self.server.stop()

    def unwritten(self) -> tuple[int, int]:
        """Return the number of objects that are not in all tiers yet, and their bytes."""
        return len(self._writing), self.queued

    def idle(self) -> bool:
        return not self._under_way and self.server.idle()

    # -- calls of the store

    def reserve(self, name: ObjectName, value: CacheValue) -> Reservation | None:
        """Do what :meth:`.tiered.TieredStore.reserve` says.  The allocation runs without the lock."""
        if value.nbytes < 1:
            raise ValueError(f"nbytes={value.nbytes} of {name}: expected an integer >= 1")
        with self._lock:
            if self._closing or not self._has_room(value.nbytes):
                self.dropped += 1
                return None
            self.nbytes += value.nbytes
        try:
            reservation = Reservation(name, aligned_buffer(value.nbytes), value)
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
        """Start the write of the object; return whether the object is new."""
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
        """Turn the object away: tiers that do not have the object yet never get it."""
        writing = self._writing.pop(name, None)
        if writing is not None:
            writing.withdrawn = True
            writing.turn_away()

    def withdraw_all(self) -> None:
        for name in list(self._writing):
            self.withdraw(name)

    def promote(self, item: Item, tiers: Sequence[AsyncTier]) -> None:
        """Put a fetched object into ``tiers``, if the queue has room for its bytes meanwhile."""
        if not self._closing and self._has_room(item.data.nbytes):
            self.nbytes += item.data.nbytes
            self._under_way += 1
            Task(self._promote(item.data.nbytes, [tier.put(item) for tier in tiers]))

    # -- in the background

    async def _write(self, writing: Writing, finish: Finish | None) -> None:
        """Complete the object, then put it into every tier that does not hold it."""
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
        """Run ``finish`` on the finisher's thread; return whether it succeeds."""
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
        """Whether the queue takes the bytes.  An empty queue takes an object of any size."""
        return not self.nbytes or self.nbytes + nbytes <= self._settings.queue_bytes

    def _left(self, nbytes: int) -> None:
        self.nbytes -= nbytes
        self._under_way -= 1
