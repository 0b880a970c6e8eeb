"""A circuit breaker: open for a while after a failure, half-open during one probe, otherwise closed."""

from __future__ import annotations

from enum import Enum


class State(Enum):
    """The states of a circuit breaker.  A closed breaker lets every operation start."""

    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half-open"
    """One operation, the probe, runs and decides whether the breaker closes."""


class CircuitBreaker:
    """Decides whether reads, or writes, of a tier may start.  Not thread-safe: its owner locks.

    Times are seconds of one monotonic clock.

    A failure opens the breaker for ``first_s``.  Each failed probe doubles that time, up to ``most_s``.  A
    success closes the breaker and resets the time.
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
        """The time at which a probe may start; meaningless while the breaker is closed."""
        return self._failed_at + self._back_off_s

    def allows(self, now: float) -> bool:
        """Return whether an operation may start: always while closed, or as the probe.  Changes nothing."""
        return self.closed or (self.state is State.OPEN and now >= self.retry_at)

    def starts(self) -> None:
        """Note that an allowed operation starts.  In an open breaker, the operation becomes the probe."""
        if self.state is State.OPEN:
            self.state = State.HALF_OPEN

    def failed(self, now: float, started: float) -> bool:
        """Note the failure of an operation begun at ``started``; return whether it opens a closed breaker.

        An operation that began before the breaker last closed says nothing about the time after the closing.
        """
        if self.closed:
            if started < self._closed_since:
                return False
            self.state = State.OPEN
            self._back_off_s = self._first_s
            self._failed_at = now
            return True
        if started > self._failed_at:  # the probe, not an operation that ran at the first failure
            self.state = State.OPEN
            self._back_off_s = min(2 * self._back_off_s, self._most_s)
            self._failed_at = now
        return False

    def succeeded(self, now: float) -> bool:
        """Note that an operation succeeded; return whether the success closes the breaker."""
        if self.closed:
            return False
        self.state = State.CLOSED
        self._closed_since = now
        return True
