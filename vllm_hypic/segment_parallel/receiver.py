"""Receiver: takes records that other instances send.

``receiver_machine.py`` holds the protocol; this module holds the socket, the thread and the bytes.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import replace

import zmq

from ..config.segment_parallel import Address
from ..errors import ConfigError
from ..store.protocol import Reader, Verdict
from . import wire
from .complaints import Complaints, logger
from .loop import SocketLoop, send
from .received import Received, ReceiverCounts
from .receiver_machine import SEND_S, Expected, Grant, ReceiverMachine
from .secret import Secret
from .sockets import router
from .transport import Arrival, Inbound, TcpInbound, TransportError

_TICK_S = 0.2
_POLL_TICK_MS = 1
_QUIET_TICK_S = 1.0
_BATCH = 64
_WARN_S = 5.0


class Receiver:
    """Take records of other instances on a separate thread.

    Any thread may call any method; only ``withdraw``, ``settle`` and ``close`` wait.  Memory: granted records
    under way, and at most 16 unread messages per connection, each of at most ``max_nbytes``.  Only holders of
    the secret can send messages; without a secret, only processes of this machine can.
    """

    def __init__(
        self,
        listen: str,
        namespace: str,
        secret: Secret | None,
        max_nbytes: int,
        nixl: Inbound | None = None,
        *,
        send_s: float = SEND_S,
    ) -> None:
        """Bind to ``listen`` (``tcp://ADDRESS:PORT``; port 0: any free port, see :attr:`url`).

        ``namespace``: peers must have the same namespace, character by character.  ``max_nbytes``: limit on
        a record's bytes.  ``nixl``: a transport that the receiver owns from now on; records are read over it
        where senders support that.  ``send_s``: see
        :data:`~vllm_hypic.segment_parallel.receiver_machine.SEND_S`.  Raises :class:`ConfigError` with the
        address when it cannot be bound, or is not a loopback address and there is no secret.
        """
        try:
            address = Address.parse(listen, any_port=True)
        except ValueError as e:
            raise ConfigError(f"hypic config: segment_parallel.listen={e}") from e
        where = f"hypic config: segment_parallel.listen={listen!r}"
        if secret is None and not address.loopback:
            raise ConfigError(f"{where}: expected a loopback address, or set secret_file")
        if max_nbytes < 1:
            raise ValueError(f"max_nbytes={max_nbytes}: expected at least 1")
        self._loop = SocketLoop("hypic-receiver")
        try:
            self._socket = router(self._loop.context, address, secret, max_nbytes)
        except zmq.ZMQError as e:
            self._loop.close()
            raise ConfigError(
                f"{where}: cannot be bound: {e.strerror}; expected an address of this machine and a free port"
            ) from e
        self.url: str = str(self._socket.getsockopt_string(zmq.LAST_ENDPOINT))
        """Address to which senders connect, unless ``listen`` is all interfaces or behind a NAT."""
        self.on_received: Callable[[], None] = lambda: None
        """Called by the receiver's thread when ``poll`` has new results; the function must not wait."""
        self._codec = wire.Codec()
        self._complaints = Complaints()
        self._lock = threading.Condition()
        """Guards ``_machine`` and ``_reading``; notified when a reader has returned."""
        self._machine = ReceiverMachine(
            namespace, max_nbytes, self._complaints, pull=nixl is not None, send_s=send_s
        )
        self._reading: Expected | None = None
        # Only the receiver's thread uses the attributes below.
        self._transports: dict[type[wire.Request], Inbound] = {wire.Data: TcpInbound()}
        if nixl is not None:
            self._transports[wire.Held] = nixl
        self._arriving: dict[Arrival, tuple[Grant, Inbound]] = {}
        self._ticked = time.monotonic()
        self._loop.poll(self._socket)
        self._loop.start(self._wait_ms, self._turn, self._end)
        logger.info(
            "receiver: accepts records at %s, from %s",
            self.url,
            "senders with the secret" if secret else "this machine (no secret_file)",
        )

    # -- called by the owner

    def expect(self, name: str, limit: int, reader: Reader) -> None:
        """Take a record ``name`` of at most ``limit`` bytes from now on; ``poll`` reports the end.

        ``reader`` checks the bytes and takes them over, on the receiver's thread.  The reader runs once per
        delivery, and runs again after a verdict other than ``TAKEN``.  The bytes are aligned to 8, and valid
        until the reader returns.  Raises ``ValueError`` for a malformed name, a limit below 1, and a name
        that is expected already.
        """
        with self._lock:
            self._machine.expect(name, limit, reader, time.monotonic())
        self._loop.wake()

    def withdraw(self, name: str) -> None:
        """Stop expecting ``name``: tell its present senders, forget ``settle``, report nothing afterwards.

        Waits without limit until the name's reader has returned, because the reader writes to the owner's
        memory.  A taken record counts as settled.  Call this method when a taken record leaves again;
        otherwise a later sender is told that the record is still here."""
        with self._lock:
            self._machine.withdraw(name, time.monotonic())
            self._wait_for_reader(name)
        self._loop.wake()

    def settle(self, name: str) -> None:
        """Stop expecting ``name`` as ``withdraw`` does, because its record is here.

        For 120 s, or until the name is expected or withdrawn, senders that offer it get ``Done``.  Of more
        than 4096 such names the oldest name is forgotten."""
        with self._lock:
            self._machine.settle(name, time.monotonic())
            self._wait_for_reader(name)
        self._loop.wake()

    def is_offered(self, name: str) -> bool:
        """Whether a sender offers or sends ``name``, or ``name`` has ended and may wait for ``poll``."""
        with self._lock:
            return self._machine.is_offered(name)

    def poll(self) -> list[Received]:
        """Return the expectations that ended since the last call; each end is reported once."""
        with self._lock:
            found = list(self._machine.ended)
            self._machine.ended.clear()
        return found

    def counts(self) -> ReceiverCounts:
        with self._lock:
            return replace(self._machine.counts)

    def close(self) -> None:
        """Close the port and all connections, after a running reader has returned.  May be called twice."""
        self._loop.close()

    def _wait_for_reader(self, name: str) -> None:
        while not self._loop.here and self._reading is not None and self._reading.name == name:
            if not self._lock.wait(_WARN_S):
                logger.warning("receiver %s: waits for the reader of record %s", self.url, wire.short(name))

    # -- the thread

    def _wait_ms(self) -> int:
        if any(transport.busy for transport in self._transports.values()):
            return _POLL_TICK_MS
        with self._lock:
            return round(1000 * (_TICK_S if self._machine.waiting else _QUIET_TICK_S))

    def _turn(self) -> None:
        self._flush()
        for _ in range(_BATCH):
            if not self._receive() or self._loop.closing:
                break
        self._poll_transports()
        if (now := time.monotonic()) >= self._ticked + _TICK_S:
            self._ticked = now
            with self._lock:
                self._machine.tick(now)
            self._flush()

    def _end(self) -> None:
        self._loop.leave(self._socket)
        with self._lock:
            self._machine.close()
        self.on_received()
        for transport in self._transports.values():
            transport.close()

    def _flush(self) -> None:
        """Send the replies that are due.  Forget a peer that is gone or does not read; a peer that comes back
        greets again."""
        with self._lock:
            while self._machine.outbox:
                peer, reply = self._machine.outbox.popleft()
                if not send(self._socket, peer, self._codec.encode(reply)):
                    self._machine.lost(peer, time.monotonic())

    def _receive(self) -> bool:
        """Handle one message; return False when no message waits."""
        try:
            peer = self._socket.recv(zmq.NOBLOCK)
        except zmq.Again:
            return False
        frames: list[zmq.Frame] = []
        while self._socket.rcvmore:
            frame = self._socket.recv(copy=False)
            frames = [*frames[:2], frame]  # keep one frame of all after the second
        fault = ""
        try:
            self._handle(peer, frames)
        except wire.Malformed as e:
            fault = str(e)
        except Exception:  # one peer's message must not end the service for all peers
            self._complain("fault", "receiver %s: a message caused an internal error", self.url)
            fault = "an internal error of this receiver"
        if fault:
            with self._lock:
                self._machine.drop(peer, fault)
        self._flush()
        return True

    def _handle(self, peer: bytes, frames: list[zmq.Frame]) -> None:
        now = time.monotonic()
        if len(frames) == 1 and not len(frames[0]):  # a peer has connected
            with self._lock:
                self._machine.connected(peer)
            return
        if not 1 <= len(frames) <= 2:
            raise wire.Malformed("expected a message of one or two frames")
        request = self._codec.request(frames[0].buffer)
        if (len(frames) == 2) != isinstance(request, wire.Data):
            raise wire.Malformed(f"a {type(request).__name__} message must not have {len(frames)} frames")
        with self._lock:
            if isinstance(request, wire.Hello):
                self._machine.greet(peer, request, str(frames[0].get("Peer-Address")), now)
                return
            before = len(self._machine.ended)
            grant = self._machine.handle(peer, request, now)
            told = len(self._machine.ended) > before
        if told:
            self.on_received()
        if grant is not None:
            assert isinstance(request, wire.Data | wire.Held)
            self._start(grant, request, frames[-1].buffer)

    def _start(self, grant: Grant, message: wire.Data | wire.Held, payload: memoryview) -> None:
        """Begin to receive the bytes of ``grant`` over the transport of ``message``."""
        transport = self._transports[type(message)]
        try:
            arrival = transport.start(message, payload, grant.nbytes)
        except TransportError as e:
            with self._lock:
                self._machine.failed(grant, str(e), time.monotonic())
            return
        if arrival.over:
            self._finish(grant, arrival, transport)
        else:
            self._arriving[arrival] = grant, transport

    def _poll_transports(self) -> None:
        for transport in self._transports.values():
            for arrival in transport.poll():
                grant, _ = self._arriving.pop(arrival)
                self._finish(grant, arrival, transport)
                self._flush()

    def _finish(self, grant: Grant, arrival: Arrival, transport: Inbound) -> None:
        """Let the reader judge an ended arrival's bytes, and report the verdict or fault to the machine."""
        now = time.monotonic()
        with self._lock:
            if arrival.fault:
                self._machine.failed(grant, arrival.fault, now)
                return
            expected = self._reading = self._machine.arrived(grant, len(arrival.data), now)
        if expected is not None:
            fault = self._read(expected, arrival.data)
            with self._lock:
                self._reading = None
                self._machine.judged(grant, expected, fault, transport.route, time.monotonic())
                told = bool(self._machine.ended)
                self._lock.notify_all()
            if told:
                self.on_received()
        transport.release(arrival)

    def _read(self, expected: Expected, data: memoryview) -> str:
        """Run the reader on ``data``; return why the reader refuses the bytes, empty when it takes them."""
        try:
            verdict = expected.reader(data)
            return "" if verdict is Verdict.TAKEN else f"the record is {verdict.value}"
        except Exception as e:
            self._complain("reader", "receiver: record %s could not be read", wire.short(expected.name))
            return f"the record could not be read: {type(e).__name__}: {e}"

    def _complain(self, kind: str, message: str, about: str) -> None:
        """Log ``message`` about ``about`` with the exception that is being handled."""
        with self._lock:
            self._complaints.warn(kind, message, about, exc_info=True)
