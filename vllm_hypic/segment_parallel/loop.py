"""The thread that does the sockets, of a receiver or of a sender: it waits for all of them at once."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable
from typing import Any

import zmq

from .complaints import logger


class SocketLoop:
    """One thread, one ZeroMQ context: a turn is taken whenever a polled socket has something to read,
    somebody has called ``wake``, or time is over."""

    def __init__(self, name: str) -> None:
        """``name``: of the thread, and in the log.  Nothing runs before ``start``."""
        self._name = name
        self.context: zmq.Context[Any] = zmq.Context()
        self._poller = zmq.Poller()
        self._woken, self._waker = socket.socketpair()
        self._woken.setblocking(False)
        self._waker.setblocking(False)
        self._poller.register(self._woken.fileno(), zmq.POLLIN)
        self._thread: threading.Thread | None = None
        self.closing = False
        """Set by ``close``: no further turn begins."""

    def start(self, wait_ms: Callable[[], int], turn: Callable[[], None], end: Callable[[], None]) -> None:
        """Have the thread call these, one at a time: ``wait_ms``, for the longest time until the next turn;
        ``turn``, which does what there is to do and waits for nobody; last, also when one of them has
        raised, ``end``, which closes the sockets and reports what is open."""
        self._thread = threading.Thread(
            target=self._run, args=(wait_ms, turn, end), name=self._name, daemon=True
        )
        self._thread.start()

    def poll(self, polled: zmq.Socket[Any]) -> None:
        """Take a turn when ``polled`` has something to read, from now on.  Not for other threads."""
        self._poller.register(polled, zmq.POLLIN)

    def leave(self, polled: zmq.Socket[Any]) -> None:
        """Close a socket that was polled.  Not for other threads."""
        self._poller.unregister(polled)
        polled.close()

    def wake(self) -> None:
        """Have a turn taken soon.  Any thread may call this, also after ``close``."""
        with contextlib.suppress(OSError):  # full: the thread will wake anyway; closed: there is none
            self._waker.send(b"\0")

    @property
    def here(self) -> bool:
        """Whether the caller is the loop's own thread."""
        return threading.current_thread() is self._thread

    def close(self) -> None:
        """End the thread and wait for it, however long its turn takes; then release everything.

        May be called twice, and without ``start``.  The loop's own thread does not wait for itself."""
        self.closing = True
        self.wake()
        if self.here:
            return
        while self._thread is not None and self._thread.is_alive():
            self._thread.join(5.0)
            if self._thread.is_alive():
                logger.warning("%s: the shutdown waits for an operation in progress", self._name)
        self._woken.close()
        self._waker.close()
        self.context.term()

    def _run(self, wait_ms: Callable[[], int], turn: Callable[[], None], end: Callable[[], None]) -> None:
        try:
            while True:
                self._poller.poll(wait_ms())
                with contextlib.suppress(BlockingIOError):
                    while self._woken.recv(4096):
                        pass
                if self.closing:
                    return
                turn()
        except Exception:
            logger.exception("%s: the thread failed; no records travel until the engine restarts", self._name)
        finally:
            end()


def send(to: zmq.Socket[Any], *frames: bytes) -> bool:
    """Send a message without waiting; False when its peer is gone, or reads nothing."""
    try:
        to.send_multipart(frames, zmq.NOBLOCK)
    except zmq.ZMQError as e:
        if e.errno not in (zmq.EHOSTUNREACH, zmq.EAGAIN):
            raise
        return False
    return True
