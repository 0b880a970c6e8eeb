"""Threads for a tier's blocking operations, and what happens when one of them does not come back."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any, TypeVar

from .circuit_breaker import CircuitBreaker
from .tasks import Future, Unavailable
from .tiers.base import TierFull

logger = logging.getLogger("vllm.hypic.store")

T = TypeVar("T")
S = TypeVar("S")

Clock = Callable[[], float]
"""Monotonic seconds."""


class Dropped(Unavailable):
    """The operation never ran to its end, and will not: its tier is bypassed, or the executor stopped."""


class TimedOut(Unavailable):
    """The operation was given up.  It may still be running: ``returned`` ends when it comes back."""

    def __init__(self, reason: str, returned: Future[None]) -> None:
        super().__init__(reason)
        self.returned = returned


class Failed(Unavailable):
    """The operation raised ``error``, for the last time."""

    def __init__(self, error: Exception) -> None:
        super().__init__(f"{type(error).__name__}: {error}")
        self.error = error.with_traceback(None)  # whose frames hold the object


class IoTask(Future[T]):
    """One operation: what ``call`` returns, or :class:`Dropped`, :class:`TimedOut` or :class:`Failed`.

    ``call`` runs on a thread of the executor and may block.  ``what`` names it in the log.  One that may be
    tried again when it failed (``tries`` > 1; ``again_after_timeout``: also when it hangs) keeps its place,
    and is not dropped while its tier is bypassed.
    """

    def __init__(
        self,
        what: str,
        call: Callable[[], T],
        patience_s: float = math.inf,
        *,
        tries: int = 1,
        again_after_timeout: bool = False,
    ) -> None:
        super().__init__()
        self.what = what
        self.call = call
        self.patience_s = patience_s
        self.tries = tries
        self.again_after_timeout = again_after_timeout
        self.next: tuple[Callable[[], Any], Future[Any]] | None = None

    def follow(self, call: Callable[[], S]) -> Future[S]:
        """Have the operation's thread, before it does anything else, run ``call``, which is not watched.

        For the task that was just brought the operation's value, before it waits for anything else.
        """
        ended: Future[S] = Future()
        self.next = call, ended
        return ended


class _Run:
    """One try of an operation."""

    def __init__(self, task: IoTask[Any], started: float) -> None:
        self.task = task
        self.started = started
        self.watched = True
        self.abandoned: Future[None] | None = None
        """Of one that was given up: ends when it comes back."""


class WatchdogExecutor:
    """``size`` daemon threads with one queue, first in, first out.

    A thread whose operation outlasts its patience is abandoned and replaced.  When ``most_hung`` of them
    hang, none is replaced and nothing starts until one returns.  The breaker decides whether an operation may
    start.  All state is guarded by ``lock``, which is shared with the owner; calls run outside of it.

    Without :meth:`start` there are no threads: then :meth:`run_one` does what they would do.
    """

    def __init__(
        self,
        name: str,
        size: int,
        lock: threading.RLock,
        breaker: CircuitBreaker,
        *,
        clock: Clock = time.monotonic,
        most_hung: int = 4,
        most_queued: int = 65536,
    ) -> None:
        self.name = name
        self.breaker = breaker
        self._size = size
        self._lock = lock
        self._wake = threading.Condition(lock)
        self._clock = clock
        self._most_hung = most_hung
        self._most_queued = most_queued
        self._queue: deque[IoTask[Any]] = deque()
        self._running: list[_Run] = []
        self._hung = 0
        self._working = 0
        self._started = False
        self._stopped = False

    # -- the owner's side

    def start(self) -> None:
        """Start the threads; what was queued before runs now."""
        with self._lock:
            self._started = True
            self._recruit()

    def accepts(self) -> bool:
        """Whether there is room, and a task submitted now would wait for no back-off.  Changes nothing."""
        with self._lock:
            room = not self._stopped and len(self._queue) < self._most_queued
            return room and self._hung < self._most_hung and self.breaker.allows(self._clock())

    @property
    def up(self) -> bool:
        with self._lock:
            return self.breaker.closed and self._hung < self._most_hung

    def submit(self, task: IoTask[T]) -> IoTask[T]:
        """Queue ``task``; one that cannot be queued is dropped at once."""
        with self._lock:
            if self._stopped:
                task.fail(Dropped("the tier is closed"))
            elif len(self._queue) >= self._most_queued:
                task.fail(Dropped("the queue is full"))
            else:
                self._queue.append(task)
                self._wake.notify()
            return task

    def withdraw(self, task: IoTask[Any]) -> bool:
        """Drop ``task`` if it still waits.  False: it does not."""
        with self._lock:
            if task not in self._queue:
                return False
            self._queue.remove(task)
            task.fail(Dropped("it was withdrawn"))
            return True

    def idle(self) -> bool:
        """Nothing queued, nothing running but what was given up."""
        with self._lock:
            return not self._queue and not self._running

    def backlog(self) -> int:
        """Number of tasks that wait."""
        with self._lock:
            return len(self._queue)

    def expire(self, now: float) -> None:
        """Give up what outlasted its patience at ``now``."""
        with self._lock:
            hanging = [r for r in self._running if r.watched and now - r.started >= r.task.patience_s]
            for run in hanging:
                returned: Future[None] = Future()
                run.abandoned = returned
                self._running.remove(run)
                self._hung += 1
                self._working -= 1
                task = run.task
                reason = f"took longer than {task.patience_s:.3g} s"
                self._fell(f"{task.what} {reason}", run.started)
                if not task.again_after_timeout or not self._try_again(task):
                    task.fail(TimedOut(reason, returned))
                self._recruit()

    def stop(self) -> None:
        """Drop what is queued; threads end when their operation does."""
        with self._lock:
            self._stopped = True
            queued, self._queue = self._queue, deque()
            for task in queued:
                task.fail(Dropped("the tier is closed"))
            self._wake.notify_all()

    # -- the threads' side

    def run_one(self) -> bool:
        """Run the next operation here, if one may start now."""
        with self._lock:
            run = self._take()
            if run is None:
                return False
            self._working += 1
        self._perform(run)
        with self._lock:
            if run.abandoned is None:
                self._working -= 1
        return True

    def _recruit(self) -> None:
        if not self._started or self._stopped:
            return
        while self._working < self._size and self._hung < self._most_hung:
            self._working += 1
            threading.Thread(target=self._work, name=f"hypic-{self.name}", daemon=True).start()

    def _work(self) -> None:
        while True:
            with self._lock:
                while (run := self._take()) is None:
                    if self._stopped:
                        self._working -= 1
                        return
                    self._wake.wait(self._until_probe())
            if not self._perform(run):
                return
            del run  # it holds the object

    def _until_probe(self) -> float | None:
        """Seconds until a queued task may start without anybody's doing."""
        if not self._queue or self.breaker.closed:
            return None
        wait = self.breaker.retry_at - self._clock()
        return wait if wait > 0 else None

    def _take(self) -> _Run | None:
        now = self._clock()
        if not self._queue or self._hung >= self._most_hung or not self.breaker.allows(now):
            return None
        self.breaker.starts()
        run = _Run(self._queue.popleft(), now)
        self._running.append(run)
        return run

    def _perform(self, run: _Run) -> bool:
        """Whether this thread should go on."""
        task, value, error = run.task, None, None
        try:
            value = task.call()
        except Exception as e:
            error = e
        with self._lock:
            if run.abandoned is not None:
                return self._came_back(run.abandoned)
            self._end(run, value, error)
        while task.next is not None:
            (call, ended), task.next = task.next, None
            self._follow(call, ended)
        with self._lock:
            self._running.remove(run)
        return True

    def _end(self, run: _Run, value: Any, error: Exception | None) -> None:
        task = run.task
        if error is None or isinstance(error, TierFull):
            if self.breaker.succeeded(self._clock()):
                logger.info("tier %s: works again", self.name)
                self._wake.notify_all()
        else:
            self._fell(f"{task.what}: {type(error).__name__}: {error}", run.started)
            if self._try_again(task):
                run.watched = False
                return
        run.watched = False  # what follows is not the tier's doing; idle() waits for it nevertheless
        if error is None:
            task.set(value)
        else:
            task.fail(Failed(error))

    def _follow(self, call: Callable[[], Any], ended: Future[Any]) -> None:
        try:
            value = call()
        except Exception as e:
            with self._lock:
                ended.fail(e)
        else:
            with self._lock:
                ended.set(value)

    def _try_again(self, task: IoTask[Any]) -> bool:
        if task.tries <= 1:
            return False
        task.tries -= 1
        self._queue.appendleft(task)
        self._wake.notify_all()
        return True

    def _came_back(self, returned: Future[None]) -> bool:
        """An abandoned thread came back: it goes on if it was not replaced."""
        self._hung -= 1
        returned.set(None)
        self._wake.notify_all()
        if self._started and not self._stopped and self._working < self._size:
            self._working += 1
            return True
        return False

    def _fell(self, reason: str, started: float) -> None:
        """An operation failed or hangs: if that leaves the tier bypassed, drop what is tried only once."""
        now = self._clock()
        if self.breaker.failed(now, started):
            wait = self.breaker.retry_at - now
            logger.warning("tier %s: bypassed, next try in %.3g s: %s", self.name, wait, reason)
        if not self.breaker.closed:
            queued, self._queue = self._queue, deque(t for t in self._queue if t.tries > 1)
            for task in queued:
                if task.tries <= 1:
                    task.fail(Dropped("the tier is bypassed"))
        self._wake.notify_all()
