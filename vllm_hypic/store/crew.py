"""A few threads that work off a queue, and what happens when one of them does not come back."""

from __future__ import annotations

import logging
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from .health import Health
from .tiers.base import TierFull

logger = logging.getLogger("vllm.hypic.store")

Clock = Callable[[], float]
"""Monotonic seconds."""


class Job(ABC):
    """One operation.  ``work`` runs on a thread of the crew and may block.

    Exactly one of ``done``, ``failed``, ``dropped``, ``timed_out`` follows, and must not block.
    """

    what: str
    """For the log."""
    patience_s: float
    """``work`` that takes longer is given up."""
    tries: int = 1
    """A job that may be tried again when it failed keeps its place and is not dropped while its tier is
    bypassed."""
    again_after_timeout: bool = False

    @abstractmethod
    def work(self) -> None:
        """Raises what the tier raises."""

    def done(self) -> None:  # noqa: B027
        """``work`` returned in time."""

    def failed(self, error: Exception) -> None:  # noqa: B027
        """``work`` raised, for the last time."""

    def dropped(self) -> None:  # noqa: B027
        """``work`` never ran to its end, and will not: the tier is bypassed, or the crew stopped."""

    def timed_out(self) -> None:  # noqa: B027
        """``work`` was given up.  It may still be running."""

    def late(self) -> None:  # noqa: B027
        """``work`` came back after ``timed_out``, by returning or by raising."""


@dataclass(eq=False)
class _Running:
    job: Job
    started: float
    watched: bool = True
    abandoned: bool = False


class Crew:
    """``size`` daemon threads with one queue, first in, first out.

    A thread whose job outlasts its patience is abandoned and replaced.  When ``most_hung`` of them hang, none
    is replaced and nothing starts until one returns.  All state is guarded by ``lock``, which is shared with
    the owner; jobs' ``work`` runs outside of it.  Without :meth:`start` there are no threads: then
    :meth:`run_one` does what they would do.
    """

    def __init__(
        self,
        name: str,
        size: int,
        lock: threading.RLock,
        health: Health,
        *,
        clock: Clock = time.monotonic,
        most_hung: int = 4,
        most_queued: int = 65536,
    ) -> None:
        self.name = name
        self.health = health
        self._size = size
        self._lock = lock
        self._wake = threading.Condition(lock)
        self._clock = clock
        self._most_hung = most_hung
        self._most_queued = most_queued
        self._queue: deque[Job] = deque()
        self._running: list[_Running] = []
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
        """Whether an operation submitted now would start without waiting for a back-off.  Changes nothing."""
        with self._lock:
            return not self._stopped and self._hung < self._most_hung and self.health.allows(self._clock())

    @property
    def up(self) -> bool:
        with self._lock:
            return self.health.up and self._hung < self._most_hung

    def submit(self, job: Job) -> bool:
        """Queue ``job``.  False when the crew stopped or the queue is full: nothing of the job is called."""
        with self._lock:
            if self._stopped or len(self._queue) >= self._most_queued:
                return False
            self._queue.append(job)
            self._wake.notify()
            return True

    def cancel(self, job: Job) -> bool:
        """Take ``job`` out of the queue; nothing of it is called.  False when it is not there."""
        with self._lock:
            if job not in self._queue:
                return False
            self._queue.remove(job)
            return True

    def idle(self) -> bool:
        """Nothing queued, nothing running but what was given up."""
        with self._lock:
            return not self._queue and not self._running

    def backlog(self) -> int:
        """Jobs that wait."""
        with self._lock:
            return len(self._queue)

    def expire(self, now: float) -> None:
        """Give up what outlasted its patience at ``now``."""
        with self._lock:
            hanging = [r for r in self._running if r.watched and now - r.started >= r.job.patience_s]
            for running in hanging:
                running.abandoned = True
                self._running.remove(running)
                self._hung += 1
                self._working -= 1
                job = running.job
                self._fell(f"{job.what} took longer than {job.patience_s:.3g} s", running.started)
                if job.again_after_timeout and job.tries > 1:
                    job.tries -= 1
                    self._queue.appendleft(job)
                else:
                    job.timed_out()
                self._recruit()

    def stop(self) -> None:
        """Drop what is queued; threads end when their job does."""
        with self._lock:
            self._stopped = True
            queued, self._queue = self._queue, deque()
            for job in queued:
                job.dropped()
            self._wake.notify_all()

    def shed(self) -> None:
        """Drop the queued jobs that are tried once."""
        with self._lock:
            queued, self._queue = self._queue, deque()
            for job in queued:
                if job.tries > 1:
                    self._queue.append(job)
                else:
                    job.dropped()

    # -- the threads' side

    def run_one(self) -> bool:
        """Run the next job here, if one may start now."""
        with self._lock:
            running = self._take()
            if running is None:
                return False
            self._working += 1
        self._run(running)
        with self._lock:
            if not running.abandoned:
                self._working -= 1
        return True

    def _recruit(self) -> None:
        if not self._started or self._stopped:
            return
        while self._working < self._size and self._hung < self._most_hung:
            self._working += 1
            threading.Thread(target=self._loop, name=f"hypic-{self.name}", daemon=True).start()

    def _loop(self) -> None:
        while True:
            with self._lock:
                running = self._take()
                while running is None:
                    if self._stopped:
                        self._working -= 1
                        return
                    self._wake.wait(self._nap())
                    running = self._take()
            if not self._run(running):
                return

    def _nap(self) -> float | None:
        """Seconds until a queued job may start without anybody's doing."""
        if not self._queue or self.health.up:
            return None
        wait = self.health.retry_at - self._clock()
        return wait if wait > 0 else None

    def _take(self) -> _Running | None:
        now = self._clock()
        if not self._queue or self._hung >= self._most_hung or not self.health.allows(now):
            return None
        self.health.starts()
        running = _Running(self._queue.popleft(), now)
        self._running.append(running)
        return running

    def _run(self, running: _Running) -> bool:
        """Whether this thread should go on."""
        job, error = running.job, None
        try:
            job.work()
        except Exception as e:
            error = e
        with self._lock:
            if running.abandoned:
                return self._returned(job)
            if error is None or isinstance(error, TierFull):
                if self.health.succeeded(self._clock()):
                    logger.info("tier %s: works again", self.name)
                    self._wake.notify_all()
            else:
                self._fell(f"{job.what}: {type(error).__name__}: {error}", running.started)
                if job.tries > 1:
                    job.tries -= 1
                    self._running.remove(running)
                    self._queue.appendleft(job)
                    self._wake.notify_all()
                    return True
            # What follows is not the tier's doing; idle() waits for it nevertheless.
            running.watched = False
        try:
            if error is None:
                job.done()
            else:
                job.failed(error)
        except Exception:
            logger.exception("tier %s: fault after %s", self.name, job.what)
        with self._lock:
            self._running.remove(running)
        return True

    def _returned(self, job: Job) -> bool:
        """An abandoned thread came back: it goes on if it was not replaced."""
        self._hung -= 1
        job.late()
        self._wake.notify_all()
        if self._started and not self._stopped and self._working < self._size:
            self._working += 1
            return True
        return False

    def _fell(self, reason: str, started: float) -> None:
        if self.health.failed(self._clock(), started):
            logger.warning("tier %s: bypassed, next try in %.3g s: %s", self.name, self._back_off(), reason)
        if not self.health.up:
            self.shed()
        self._wake.notify_all()

    def _back_off(self) -> float:
        return self.health.retry_at - self._clock()
