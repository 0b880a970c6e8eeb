"""A thread that copies bytes from pinned blocks to their destination, so that steps need not."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable

Work = Callable[[], None]


class CopyThread:
    """Runs submitted work in order, one item at a time.  Work must neither raise nor call the device.

    With ``threaded=False`` no thread exists, and callers run the work by :meth:`run_one`.
    """

    def __init__(self, *, threaded: bool = True) -> None:
        self._queue: deque[Work] = deque()
        self._changed = threading.Condition()
        self._busy = self._stopped = False
        if threaded:
            threading.Thread(target=self._work, name="hypic-copies", daemon=True).start()

    def submit(self, work: Work) -> None:
        """Queue ``work``.  Never waits."""
        with self._changed:
            self._queue.append(work)
            self._changed.notify_all()

    def run_one(self) -> bool:
        """Run the next work in the caller's thread, and return ``True``.

        Return ``False`` if no work is queued, or other work is running."""
        with self._changed:
            if self._busy or not self._queue:
                return False
            self._busy, work = True, self._queue.popleft()
        try:
            work()
        finally:
            with self._changed:
                self._busy = False
                self._changed.notify_all()
        return True

    def wait(self) -> None:
        """Wait until all submitted work is done, and help with it."""
        while True:
            if self.run_one():
                continue
            with self._changed:
                if not self._busy and not self._queue:
                    return
                if self._busy:
                    self._changed.wait()

    def stop(self) -> None:
        """Let the thread end once its queue is empty."""
        with self._changed:
            self._stopped = True
            self._changed.notify_all()

    def _work(self) -> None:
        while True:
            if self.run_one():
                continue
            with self._changed:
                if self._stopped and not self._queue:
                    return
                if self._busy or not self._queue:
                    self._changed.wait()
