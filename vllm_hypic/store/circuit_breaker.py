"""A circuit breaker: closed, open for a while after a failure, half-open for one probe, closed again."""

from __future__ import annotations

from enum import Enum


class State(Enum):
    """The states of a circuit breaker; closed is well."""

    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half-open"
    """One operation, the probe, is under way and decides."""


class CircuitBreaker:
    """Says whether one side of a tier may be used.  Not thread-safe: its owner locks.

    Times are seconds of one monotonic clock.

    A failure opens it for ``first_s``; each failure of a probe doubles that, up to ``most_s``; a success
    closes it and forgets the doubling.
    """

    def __init__(self, first_s: float = 1.0, most_s: float = 30.0) -> None:
        self.state = State.CLOSED
        self._first_s = first_s
        self._most_s = most_s
        self._back_off_s = first_s
        self._failed_at = 0.0
        self._closed_since = -float("inf")

    @property
    def closed(self) -> bool:
        return self.state is State.CLOSED

    @property
    def retry_at(self) -> float:
        """When a probe may start, unless closed."""
        return self._failed_at + self._back_off_s

    def allows(self, now: float) -> bool:
        """Whether an operation may start: always while closed, or as the probe.  Changes nothing."""
        return self.closed or (self.state is State.OPEN and now >= self.retry_at)

    def starts(self) -> None:
        """An allowed operation starts: unless closed, it is the probe."""
        if self.state is State.OPEN:
            self.state = State.HALF_OPEN

    def failed(self, now: float, started: float) -> bool:
        """An operation begun at ``started`` failed.  Whether that opened a closed breaker.

        One that was begun before the breaker was last closed says nothing about the time after it.
        """
        if self.closed:
            if started < self._closed_since:
                return False
            self.state = State.OPEN
            self._back_off_s = self._first_s
            self._failed_at = now
            return True
        if started > self._failed_at:  # the probe, not one that was under way when the first failed
            self.state = State.OPEN
            self._back_off_s = min(2 * self._back_off_s, self._most_s)
            self._failed_at = now
        return False

    def succeeded(self, now: float) -> bool:
        """An operation succeeded.  Whether that closed the breaker."""
        if self.closed:
            return False
        self.state = State.CLOSED
        self._closed_since = now
        return True
