"""Sender: brings records to the receivers of other instances.

Each destination has a separate connection, made on first use, so that a destination that is unreachable or
hangs delays no other.  ``sender_machine.py`` holds the protocol; this module holds connections and thread.
"""

from __future__ import annotations

import errno
import itertools
import secrets
import threading
import time
from collections import deque
from dataclasses import dataclass
from typing import Any

import zmq

from ..config.segment_parallel import Address
from . import wire
from .complaints import Complaints, logger
from .loop import SocketLoop
from .secret import Secret
from .sender_machine import Next, SenderMachine, Sent, Transfer
from .sockets import dealer, destination_of
from .transport import Outbound, TcpOutbound

MOST_DESTINATIONS = 512
"""Limit on destinations connected at a time."""
IDLE_S = 60.0
"""Seconds after which an unused connection is closed."""

_TICK_S = 1.0
_PROGRESS_TICK_S = 0.0005
_RELEASE_TICK_S = 0.002
_RELEASE_S = 2.0
"""Limit on the seconds that libzmq may still read bytes after their connection was cut."""
_CLOSED = "the sender is closed"


@dataclass
class _Connection:
    machine: SenderMachine
    socket: zmq.Socket[Any]


class Sender:
    """Send records on a separate thread.  Any thread may call any method; only ``close`` waits."""

    def __init__(
        self,
        namespace: str,
        secret: Secret | None,
        nixl: Outbound | None = None,
        *,
        idle_s: float = IDLE_S,
    ) -> None:
        """Start the thread.  ``namespace``: destinations must have the same namespace.  ``secret``: ``None``
        allows only loopback addresses as destinations.  ``nixl``: a transport that the sender owns from now
        on; destinations that support NIXL read records over it."""
        self._secret, self._idle_s = secret, idle_s
        self._hello = wire.Hello(wire.VERSION, namespace, secrets.token_hex(16))
        self._transports: list[Outbound] = [TcpOutbound()] if nixl is None else [nixl, TcpOutbound()]
        self._tickets = itertools.count(1)
        self._codec = wire.Codec()
        self._complaints = Complaints()
        self._lock = threading.Lock()
        """Guards ``_inbox``, ``_outbox``, ``_pending_bytes`` and ``_over``."""
        self._inbox: deque[Transfer] = deque()
        self._outbox: deque[Sent] = deque()
        self._pending_bytes = 0
        self._over = False
        # Only the sender's thread uses the attributes below.
        self._connections: dict[str, _Connection] = {}
        """Connections by url."""
        self._releasing: list[Transfer] = []
        """Transfers that are over, and whose bytes libzmq may still read."""
        self._loop = SocketLoop("hypic-sender")
        self._loop.context.max_sockets = 2 * MOST_DESTINATIONS
        self._loop.start(self._wait_ms, self._turn, self._end)

    def send(self, name: str, data: memoryview, destination: str, deadline_s: float) -> int:
        """Start sending ``data`` to ``destination`` (``tcp://ADDRESS:PORT``); return the transfer's ticket.

        ``poll`` reports the ticket after at most ``deadline_s`` seconds.  ``data`` (contiguous, at least one
        byte) must not change until ``poll`` has reported, because the sender does not copy it.  Raises
        ``ValueError`` for a malformed argument, and for a destination that is not allowed.
        """
        wire.check_name(name)
        address = destination_of(destination, self._secret)
        view = memoryview(data)
        if not view.c_contiguous or view.nbytes < 1:
            raise ValueError(f"segment {name}: expected contiguous bytes, at least one")
        if not 0 < deadline_s < threading.TIMEOUT_MAX:
            raise ValueError(f"deadline_s={deadline_s}: expected a number of seconds > 0")
        now = time.monotonic()
        transfer = Transfer(
            next(self._tickets), name, view.cast("B"), destination, address.url, now, now + deadline_s
        )
        with self._lock:
            self._pending_bytes += view.nbytes
            if self._over:
                transfer.end(False, _CLOSED, now)
                self._report(transfer)
            else:
                self._inbox.append(transfer)
        self._loop.wake()
        return transfer.ticket

    def poll(self) -> list[Sent]:
        """Return the transfers that ended since the last call; each transfer is reported once."""
        with self._lock:
            found = list(self._outbox)
            self._outbox.clear()
        return found

    def pending_bytes(self) -> int:
        """Return the bytes of all transfers whose end ``poll`` cannot report yet."""
        with self._lock:
            return self._pending_bytes

    def close(self) -> None:
        """Cut all connections, and report open transfers as not delivered.  May be called twice."""
        self._loop.close()

    # -- the thread

    def _wait_ms(self) -> int:
        """Return the time in ms until the next deadline, renewal, release check or progress of NIXL."""
        wait = _RELEASE_TICK_S if self._releasing else _TICK_S
        if any(transport.busy for transport in self._transports):
            wait = _PROGRESS_TICK_S
        now = time.monotonic()
        for connection in self._connections.values():
            for transfer in connection.machine.transfers():
                wait = min(wait, transfer.deadline - now)
        return max(0, int(1000 * wait) + 1)

    def _turn(self) -> None:
        with self._lock:
            arrived, self._inbox = self._inbox, deque()
        for transfer in arrived:
            self._start(transfer)
        for url, connection in list(self._connections.items()):
            self._receive(url, connection)
        for transport in self._transports:
            transport.progress()
        self._watch_the_clock()

    def _end(self) -> None:
        now = time.monotonic()
        for connection in self._connections.values():
            self._loop.leave(connection.socket)
        for connection in self._connections.values():
            connection.machine.end(_CLOSED, now)
        self._connections.clear()
        with self._lock:
            self._over = True
            while self._inbox:
                transfer = self._inbox.popleft()
                transfer.end(False, _CLOSED, now)
                self._report(transfer)
        for transfer in self._releasing:
            transfer.deadline = min(transfer.deadline, now)
        while self._releasing:
            self._report_released(time.monotonic())
            time.sleep(_RELEASE_TICK_S)
        for transport in self._transports:
            transport.close()

    # -- connections

    def _start(self, transfer: Transfer) -> None:
        now = time.monotonic()
        connection = self._connections.get(transfer.url)
        if connection is None:
            machine = SenderMachine(
                transfer.url, self._hello, self._transports, self._releasing, self._complaints
            )
            try:
                connection = self._connect(transfer.url, machine)
            except zmq.ZMQError as e:
                transfer.end(False, f"cannot connect: {e.strerror}", now)
                self._releasing.append(transfer)
                return
        connection.machine.send(transfer, now)
        self._flush(connection)

    def _connect(self, url: str, machine: SenderMachine) -> _Connection:
        """Connect ``machine`` to ``url``, in place of the least recently used idle connection if necessary.

        Raises :class:`zmq.ZMQError`, also when all :data:`MOST_DESTINATIONS` connections are in use."""
        if len(self._connections) >= MOST_DESTINATIONS:
            idle = [u for u, connection in self._connections.items() if connection.machine.idle]
            if not idle:
                raise zmq.ZMQError(errno.EMFILE, f"{MOST_DESTINATIONS} other destinations are in use")
            self._disconnect(min(idle, key=lambda u: self._connections[u].machine.used))
        socket = dealer(self._loop.context, Address.parse(url), self._secret)
        self._loop.poll(socket)
        connection = self._connections[url] = _Connection(machine, socket)
        return connection

    def _disconnect(self, url: str) -> None:
        self._loop.leave(self._connections.pop(url).socket)

    def _reconnect(self, url: str) -> None:
        """Cut the connection, so that libzmq releases unsent bytes, and connect again for open transfers."""
        machine = self._connections[url].machine
        self._disconnect(url)
        machine.lost()
        if machine.idle:
            return
        try:
            self._connect(url, machine)
        except zmq.ZMQError as e:
            machine.end(f"cannot connect: {e.strerror}", time.monotonic())

    def _receive(self, url: str, connection: _Connection) -> None:
        while True:
            try:
                frames = connection.socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            after = Next.KEEP
            try:
                if len(frames) != 1:
                    raise wire.Malformed(f"the answer has {len(frames)} frames, expected 1")
                after = connection.machine.handle(self._codec.reply(frames[0]), time.monotonic())
            except wire.Malformed as e:
                self._complaints.warn(url, "sender: ignores an answer of %s: %s", url, e)
            if after is Next.CLOSE:
                self._disconnect(url)
                return
            self._flush(connection)

    def _flush(self, connection: _Connection) -> None:
        """Send the messages that are due.  A lost connection begins with ``Again`` when it comes back."""
        machine, socket = connection.machine, connection.socket
        while machine.outbox:
            message, transfer = machine.outbox.popleft()
            header = self._codec.encode(message)
            try:
                if transfer is None:
                    socket.send(header, zmq.NOBLOCK)
                else:
                    socket.send(header, zmq.SNDMORE | zmq.NOBLOCK)
                    transfer.trackers.append(socket.send(transfer.data, zmq.NOBLOCK, copy=False, track=True))
            except zmq.Again:
                machine.lost()

    def _watch_the_clock(self) -> None:
        now = time.monotonic()
        for url, connection in list(self._connections.items()):
            machine = connection.machine
            if machine.tick(now) is Next.RENEW:
                self._reconnect(url)
            elif machine.idle and now >= machine.used + self._idle_s:
                self._disconnect(url)
            else:
                self._flush(connection)
        self._report_released(now)

    def _report_released(self, now: float) -> None:
        """Report ended transfers that libzmq no longer reads, or reads ``_RELEASE_S`` past the deadline."""
        waiting = []
        for transfer in self._releasing:
            late = now >= transfer.deadline + _RELEASE_S
            if not transfer.released and not late:
                waiting.append(transfer)
                continue
            if late and not transfer.released:
                logger.error("sender: libzmq holds record %s after its deadline", wire.short(transfer.name))
            with self._lock:
                self._report(transfer)
        self._releasing[:] = waiting

    def _report(self, transfer: Transfer) -> None:
        """Put the transfer's outcome into the outbox.  The caller must hold the lock."""
        assert transfer.outcome is not None
        self._pending_bytes -= transfer.data.nbytes
        self._outbox.append(transfer.outcome)
