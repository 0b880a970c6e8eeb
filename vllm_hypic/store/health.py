"""Whether to use something that may fail: up, bypassed for a while, one probe, up again."""

from __future__ import annotations


class Health:
    """State of one side of a tier.  Not thread-safe: its owner locks.

    Times are seconds of one monotonic clock.

    A failure bypasses for ``first_s``; each failure of a probe doubles that up to ``most_s``; a success ends
    it and forgets the doubling.
    """

    def __init__(self, first_s: float = 1.0, most_s: float = 30.0) -> None:
        self._first_s = first_s
        self._most_s = most_s
        self._back_off_s = first_s
        self._failed_at = 0.0
        self._up_since = -float("inf")
        self._probing = False
        self.up = True

    @property
    def retry_at(self) -> float:
        """When a probe may start, if bypassed."""
        return self._failed_at + self._back_off_s

    def allows(self, now: float) -> bool:
        """Whether an operation may start: always while up, or as the probe.  Changes nothing."""
        return self.up or (not self._probing and now >= self.retry_at)

    def starts(self) -> None:
        """An allowed operation starts: while bypassed, it is the probe."""
        self._probing = not self.up

    def failed(self, now: float, started: float) -> bool:
        """An operation begun at ``started`` failed.  Whether that turned up into bypassed.

        One that was begun before the last recovery says nothing about the time after it.
        """
        if self.up and started < self._up_since:
            return False
        if self.up:
            self.up, self._probing = False, False
            self._back_off_s = self._first_s
            self._failed_at = now
            return True
        if started > self._failed_at:  # the probe, not one that was under way when the first failed
            self._probing = False
            self._back_off_s = min(2 * self._back_off_s, self._most_s)
            self._failed_at = now
        return False

    def succeeded(self, now: float) -> bool:
        """An operation succeeded.  Whether that turned bypassed into up."""
        if self.up:
            return False
        self.up, self._probing, self._up_since = True, False, now
        return True
