"""What the threads of landing and sender share: being woken, and complaining without flooding the log."""

from __future__ import annotations

import contextlib
import logging
import socket
import time
from collections import OrderedDict

logger = logging.getLogger("vllm.hypic.parallel")

_MOST_KINDS = 256


class Wake:
    """Interrupts a thread that polls ``fd`` for reading.  ``set`` may be called by any thread, also after
    ``close``."""

    def __init__(self) -> None:
        self._read, self._write = socket.socketpair()
        self._read.setblocking(False)
        self._write.setblocking(False)

    @property
    def fd(self) -> int:
        return self._read.fileno()

    def set(self) -> None:
        with contextlib.suppress(OSError):  # full: the thread will wake anyway; closed: there is none
            self._write.send(b"\0")

    def clear(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while self._read.recv(4096):
                pass

    def close(self) -> None:
        self._read.close()
        self._write.close()


class Complaints:
    """Warnings: of each kind one per ``every_s`` seconds, with the number of those left out.

    For one thread.  The least recent of more than 256 kinds is forgotten.
    """

    def __init__(self, every_s: float = 10.0) -> None:
        self._every_s = every_s
        self._kinds: OrderedDict[str, tuple[float, int]] = OrderedDict()
        """Of each kind: when it was logged, and how often it was left out since."""

    def warn(self, kind: str, message: str, *args: object, exc_info: bool = False) -> None:
        now = time.monotonic()
        logged, left_out = self._kinds.pop(kind, (-float("inf"), 0))
        if now < logged + self._every_s:
            self._kinds[kind] = (logged, left_out + 1)
            return
        self._kinds[kind] = (now, 0)
        if len(self._kinds) > _MOST_KINDS:
            self._kinds.popitem(last=False)
        if left_out:
            message, args = message + " (and %d more like this)", (*args, left_out)
        logger.warning(message, *args, exc_info=exc_info)
