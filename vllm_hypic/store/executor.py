"""Threads for a tier's blocking calls, and replacements for threads whose call does not return."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any, TypeVar

from .circuit_breaker import CircuitBreaker
from .settings import StoreSettings
from .tasks import Future, Unavailable
from .tiers.base import TierFull

logger = logging.getLogger("vllm.hypic.store")

T = TypeVar("T")
S = TypeVar("S")

Clock = Callable[[], float]
"""Returns the seconds of a monotonic clock; arguments named ``wall`` return Unix time."""

MOST_QUEUED = 65536


class Dropped(Unavailable):
    """The call never starts: its tier is bypassed, the queue is full, or the executor stopped."""


class TimedOut(Unavailable):
    """The executor gave the call up.  The call may still run: ``returned`` ends when the call returns."""

    def __init__(self, reason: str, returned: Future[None]) -> None:
        super().__init__(reason)
        self.returned = returned


class Failed(Unavailable):
    """The call raised an exception."""


class Refused(Failed):
    """The call raised :class:`TierFull`: the tier works, and refuses the object."""


class IoTask(Future[T]):
    """One blocking call: ends with its result, or with :class:`Dropped`, :class:`TimedOut` or
    :class:`Failed`.  ``what`` names the call in the log.  ``patience_s``: the most seconds that the call may
    run.  A task that ``stays`` waits while its tier is bypassed.  The executor gives up a task that has not
    begun at ``until``."""

    def __init__(
        self,
        what: str,
        call: Callable[[], T],
        patience_s: float = math.inf,
        *,
        stays: bool = False,
        until: float = math.inf,
    ) -> None:
        super().__init__()
        self.what, self.call, self.patience_s, self.stays, self.until = what, call, patience_s, stays, until
        self.started = self.seconds = 0.0
        """The start of the call on the executor's clock, and the duration of the call in seconds."""
        self.watched = True
        self.returned: Future[None] | None = None
        self.next: tuple[Callable[[], Any], Future[Any]] | None = None

    def follow(self, call: Callable[[], S]) -> Future[S]:
        """Let the task's thread run ``call`` next, unwatched and unlocked; return the future of its result.

        Only the coroutine that has just received the task's value may call this, before it waits again.
        """
        ended: Future[S] = Future()
        self.next = call, ended
        return ended


class WatchdogExecutor:
    """``size`` daemon threads with one queue, first in, first out.

    The executor abandons and replaces a thread whose call exceeds its patience.  When ``most_hung`` threads
    hang, the executor replaces none and starts nothing until one returns.  The breaker decides whether a call
    may start.

    ``lock`` is the owner's lock.  Calls run without it.  Callers hold it for all methods but :meth:`run_one`,
    :meth:`idle` and :meth:`expire`, which take it.  Without :meth:`start`, :meth:`run_one` does the threads'
    work.
    """

    def __init__(
        self,
        name: str,
        size: int,
        lock: threading.RLock,
        settings: StoreSettings,
        clock: Clock,
    ) -> None:
        self.name, self._size, self._lock, self._clock = name, size, lock, clock
        self.breaker = CircuitBreaker(settings.back_off_s, settings.most_back_off_s)
        self._most_hung = settings.most_hung
        self._wake = threading.Condition(lock)
        self._queue: deque[IoTask[Any]] = deque()
        self._running: list[IoTask[Any]] = []
        self._working = self._hung = 0
        """The number of threads that work or wait, and the number of abandoned threads."""
        self._started = self._stopped = False

    def start(self) -> None:
        """Start the threads; tasks already in the queue run now."""
        self._started = True
        self._recruit()

    def stop(self) -> None:
        """Drop queued tasks; each thread ends when its call returns."""
        self._stopped = True
        self._drop("the tier is closed", lambda task: True)
        self._wake.notify_all()

    @property
    def up(self) -> bool:
        """Whether calls are not bypassed: the breaker is closed, and not too many threads hang."""
        return self.breaker.closed and self._hung < self._most_hung

    def accepts(self) -> bool:
        """Return whether the queue has room, and a new task would wait for no back-off."""
        room = not self._stopped and len(self._queue) < MOST_QUEUED
        return room and self._hung < self._most_hung and self.breaker.allows(self._clock())

    def submit(self, task: IoTask[T], *, first: bool = False) -> IoTask[T]:
        """Queue ``task`` (``first``: at the head); without room, the task ends with :class:`Dropped`."""
        if self._stopped:
            task.fail(Dropped("the tier is closed"))
        elif len(self._queue) >= MOST_QUEUED:
            task.fail(Dropped("the queue is full"))
        else:
            (self._queue.appendleft if first else self._queue.append)(task)
            self._wake.notify()
        return task

    def withdraw(self, task: IoTask[Any]) -> None:
        """Give up ``task`` if it still waits in the queue."""
        if not task.done and task in self._queue:
            self._queue.remove(task)
            task.fail(TimedOut("the call did not start in time", Future()))

    def idle(self) -> bool:
        """Return whether the queue is empty and no call runs, except for calls that were given up."""
        with self._lock:
            return not self._queue and not self._running

    def backlog(self) -> int:
        """Return the number of tasks in the queue."""
        return len(self._queue)

    def expire(self, now: float) -> None:
        """Give up, at ``now``, calls that exceed their patience and queued tasks past their ``until``."""
        with self._lock:
            for task in [task for task in self._queue if now >= task.until]:
                self.withdraw(task)
            for task in list(self._running):
                if task.watched and now - task.started >= task.patience_s:
                    self._running.remove(task)
                    self._hung += 1
                    self._working -= 1
                    reason = f"the call took longer than {task.patience_s:.3g} s"
                    self._failed(task, f"{task.what}: {reason}")
                    task.returned = Future()
                    task.fail(TimedOut(reason, task.returned))
                    self._recruit()

    def run_one(self) -> bool:
        """Run the next call on the caller's thread; return False if no call may start now."""
        with self._lock:
            task = self._take()
            if task is None:
                return False
            self._working += 1
        if self._perform(task):
            with self._lock:
                self._working -= 1
        return True

    # -- the threads

    def _recruit(self) -> None:
        while (
            self._started
            and not self._stopped
            and self._working < self._size
            and self._hung < self._most_hung
        ):
            self._working += 1
            threading.Thread(target=self._work, name=f"hypic-{self.name}", daemon=True).start()

    def _work(self) -> None:
        while True:
            with self._lock:
                while (task := self._take()) is None:
                    if self._stopped:
                        self._working -= 1
                        return
                    self._wake.wait(self._until_probe())
            if not self._perform(task):
                return
            del task  # the task holds the object's bytes

    def _until_probe(self) -> float | None:
        """Return the seconds until a queued task's back-off ends; ``None``: time alone starts no task."""
        if not self._queue or self.breaker.closed:
            return None
        wait = self.breaker.retry_at - self._clock()
        return wait if wait > 0 else None

    def _take(self) -> IoTask[Any] | None:
        now = self._clock()
        if not self._queue or self._hung >= self._most_hung or not self.breaker.allows(now):
            return None
        self.breaker.starts()
        task = self._queue.popleft()
        task.started = now
        self._running.append(task)
        return task

    def _perform(self, task: IoTask[Any]) -> bool:
        """Run the call and end its task; return whether this thread goes on."""
        began = time.perf_counter()
        value, error = _attempt(task.call)
        task.seconds = time.perf_counter() - began
        with self._lock:
            if task.returned is not None:
                return self._came_back(task.returned)
            task.watched = False  # the next calls are not the tier's; idle() still waits for them
            reason = f"{type(error).__name__}: {error}"
            well = error is None or isinstance(error, TierFull)
            if not well:
                self._failed(task, f"{task.what}: {reason}")
            elif self.breaker.succeeded(self._clock()):
                logger.info("tier %s: works again", self.name)
                self._wake.notify_all()
            if error is None:
                task.set(value)
            else:
                task.fail(Refused(reason) if well else Failed(reason))
        del value, error
        while task.next is not None:
            (call, ended), task.next = task.next, None
            value, error = _attempt(call)
            with self._lock:
                ended.set(value) if error is None else ended.fail(error)
        with self._lock:
            self._running.remove(task)
        return True

    def _came_back(self, returned: Future[None]) -> bool:
        """Note that an abandoned thread returns; return whether it goes on, because none replaced it."""
        self._hung -= 1
        returned.set(None)
        self._wake.notify_all()
        if self._started and not self._stopped and self._working < self._size:
            self._working += 1
            return True
        return False

    def _failed(self, task: IoTask[Any], reason: str) -> None:
        """Report a failure to the breaker; drop the tasks that do not stay if the tier is now bypassed."""
        now = self._clock()
        if self.breaker.failed(now, task.started):
            wait = self.breaker.retry_at - now
            logger.warning("tier %s: bypassed, next try in %.3g s: %s", self.name, wait, reason)
        if not self.breaker.closed:
            self._drop("the tier is bypassed", lambda task: not task.stays)
        self._wake.notify_all()

    def _drop(self, reason: str, which: Callable[[IoTask[Any]], bool]) -> None:
        dropped = [task for task in self._queue if which(task)]
        self._queue = deque(task for task in self._queue if not which(task))
        for task in dropped:
            task.fail(Dropped(reason))


def _attempt(call: Callable[[], T]) -> tuple[T | None, Exception | None]:
    try:
        return call(), None
    except Exception as e:
        return None, e
