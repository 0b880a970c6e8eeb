"""A thread that carries bytes from pinned blocks to where they are wanted, so that no step does."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable

Work = Callable[[], None]


class CopyThread:
    """Does what it is given in order, one thing at a time; nothing of it may fail, or call the device.

    With ``threaded=False`` there is no thread: :meth:`run_one` does what it would do.
    """

    def __init__(self, *, threaded: bool = True) -> None:
        self._queue: deque[Work] = deque()
        self._changed = threading.Condition()
        self._busy = self._stopped = False
        if threaded:
            threading.Thread(target=self._work, name="hypic-copies", daemon=True).start()

    def submit(self, work: Work) -> None:
        """Never waits."""
        with self._changed:
            self._queue.append(work)
            self._changed.notify_all()

    def run_one(self) -> bool:
        """Do the next thing here, unless there is none or another is being done."""
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
        """Until all that was given is done; helps."""
        while True:
            if self.run_one():
                continue
            with self._changed:
                if not self._busy and not self._queue:
                    return
                if self._busy:
                    self._changed.wait()

    def stop(self) -> None:
        """The thread ends when it has nothing left to do."""
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
