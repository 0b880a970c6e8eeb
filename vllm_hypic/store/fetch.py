"""One fetch: sources are asked in turn until a reader takes an object, within one deadline."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Iterable
from typing import Protocol

from .crew import Clock
from .protocol import Fetched, Reader, Verdict
from .worth import ObjectName

logger = logging.getLogger("vllm.hypic.store")


class Source(Protocol):
    """Where an object may be: a tier's lane, or the write queue.  Called with the store's lock held."""

    name: str

    def ask(
        self,
        name: ObjectName,
        limit: int,
        patience_s: float,
        fetched: Callable[[memoryview | None], None],
        lost: Callable[[], None],
    ) -> Callable[[], None] | None:
        """Start reading; ``None`` when that is not possible now.

        Later, and without the lock, ``fetched`` runs with the bytes or ``None``; or ``lost`` when there will
        be none.  What is returned calls the reading off: after it, either may still run, and must do nothing.
        """

    def hit(self) -> None: ...

    def missed(self) -> None: ...

    def damaged(self, name: ObjectName) -> None:
        """What it gave is not a sound object."""


class Fetch:
    """Its reader runs on the sources' threads, never after ``ended`` is set, and never twice at a time."""

    def __init__(
        self,
        name: ObjectName,
        limit: int,
        reader: Reader,
        sources: Iterable[Source],
        *,
        deadline_s: float,
        taken: Callable[[Fetch, Source, memoryview], None],
        lock: threading.RLock,
        clock: Clock,
    ) -> None:
        self.name = name
        self.limit = limit
        self.reader = reader
        self.ended: Fetched | None = None
        self.current = True
        """False once the object was deleted: it may be taken, but not be kept anywhere."""
        self.taken = taken
        self.lock = lock
        self._clock = clock
        self._sources = deque(sources)
        self._started = clock()
        self._deadline = self._started + deadline_s
        self._attempt: _Attempt | None = None

    def start(self) -> None:
        with self.lock:
            self.go_on()

    def expire(self, now: float) -> None:
        """Leave a source whose time is over at ``now``, unless its object is being read."""
        with self.lock:
            attempt = self._attempt
            if attempt is not None and not attempt.reading and now >= attempt.give_up_at:
                attempt.call_off()
                self.go_on()

    def stop(self) -> bool:
        """End now.  False while the reader runs."""
        with self.lock:
            attempt = self._attempt
            if attempt is not None:
                if attempt.reading:
                    return False
                attempt.call_off()
            if self.ended is None:
                self.end(None)
            return True

    # -- for attempts

    def is_at(self, attempt: _Attempt) -> bool:
        return self._attempt is attempt

    def go_on(self) -> None:
        """Ask the next source: each gets its even share of the time that is left."""
        now = self._clock()
        while self._sources and now < self._deadline:
            share = (self._deadline - now) / len(self._sources)
            source = self._sources.popleft()
            attempt = _Attempt(self, source, now + share)
            self._attempt = attempt
            call_off = source.ask(self.name, self.limit, share, attempt.fetched, attempt.lost)
            if call_off is not None:
                attempt.call_off = call_off
                return
        self.end(None)

    def end(self, tier: str | None) -> None:
        self._attempt = None
        self.ended = Fetched(self.name, tier, self._clock() - self._started)


class _Attempt:
    """Asking one source."""

    call_off: Callable[[], None]

    def __init__(self, fetch: Fetch, source: Source, give_up_at: float) -> None:
        self.reading = False
        self.give_up_at = give_up_at
        self._fetch = fetch
        self._source = source

    def fetched(self, data: memoryview | None) -> None:
        fetch = self._fetch
        with fetch.lock:
            if not fetch.is_at(self):
                return  # too late: what the reader would write into may be somebody else's by now
            if data is None:
                self._source.missed()
                fetch.go_on()
                return
            self.reading = True
        verdict: Verdict | None = None
        try:
            verdict = fetch.reader(data) if data.nbytes <= fetch.limit else Verdict.DAMAGED
        except Exception:
            logger.exception("%s: its reader must not fail", fetch.name)
        with fetch.lock:
            self.reading = False
            if verdict is Verdict.TAKEN:
                self._source.hit()
                fetch.end(self._source.name)
                fetch.taken(fetch, self._source, data)
            elif verdict is None:
                fetch.end(None)
            else:
                logger.warning("%s in %s is %s: deleted", fetch.name, self._source.name, verdict.value)
                self._source.damaged(fetch.name)
                fetch.go_on()

    def lost(self) -> None:
        with self._fetch.lock:
            if self._fetch.is_at(self):
                self._fetch.go_on()
