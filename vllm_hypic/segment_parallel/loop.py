"""The thread that serves the sockets of a receiver or a sender: one poll waits for all sockets."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable
from typing import Any

import zmq

from .complaints import logger


class SocketLoop:
    """Run turns on one thread with one ZeroMQ context: a turn begins when a polled socket is readable, after
    a call of ``wake``, or when the wait time ends."""

    def __init__(self, name: str) -> None:
        """Prepare the loop; no thread runs before ``start``.  ``name``: name of the thread, also in logs."""
        self._name = name
        self.context: zmq.Context[Any] = zmq.Context()
        self._poller = zmq.Poller()
        self._woken, self._waker = socket.socketpair()
        self._woken.setblocking(False)
        self._waker.setblocking(False)
        self._poller.register(self._woken.fileno(), zmq.POLLIN)
        self._thread: threading.Thread | None = None
        self.closing = False
        """True once ``close`` was called: no further turn begins."""

    def start(self, wait_ms: Callable[[], int], turn: Callable[[], None], end: Callable[[], None]) -> None:
        """Start the thread, which calls the three functions one at a time.

        ``wait_ms`` returns the longest time until the next turn, in ms.  ``turn`` does the pending work
        without waiting.  ``end`` runs last, also after an error, closes sockets and reports open work."""
        self._thread = threading.Thread(
            target=self._run, args=(wait_ms, turn, end), name=self._name, daemon=True
        )
        self._thread.start()

    def poll(self, polled: zmq.Socket[Any]) -> None:
        """Take a turn whenever ``polled`` is readable, from now on.  Only the loop's own thread may call this
        once the loop has started."""
        self._poller.register(polled, zmq.POLLIN)

    def leave(self, polled: zmq.Socket[Any]) -> None:
        """Close ``polled`` and stop polling it.  Only the loop's own thread may call this."""
        self._poller.unregister(polled)
        polled.close()

    def wake(self) -> None:
        """Make the thread take a turn soon.  Any thread may call this, also after ``close``."""
        with contextlib.suppress(OSError):  # full: a wake is pending; closed: no thread is left to wake
            self._waker.send(b"\0")

    @property
    def here(self) -> bool:
        """Whether the calling thread is the loop's own thread."""
        return threading.current_thread() is self._thread

    def close(self) -> None:
        """End the thread, wait for its turn without limit, then release wake sockets and context.

        ``close`` may be called twice, and without ``start``.  A call on the loop's own thread returns at once
        and releases nothing."""
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
    """Send a message without waiting; return False when the peer is gone, or does not read."""
    try:
        to.send_multipart(frames, zmq.NOBLOCK)
    except zmq.ZMQError as e:
        if e.errno not in (zmq.EHOSTUNREACH, zmq.EAGAIN):
            raise
        return False
    return True
