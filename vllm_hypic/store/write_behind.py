"""Objects on their way into the tiers: a bounded number of bytes, written behind the caller's back."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial

from .crew import Clock, Crew, Job
from .health import Health
from .lane import Ended, Lane
from .protocol import Reservation
from .settings import StoreSettings
from .worth import ObjectName, Worth

logger = logging.getLogger("vllm.hypic.store")

Finish = Callable[[memoryview], None]


class Writing:
    """An object that was committed and is not yet in every tier; a source of fetches meanwhile."""

    name = "queue"

    def __init__(self, owner: WriteBehind, reservation: Reservation, expires: float | None) -> None:
        self.object = reservation.name
        self.worth = reservation.worth
        self.expires = expires
        self.finished = False
        self.withdrawn = False
        self.waiting: list[_Serve] = []
        self.ended_in: set[str] = set()
        """Lanes in which writing it is over."""
        self.followers: list[tuple[str, Ended]] = []
        """Who wants to know how that ends in a lane."""
        self._owner = owner
        self._buffer = reservation.buffer
        self.data = reservation.buffer.toreadonly()

    def finish(self, finish: Finish) -> None:
        finish(self._buffer)

    def ask(
        self,
        name: ObjectName,
        limit: int,
        patience_s: float,
        fetched: Callable[[memoryview | None], None],
        lost: Callable[[], None],
    ) -> Callable[[], None] | None:
        return self._owner.serve(_Serve(self, fetched, lost))

    def hit(self) -> None:
        pass

    def missed(self) -> None:
        pass

    def damaged(self, name: ObjectName) -> None:
        self._owner.withdraw(name)
        self._owner.delete_written(name)


class WriteBehind:
    """Room, finishing and handing over to the lanes.  No method waits; the store's lock guards all state."""

    def __init__(
        self,
        lanes: Sequence[Lane],
        settings: StoreSettings,
        lock: threading.RLock,
        *,
        clock: Clock = time.monotonic,
    ) -> None:
        self.dropped = 0
        self.nbytes = 0
        """Reserved, committed, promoted."""
        self.queued = 0
        """Committed."""
        self._lanes = lanes
        self._settings = settings
        self._lock = lock
        self._reserved: dict[int, Reservation] = {}
        self._writing: dict[ObjectName, Writing] = {}
        self._under_way = 0
        self._closing = False
        self.finisher = Crew("queue (finish)", 1, lock, Health(), clock=clock)
        self.server = Crew("queue (reads)", 1, lock, Health(), clock=clock)

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

    def reserve(self, name: ObjectName, worth: Worth) -> Reservation | None:
        if worth.nbytes < 1:
            raise ValueError(f"nbytes={worth.nbytes} of {name}: expected an integer >= 1")
        with self._lock:
            if self._closing or self.nbytes + worth.nbytes > self._settings.queue_bytes:
                self.dropped += 1
                return None
            self.nbytes += worth.nbytes
        try:
            buffer = self._settings.allocate(worth.nbytes)
        except MemoryError:
            with self._lock:
                self.nbytes -= worth.nbytes
                self.dropped += 1
            return None
        reservation = Reservation(name, buffer, worth)
        with self._lock:
            self._reserved[id(reservation)] = reservation
        return reservation

    def commit(self, reservation: Reservation, finish: Finish | None, expires: float | None) -> bool:
        """Whether the object is new."""
        name = reservation.name
        lanes = [lane for lane in self._lanes if lane.opened]
        held = bool(lanes) and all(lane.holds(name) for lane in lanes)
        with self._lock:
            self._forget(reservation)
            if held or name in self._writing or self._closing:
                self.nbytes -= reservation.worth.nbytes
                return False
            writing = Writing(self, reservation, expires)
            self._writing[name] = writing
            self._under_way += 1
            self.queued += reservation.worth.nbytes
            if not self.finisher.submit(_Finish(self, writing, finish)):
                self.finish_failed(writing)
            return True

    def abort(self, reservation: Reservation) -> None:
        with self._lock:
            self._forget(reservation)
            self.nbytes -= reservation.worth.nbytes

    def _forget(self, reservation: Reservation) -> None:
        if self._reserved.pop(id(reservation), None) is None:
            raise ValueError(
                f"{reservation.name}: not a reservation of this store, or committed or aborted before"
            )

    def find(self, name: ObjectName) -> Writing | None:
        with self._lock:
            return self._writing.get(name)

    def follow(self, name: ObjectName, lane: str, ended: Ended) -> bool:
        """Have ``ended`` told how the present writing of the object to ``lane`` ends.  False: it is not being
        written there."""
        with self._lock:
            writing = self._writing.get(name)
            if writing is None or lane in writing.ended_in:
                return False
            writing.followers.append((lane, ended))
            return True

    def withdraw(self, name: ObjectName) -> None:
        """What has not reached a lane never will."""
        with self._lock:
            writing = self._writing.pop(name, None)
            if writing is not None:
                writing.withdrawn = True
                self._turn_away(writing)

    def delete_written(self, name: ObjectName) -> None:
        """Where it has reached a tier, or is about to."""
        for lane in self._lanes:
            lane.delete(name)

    def withdraw_all(self) -> None:
        with self._lock:
            for name in list(self._writing):
                self.withdraw(name)

    def set_expiry(self, name: ObjectName, at: float | None) -> None:
        with self._lock:
            if writing := self._writing.get(name):
                writing.expires = at

    def promote(
        self, name: ObjectName, data: memoryview, worth: Worth, expires: float | None, lanes: Sequence[Lane]
    ) -> None:
        """Put an object that was fetched into ``lanes`` too, if there is room to keep it meanwhile."""
        with self._lock:
            if self._closing or not lanes or self.nbytes + data.nbytes > self._settings.queue_bytes:
                return
            self.nbytes += data.nbytes
            self._under_way += 1
            self._hand_over(name, data, worth, expires, lanes, lambda: self._written(data.nbytes))

    # -- behind the caller's back

    def finished(self, writing: Writing) -> None:
        lanes = [lane for lane in self._lanes if not lane.holds(writing.object)]
        with self._lock:
            writing.finished = True
            if writing.withdrawn:
                self._left_queue(writing)
                return
            for serve in writing.waiting:
                self._serve_now(serve)
            writing.waiting = []
            for lane in self._lanes:
                if lane not in lanes:
                    self._ended_in(writing, lane.name, "")
            self._hand_over(
                writing.object,
                writing.data,
                writing.worth,
                writing.expires,
                lanes,
                lambda: self._left_queue(writing),
                lambda lane, fault: self._ended_in(writing, lane, fault),
            )

    def finish_failed(self, writing: Writing) -> None:
        with self._lock:
            self._turn_away(writing)
            self._left_queue(writing)

    def _hand_over(
        self,
        name: ObjectName,
        data: memoryview,
        worth: Worth,
        expires: float | None,
        lanes: Sequence[Lane],
        ended: Callable[[], None],
        ended_in: Callable[[str, str], None] = lambda lane, fault: None,
    ) -> None:
        """``ended_in`` runs for each lane, with its name and why it does not have the object; ``ended``
        afterwards."""
        left = len(lanes) + 1

        def one_ended(lane: str, fault: str) -> None:
            nonlocal left
            with self._lock:
                if lane:
                    ended_in(lane, fault)
                left -= 1
                if not left:
                    ended()

        for lane in lanes:
            lane.put(name, data, worth, expires, partial(one_ended, lane.name))
        one_ended("", "")

    def _ended_in(self, writing: Writing, lane: str, fault: str) -> None:
        """Lock held."""
        writing.ended_in.add(lane)
        told = [ended for name, ended in writing.followers if name == lane]
        writing.followers = [(name, ended) for name, ended in writing.followers if name != lane]
        for ended in told:
            ended(fault)

    def _left_queue(self, writing: Writing) -> None:
        if self._writing.get(writing.object) is writing:
            del self._writing[writing.object]
        self.queued -= writing.worth.nbytes
        self._written(writing.worth.nbytes)

    def _written(self, nbytes: int) -> None:
        self.nbytes -= nbytes
        self._under_way -= 1

    # -- reading what is queued

    def serve(self, serve: _Serve) -> Callable[[], None] | None:
        with self._lock:
            writing = serve.writing
            if writing.withdrawn:
                return None
            if not writing.finished:
                writing.waiting.append(serve)
                return lambda: self._call_off(serve)
            return self._serve_now(serve)

    def _serve_now(self, serve: _Serve) -> Callable[[], None] | None:
        if not self.server.submit(serve):
            return None
        return lambda: self._call_off(serve)

    def _call_off(self, serve: _Serve) -> None:
        with self._lock:
            if serve in serve.writing.waiting:
                serve.writing.waiting.remove(serve)
            else:
                self.server.cancel(serve)

    def _turn_away(self, writing: Writing) -> None:
        waiting, writing.waiting = writing.waiting, []
        for serve in waiting:
            serve.lost()
        followers, writing.followers = writing.followers, []
        for _, ended in followers:
            ended("it was deleted, or could not be finished")


class _Finish(Job):
    """Local work, which is not watched."""

    patience_s = math.inf

    def __init__(self, owner: WriteBehind, writing: Writing, finish: Finish | None) -> None:
        self.what = f"finish {writing.object}"
        self._owner = owner
        self._writing = writing
        self._finish = finish

    def work(self) -> None:
        pass

    def done(self) -> None:
        if not self._writing.withdrawn and self._finish is not None:
            try:
                self._writing.finish(self._finish)
            except Exception:
                logger.exception("%s: dropped, it could not be finished", self._writing.object)
                self._owner.finish_failed(self._writing)
                return
        self._owner.finished(self._writing)

    def dropped(self) -> None:
        self._owner.finish_failed(self._writing)


class _Serve(Job):
    """Gives a queued object to a reader."""

    patience_s = math.inf

    def __init__(
        self, writing: Writing, fetched: Callable[[memoryview | None], None], lost: Callable[[], None]
    ) -> None:
        self.what = f"read {writing.object}"
        self.writing = writing
        self.lost = lost
        self._fetched = fetched

    def work(self) -> None:
        pass

    def done(self) -> None:
        self._fetched(self.writing.data)

    def dropped(self) -> None:
        self.lost()
