"""Sender: brings records to the landings of other instances.

Each destination has a connection of its own, made when it is first needed: one that is unreachable or hangs
delays no other.
"""

from __future__ import annotations

import errno
import itertools
import secrets
import threading
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import zmq

from ..config.segment_parallel import Address
from . import wire
from .dealer import dealer, destination_of
from .nixl import Exporter, Held
from .secret import Secret
from .wake import Complaints, Wake, logger

MOST_DESTINATIONS = 512
"""Connected at a time."""
IDLE_S = 60.0
"""A connection that is not needed for so long is closed."""
RENEW_S = 10.0
"""An offer without an answer is made again after so long, so that the other side does not forget it."""

_TICK_S = 1.0
_PROGRESS_TICK_S = 0.0005
_RELEASE_TICK_S = 0.002
_RELEASE_S = 2.0
"""Longest that one waits for libzmq to let go of bytes once a connection was cut."""


@dataclass(frozen=True)
class Sent:
    """The end of a transfer."""

    ticket: int
    name: str
    destination: str
    delivered: bool
    """The record is there, or not needed there."""
    reason: str
    """Why not delivered; empty when this very record was taken."""
    seconds: float
    """Since ``send``."""


class _State(Enum):
    NEW = "not offered"
    OFFERED = "offered, not expected there"
    HELD = "ready to be read, not acknowledged"
    SENDING = "sent, not acknowledged"


@dataclass
class _Transfer:
    ticket: int
    name: str
    data: memoryview
    destination: str
    """As given."""
    url: str
    """The same, in the one form that names its connection."""
    started: float
    deadline: float
    state: _State = _State.NEW
    offered: float = 0.0
    trackers: list[zmq.MessageTracker] = field(default_factory=list)
    """Of ``data`` on its way through libzmq, on this connection or one that was lost."""
    held: Held | None = None
    """Where the destination reads it."""
    outcome: Sent | None = None
    """Set once it is over; reported when libzmq has let go of ``data``."""

    @property
    def released(self) -> bool:
        return all(tracker.done for tracker in self.trackers)


@dataclass
class _Link:
    """The connection to one destination.  ``queues``: transfers by name, the first of each under way."""

    address: Address
    socket: zmq.Socket[Any]
    used: float
    queues: dict[str, deque[_Transfer]] = field(default_factory=dict)
    greeted: bool = False
    heard: bool = False
    """Whether the destination has ever answered."""

    def firsts(self) -> list[_Transfer]:
        return [queue[0] for queue in self.queues.values()]

    def transfers(self) -> Iterator[_Transfer]:
        return itertools.chain.from_iterable(self.queues.values())


class Sender:
    """Sends on a thread of its own.  All methods may be called by any thread; only ``close`` waits."""

    def __init__(
        self,
        namespace: str,
        secret: Secret | None,
        exporter: Exporter | None = None,
        *,
        idle_s: float = IDLE_S,
    ) -> None:
        """``namespace``: destinations must have the same.  Without a ``secret`` only loopback addresses are
        destinations.  With an ``exporter``, which is the sender's from now on, destinations that can do so
        read records over NIXL."""
        self._namespace, self._secret, self._idle_s = namespace, secret, idle_s
        self._exporter = exporter
        self._id = secrets.token_hex(16)
        self._tickets = itertools.count(1)
        self._codec = wire.Codec()
        self._complaints = Complaints()
        self._context: zmq.Context[Any] = zmq.Context()
        self._context.max_sockets = 2 * MOST_DESTINATIONS
        self._wake = Wake()
        self._lock = threading.Lock()
        """Guards the four below."""
        self._inbox: deque[_Transfer] = deque()
        self._outbox: deque[Sent] = deque()
        self._pending_bytes = 0
        self._closing = False
        # The thread's own.
        self._links: dict[str, _Link] = {}
        """By url."""
        self._releasing: list[_Transfer] = []
        """Over, but libzmq may still read their bytes."""
        self._poller = zmq.Poller()
        self._thread = threading.Thread(target=self._serve, name="hypic-sender", daemon=True)
        self._thread.start()

    def send(self, name: str, data: memoryview, destination: str, deadline_s: float) -> int:
        """Start bringing ``data`` to ``destination`` (``tcp://ADDRESS:PORT``); ``poll`` reports the ticket
        that is returned, ``deadline_s`` seconds from now at the latest.

        ``data`` (contiguous, at least one byte) must not change until then: it is not copied.  ``ValueError``
        names a malformed argument, and a destination that is not allowed.
        """
        wire.check_name(name)
        address = destination_of(destination, self._secret)
        view = memoryview(data)
        if not view.c_contiguous or view.nbytes < 1:
            raise ValueError(f"segment {name}: expected contiguous bytes, at least one")
        if not 0 < deadline_s < threading.TIMEOUT_MAX:
            raise ValueError(f"deadline_s={deadline_s}: expected a number of seconds > 0")
        now = time.monotonic()
        transfer = _Transfer(
            next(self._tickets), name, view.cast("B"), destination, address.url, now, now + deadline_s
        )
        with self._lock:
            self._pending_bytes += transfer.data.nbytes
            self._inbox.append(transfer)
            if self._closing:
                self._flush_inbox()
        self._wake.set()
        return transfer.ticket

    def poll(self) -> list[Sent]:
        """Transfers that ended since the last call, each reported once."""
        with self._lock:
            found = list(self._outbox)
            self._outbox.clear()
        return found

    def pending_bytes(self) -> int:
        """Of records whose end was not yet there for ``poll`` to report."""
        with self._lock:
            return self._pending_bytes

    def close(self) -> None:
        """Cut all connections; what is under way is reported as not delivered.  May be called twice."""
        with self._lock:
            self._closing = True
        self._wake.set()
        self._thread.join()
        self._wake.close()
        self._context.term()

    # -- the thread

    def _serve(self) -> None:
        self._poller.register(self._wake.fd, zmq.POLLIN)
        try:
            while True:
                self._poller.poll(self._wait_ms())
                self._wake.clear()
                with self._lock:
                    if self._closing:
                        return
                    arrived, self._inbox = self._inbox, deque()
                for transfer in arrived:
                    self._start(transfer)
                for link in list(self._links.values()):
                    self._receive(link)
                if self._exporter is not None:
                    self._exporter.progress()
                self._watch_the_clock()
        except Exception:
            logger.exception("sender: ended by a fault; no more records are pushed")
        finally:
            self._end()

    def _wait_ms(self) -> int:
        """Until the next deadline, renewal, check whether libzmq has let go of bytes, or progress of NIXL."""
        wait = _RELEASE_TICK_S if self._releasing else _TICK_S
        if self._exporter is not None and self._exporter.busy:
            wait = _PROGRESS_TICK_S
        now = time.monotonic()
        for link in self._links.values():
            for transfer in link.transfers():
                wait = min(wait, transfer.deadline - now)
        return max(0, int(1000 * wait) + 1)

    def _start(self, transfer: _Transfer) -> None:
        link = self._links.get(transfer.url)
        if link is None:
            try:
                link = self._connect(transfer.url)
            except zmq.ZMQError as e:
                self._finish(transfer, False, f"cannot connect: {e.strerror}")
                return
        link.used = time.monotonic()
        queue = link.queues.setdefault(transfer.name, deque())
        queue.append(transfer)
        if link.greeted and queue[0] is transfer:
            self._offer(link, transfer)

    def _connect(self, url: str) -> _Link:
        """Raises :class:`zmq.ZMQError`."""
        if len(self._links) >= MOST_DESTINATIONS:
            idle = [u for u, link in self._links.items() if not link.queues]
            if not idle:
                raise zmq.ZMQError(errno.EMFILE, f"{MOST_DESTINATIONS} other destinations are in use")
            self._disconnect(min(idle, key=lambda u: self._links[u].used))
        address = Address.parse(url)
        socket = dealer(self._context, address, self._secret)
        self._poller.register(socket, zmq.POLLIN)
        link = self._links[url] = _Link(address, socket, time.monotonic())
        return link

    def _disconnect(self, url: str) -> None:
        link = self._links.pop(url)
        self._poller.unregister(link.socket)
        link.socket.close()

    def _reconnect(self, url: str) -> None:
        """Cut the connection, so that libzmq lets go of what it still has to send, and begin anew."""
        old = self._links[url]
        self._disconnect(url)
        if not old.queues:
            return
        try:
            link = self._connect(url)
        except zmq.ZMQError as e:
            for transfer in list(old.transfers()):
                self._finish(transfer, False, f"cannot connect: {e.strerror}")
            return
        link.queues, link.heard = old.queues, old.heard
        self._begin_anew(link)

    def _begin_anew(self, link: _Link) -> None:
        link.greeted = False
        for transfer in link.firsts():
            transfer.state = _State.NEW
            self._release(transfer)

    def _receive(self, link: _Link) -> None:
        while self._links.get(link.address.url) is link:
            try:
                frames = link.socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            try:
                if len(frames) != 1:
                    raise wire.Malformed(f"an answer of {len(frames)} frames")
                self._handle(link, self._codec.reply(frames[0]))
            except wire.Malformed as e:
                self._complaints.warn(
                    link.address.url, "sender: an answer of %s is ignored: %s", link.address.url, e
                )

    def _handle(self, link: _Link, reply: wire.Reply) -> None:
        link.heard = True
        if isinstance(reply, wire.Again):
            self._begin_anew(link)
            self._say(link, wire.Hello(wire.VERSION, self._namespace, self._id))
        elif isinstance(reply, wire.Welcome):
            link.greeted = True
            for transfer in link.firsts():
                if transfer.state is _State.NEW:
                    self._offer(link, transfer)
        elif isinstance(reply, wire.Unwelcome):
            self._complaints.warn(
                link.address.url, "sender: turned away by %s: %s", link.address.url, reply.reason
            )
            for transfer in list(link.transfers()):
                self._over(link, transfer, False, f"turned away: {reply.reason}")
            self._disconnect(link.address.url)  # it may become another: what is sent later asks again
        elif isinstance(reply, wire.Withdrawn | wire.Noted):
            raise wire.Malformed("an answer to what was not asked")
        elif queue := link.queues.get(reply.name):
            transfer = queue[0]
            if isinstance(reply, wire.Go):
                self._go(link, transfer, reply.pull)
            elif isinstance(reply, wire.Taken):
                self._over(link, transfer, True, "")
            elif isinstance(reply, wire.Done):
                self._over(link, transfer, True, "not needed")
            else:
                self._over(link, transfer, False, f"refused: {reply.reason}")
        elif isinstance(reply, wire.Go):
            self._say(link, wire.Retract(reply.name))

    def _say(self, link: _Link, message: wire.Request) -> bool:
        """False when the connection has just been lost: the next one begins with ``Again``."""
        try:
            link.socket.send(self._codec.encode(message), zmq.NOBLOCK)
        except zmq.Again:
            self._begin_anew(link)
            return False
        return True

    def _offer(self, link: _Link, transfer: _Transfer) -> None:
        if self._say(link, wire.Offer(transfer.name, transfer.data.nbytes)):
            transfer.state, transfer.offered = _State.OFFERED, time.monotonic()

    def _go(self, link: _Link, transfer: _Transfer, pull: bool) -> None:
        if transfer.state is _State.HELD and not pull:
            self._release(transfer)  # it could not be read
        elif transfer.state is not _State.OFFERED:
            return
        if not (pull and self._hold(link, transfer)):
            self._send_data(link, transfer)

    def _hold(self, link: _Link, transfer: _Transfer) -> bool:
        """Lay the data out and say where; False when that cannot be done."""
        if self._exporter is None or (held := self._exporter.hold(transfer.data)) is None:
            return False
        transfer.state, transfer.held = _State.HELD, held
        self._say(link, wire.Held(transfer.name, held.address, self._exporter.metadata))
        return True

    def _release(self, transfer: _Transfer) -> None:
        if self._exporter is not None and transfer.held is not None:
            self._exporter.release(transfer.held)
            transfer.held = None

    def _send_data(self, link: _Link, transfer: _Transfer) -> None:
        header = self._codec.encode(wire.Data(transfer.name))
        try:
            link.socket.send(header, zmq.SNDMORE | zmq.NOBLOCK)
            tracker = link.socket.send(transfer.data, zmq.NOBLOCK, copy=False, track=True)
        except zmq.Again:
            self._begin_anew(link)
        else:
            transfer.state = _State.SENDING
            transfer.trackers = [t for t in (*transfer.trackers, tracker) if t and not t.done]

    def _watch_the_clock(self) -> None:
        now = time.monotonic()
        for url, link in list(self._links.items()):
            cut = False
            for transfer in [t for t in link.transfers() if t.deadline <= now]:
                seconds = transfer.deadline - transfer.started
                self._complaints.warn(
                    url,
                    "sender: %s was not delivered to %s within %.3g s: %s",
                    wire.short(transfer.name),
                    url,
                    seconds,
                    _why(link, transfer),
                )
                self._over(link, transfer, False, f"{_why(link, transfer)} within {seconds:.3g} s")
                cut |= not transfer.released
                if transfer.state is not _State.NEW and transfer.name not in link.queues:
                    self._say(link, wire.Retract(transfer.name))
            if cut:
                self._reconnect(url)
            elif not link.queues and now >= link.used + self._idle_s:
                self._disconnect(url)
            elif link.greeted:
                for transfer in link.firsts():
                    if transfer.state is _State.OFFERED and now >= transfer.offered + RENEW_S:
                        self._offer(link, transfer)
        self._report_released(now)

    def _over(self, link: _Link, transfer: _Transfer, delivered: bool, reason: str) -> None:
        queue = link.queues[transfer.name]
        was_first = queue[0] is transfer
        queue.remove(transfer)
        link.used = time.monotonic()
        if not queue:
            del link.queues[transfer.name]
        elif was_first and link.greeted:
            self._offer(link, queue[0])
        self._finish(transfer, delivered, reason)

    def _finish(self, transfer: _Transfer, delivered: bool, reason: str) -> None:
        now = time.monotonic()
        self._release(transfer)
        transfer.outcome = Sent(
            transfer.ticket,
            transfer.name,
            transfer.destination,
            delivered,
            reason,
            now - transfer.started,
        )
        self._releasing.append(transfer)
        self._report_released(now)

    def _report_released(self, now: float) -> None:
        """Report what is over and no longer read by libzmq."""
        waiting = []
        for transfer in self._releasing:
            late = now >= transfer.deadline + _RELEASE_S
            if not transfer.released and not late:
                waiting.append(transfer)
                continue
            if late and not transfer.released:
                logger.error("sender: libzmq still holds %s", wire.short(transfer.name))
            assert transfer.outcome is not None
            with self._lock:
                self._pending_bytes -= transfer.data.nbytes
                self._outbox.append(transfer.outcome)
        self._releasing = waiting

    def _end(self) -> None:
        links, self._links = self._links, {}
        for link in links.values():
            link.socket.close()
        for link in links.values():
            for transfer in link.transfers():
                transfer.deadline = min(transfer.deadline, time.monotonic())
                self._finish(transfer, False, "the sender is closed")
        with self._lock:
            self._closing = True
            self._flush_inbox()
        while self._releasing:
            self._report_released(time.monotonic())
            time.sleep(_RELEASE_TICK_S)
        if self._exporter is not None:
            self._exporter.close()

    def _flush_inbox(self) -> None:
        """The thread is over, or will not look there again.  Lock held."""
        while self._inbox:
            transfer = self._inbox.popleft()
            seconds = time.monotonic() - transfer.started
            self._pending_bytes -= transfer.data.nbytes
            self._outbox.append(
                Sent(
                    transfer.ticket,
                    transfer.name,
                    transfer.destination,
                    False,
                    "the sender is closed",
                    seconds,
                )
            )


def _why(link: _Link, transfer: _Transfer) -> str:
    if not link.heard:
        return "no answer (nobody listens there, or with another secret)"
    if not link.greeted:
        return "the connection was lost"
    return transfer.state.value
