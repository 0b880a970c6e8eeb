"""Landing: where records of other instances arrive.

Who expects a name says so (``expect``); who has it offers it, before or after that; one sender at a time is
told to go.  Bytes cross the network only for names that are expected and sizes that were agreed to.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import zmq

from ..config.segment_parallel import Address
from ..errors import ConfigError
from ..store.protocol import Reader, Verdict
from . import wire
from .keep_alive import keep_alive
from .landed import Landed, LandingCounts
from .memory import Offers, Recent
from .nixl import Pull, Puller, PullError
from .secret import Secret
from .wake import Complaints, Wake, logger

MOST_OFFERS = 4096
MOST_SETTLED = 4096
MOST_WITHDRAWN = 4096
MOST_PEERS = 16384
"""Peers that are more must greet again, which they do unasked."""
REMEMBER_S = 120.0
"""How long an offer waits for its name to be expected (senders renew theirs), and ``settle`` lasts."""
WITHDRAWAL_S = 10.0
"""How long a router's word on a name waits for it to be expected: a router may be faster than the engine."""
GO_S, GO_BYTES_PER_S = 10.0, 10e6
"""Who was told to go has ``GO_S + nbytes / GO_BYTES_PER_S`` before another may try as well."""

_TICK_S = 0.2
_PULL_TICK_MS = 1
_QUIET_TICK_S = 1.0
_BATCH = 64
_UNREAD_MESSAGES = 16
"""Per connection: libzmq then stops reading it, so that a peer cannot fill our memory."""


@dataclass(frozen=True)
class _Going:
    """A sender was told to go."""

    nbytes: int
    since: float
    until: float
    """Then another may try as well."""


@dataclass
class _Expected:
    name: str
    limit: int
    reader: Reader
    going: OrderedDict[bytes, _Going] = field(default_factory=OrderedDict)
    """Peers that may send: the last was told to go last, those before it are late."""


@dataclass(frozen=True)
class _Peer:
    sender: str
    address: str


class Landing:
    """Takes records of other instances on a thread of its own.  All methods may be called by any thread;
    none but ``withdraw``, ``settle`` and ``close`` waits for anything.

    Memory: records under way that were agreed to, and at most 16 messages per connection that were not, each
    of at most ``max_nbytes``; only holders of the secret (without one: processes of this machine) send any.
    """

    def __init__(
        self,
        listen: str,
        namespace: str,
        secret: Secret | None,
        max_nbytes: int,
        puller: Puller | None = None,
        *,
        go_s: float = GO_S,
    ) -> None:
        """Bind to ``listen`` (``tcp://ADDRESS:PORT``; port 0: any that is free, see :attr:`url`).

        ``namespace``: peers must have the same, character by character.  ``max_nbytes``: of the largest
        record ever expected.  :class:`ConfigError` names the address when it cannot be bound, or is not a
        loopback address while there is no secret.  With a ``puller``, which is the landing's from now on,
        records are read over NIXL where their senders can do so.  ``go_s``: see :data:`GO_S`.
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
        self._namespace, self._max_nbytes, self._go_s = namespace, max_nbytes, go_s
        self._codec = wire.Codec()
        self._complaints = Complaints()
        self._wake = Wake()
        self._context: zmq.Context[Any] = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        try:
            self._set_options(address, secret)
            self._socket.bind(address.url)
        except zmq.ZMQError as e:
            self._wake.close()
            self._context.destroy(linger=0)
            raise ConfigError(
                f"{where}: cannot be bound: {e.strerror}; expected an address of this machine, and a port "
                "that nobody else listens on"
            ) from e
        self.url: str = str(self._socket.getsockopt_string(zmq.LAST_ENDPOINT))
        """Where senders connect to, unless the address is all interfaces or behind a NAT."""

        self._lock = threading.Condition()
        """Guards everything below; told when a reader has returned."""
        self._expected: dict[str, _Expected] = {}
        self._reading: _Expected | None = None
        self._offers = Offers(MOST_OFFERS, REMEMBER_S)
        self._settled = Recent(MOST_SETTLED, REMEMBER_S)
        self._called_off = Recent(MOST_OFFERS, REMEMBER_S)
        """Name and peer of what may still come late."""
        self._withdrawn = Recent(MOST_WITHDRAWN, WITHDRAWAL_S)
        self._stored = Recent(MOST_WITHDRAWN, WITHDRAWAL_S)
        self._landed: deque[Landed] = deque()
        self.on_landed: Callable[[], None] = lambda: None
        """Called by the landing's thread when there is more for ``poll``; it must not wait."""
        self._counts = LandingCounts()
        self._to_send: deque[tuple[bytes, wire.Reply]] = deque()
        self._to_grant: deque[str] = deque()
        self._closing = False
        # The thread's own.
        self._peers: OrderedDict[bytes, _Peer] = OrderedDict()
        self._peer_of: dict[str, bytes] = {}
        """By the sender's id."""
        self._puller = puller
        self._pulls: dict[Pull, tuple[bytes, str, _Going]] = {}
        """Who holds what is being read."""
        self._thread = threading.Thread(target=self._serve, name="hypic-landing", daemon=True)
        self._thread.start()
        logger.info(
            "landing: records are taken at %s, from %s",
            self.url,
            "who has the secret" if secret else "this machine (no secret_file)",
        )

    def _set_options(self, address: Address, secret: Secret | None) -> None:
        socket = self._socket
        socket.linger = 0
        socket.ipv6 = address.ipv6
        socket.maxmsgsize = max(self._max_nbytes, wire.HEADER_BYTES)
        socket.rcvhwm = _UNREAD_MESSAGES
        socket.backlog = 1024  # many workers may connect at once after a restart
        socket.router_mandatory = True  # so that one learns that a peer has gone
        keep_alive(socket, idle_s=30, probe_s=10)
        if secret is not None:
            secret.serve(socket)

    # -- called by the owner

    def expect(self, name: str, limit: int, reader: Reader) -> None:
        """From now on a record ``name`` of at most ``limit`` bytes is taken; ``poll`` tells when it is over.

        ``reader`` checks the bytes and takes them over, on the landing's thread; it runs once per delivery,
        again after another verdict than ``TAKEN``.  The bytes are aligned to 8, and its own until it returns.
        ``ValueError``: no object name, a limit below 1, or expected already.
        """
        wire.check_name(name)
        if limit < 1:
            raise ValueError(f"limit={limit}: expected at least 1 byte")
        with self._lock:
            if name in self._expected:
                raise ValueError(f"segment {name} is expected already")
            self._settled.discard(name)
            if self._closing:
                self._landed.append(Landed(name, False, 0, 0.0, "the landing is closed"))
                return
            if self._withdrawn.has(name, time.monotonic()):
                self._withdrawn.discard(name)
                self._landed.append(Landed(name, False, 0, 0.0, "withdrawn before it was expected"))
                return
            if self._stored.has(name, time.monotonic()):
                self._stored.discard(name)
                self._stop_expecting(name)  # who offers it as well is told
                self._landed.append(Landed.in_a_tier(name))
                self._settled.add(name, time.monotonic())
                self._wake.set()
                return
            self._expected[name] = _Expected(name, min(limit, self._max_nbytes), reader)
            self._to_grant.append(name)
        self._wake.set()

    def withdraw(self, name: str) -> None:
        """``name`` is no longer wanted, or no longer there: what ``settle`` said is forgotten, those who
        offer it now are told, and nothing is reported of it afterwards.  Returns once its reader is not
        running, however long that takes: it writes where the owner said.

        A record that was taken counts as settled: call this when it leaves again, so that who offers it anew
        is not told that it is there."""
        with self._lock:
            self._stop_expecting(name)
            self._forget_reports(name)
            self._settled.discard(name)
            self._wait_for_reader(name)
        self._wake.set()

    def settle(self, name: str) -> None:
        """``name`` is there: like ``withdraw``, and for the next 120 s who offers it is told so, or until it
        is expected or withdrawn.  Of more than 4096 such names the oldest is forgotten."""
        wire.check_name(name)
        with self._lock:
            self._stop_expecting(name)
            self._forget_reports(name)
            self._settled.add(name, time.monotonic())
            self._wait_for_reader(name)
        self._wake.set()

    def poll(self) -> list[Landed]:
        """What ended since the last call, each reported once."""
        with self._lock:
            found = list(self._landed)
            self._landed.clear()
        return found

    def counts(self) -> LandingCounts:
        with self._lock:
            return self._counts

    def close(self) -> None:
        """Let go of the port and of all peers.  Waits for a reader under way.  May be called twice."""
        with self._lock:
            self._closing = True
        self._wake.set()
        if threading.current_thread() is self._thread:
            return
        while self._thread.is_alive():
            self._thread.join(5.0)
            if self._thread.is_alive():
                logger.warning("landing %s: closing waits for a reader", self.url)
        self._wake.close()
        self._context.term()

    def _stop_expecting(self, name: str) -> None:
        """Whoever sends or offers it will be told.  Lock held."""
        expected = self._expected.pop(name, None)
        going = list(expected.going) if expected else []
        offering = [o.peer for o in self._offers.pop_name(name)]
        self._to_send.extend((peer, wire.Done(name)) for peer in (*going, *offering))
        for peer in going:
            self._called_off.add(f"{name} {peer.hex()}", time.monotonic())

    def _forget_reports(self, name: str) -> None:
        if any(landed.name == name for landed in self._landed):
            self._landed = deque(landed for landed in self._landed if landed.name != name)

    def _wait_for_reader(self, name: str) -> None:
        if threading.current_thread() is self._thread:
            return
        while self._reading is not None and self._reading.name == name:
            if not self._lock.wait(5.0):
                logger.warning("landing %s: withdrawing %s waits for its reader", self.url, wire.short(name))

    # -- the thread

    def _serve(self) -> None:
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
        poller.register(self._wake.fd, zmq.POLLIN)
        swept = time.monotonic()
        try:
            while True:
                poller.poll(self._tick_ms())
                self._wake.clear()
                with self._lock:
                    if self._closing:
                        return
                    self._do_what_the_owner_wants()
                for _ in range(_BATCH):
                    if not self._receive():
                        break
                self._end_pulls()
                if (now := time.monotonic()) >= swept + _TICK_S:
                    swept = now
                    with self._lock:
                        self._sweep(now)
        except Exception:
            logger.exception("landing %s: ended by a fault; remote segments no longer land", self.url)
        finally:
            self._socket.close()
            with self._lock:
                self._closing = True
                for name in self._expected:
                    self._landed.append(Landed(name, False, 0, 0.0, "the landing is closed"))
                self.on_landed()
                self._expected.clear()
            if self._puller is not None:
                self._puller.close()

    def _tick_ms(self) -> int:
        if self._puller is not None and self._puller.busy:
            return _PULL_TICK_MS
        with self._lock:
            return round(1000 * (_TICK_S if self._expected and len(self._offers) else _QUIET_TICK_S))

    def _do_what_the_owner_wants(self) -> None:
        while self._to_send:
            self._send(*self._to_send.popleft())
        while self._to_grant:
            self._grant(self._to_grant.popleft())

    def _sweep(self, now: float) -> None:
        self._settled.expire(now)
        self._withdrawn.expire(now)
        self._stored.expire(now)
        self._called_off.expire(now)
        self._offers.expire(now)
        if len(self._offers):
            for name in list(self._expected):
                self._grant(name)

    def _receive(self) -> bool:
        """Handle one message; False when there is none."""
        try:
            peer = self._socket.recv(zmq.NOBLOCK)
        except zmq.Again:
            return False
        frames: list[zmq.Frame] = []
        too_many = False
        while self._socket.rcvmore:
            frame = self._socket.recv(copy=False)
            if len(frames) < 2:
                frames.append(frame)
            else:
                too_many = True
        if self._closing:
            return True
        try:
            self._handle(peer, [] if too_many else frames)
        except wire.Malformed as e:
            self._drop(peer, str(e))
        except Exception:  # one peer's message must not end the service of all others
            self._complaints.warn("fault", "landing %s: a message was not handled", self.url, exc_info=True)
            self._drop(peer, "a fault of ours")
        return True

    def _handle(self, peer: bytes, frames: list[zmq.Frame]) -> None:
        if len(frames) == 1 and not len(frames[0]):  # somebody has connected
            with self._lock:
                self._send(peer, wire.Again())
            return
        if not frames:
            raise wire.Malformed("a message of no frames, or of more than two")
        request = self._codec.request(frames[0].buffer)
        if (len(frames) == 2) != isinstance(request, wire.Data):
            raise wire.Malformed(f"{type(request).__name__} in {len(frames)} frames")
        with self._lock:
            if isinstance(request, wire.Hello):
                self._greet(peer, request, str(frames[0].get("Peer-Address")))
                return
            if peer not in self._peers:
                self._send(peer, wire.Again())
                return
            self._peers.move_to_end(peer)
            if isinstance(request, wire.Offer):
                self._offer(peer, request)
            elif isinstance(request, wire.Retract):
                self._retract(peer, request.name)
            elif isinstance(request, wire.Withdraw):
                self._withdraw(peer, request)
            elif isinstance(request, wire.Stored):
                self._note_stored(peer, request)
        if isinstance(request, wire.Data):
            self._data(peer, request.name, frames[1].buffer)
        elif isinstance(request, wire.Held):
            self._pull(peer, request)

    def _greet(self, peer: bytes, hello: wire.Hello, address: str) -> None:
        self._forget(peer)
        if hello.version != wire.VERSION:
            reason = f"transfer protocol {hello.version}: this instance speaks {wire.VERSION}"
        elif hello.namespace != self._namespace:
            reason = (
                f"namespace {hello.namespace}: this instance has {self._namespace}; model, weights and "
                "options that change records must be the same"
            )
        else:
            reason = ""
        if reason:
            self._counts = replace(self._counts, unwelcome=self._counts.unwelcome + 1)
            self._complaints.warn(f"unwelcome {address}", "landing: %s is turned away: %s", address, reason)
            self._send(peer, wire.Unwelcome(wire.clip(reason)))
            return
        if (before := self._peer_of.get(hello.sender)) is not None:
            self._forget(before)  # it has connected anew
        self._peers[peer] = _Peer(hello.sender, address)
        self._peer_of[hello.sender] = peer
        if len(self._peers) > MOST_PEERS:
            self._forget(next(iter(self._peers)))
        self._send(peer, wire.Welcome())

    def _forget(self, peer: bytes) -> None:
        """The peer is gone, or begins anew: what it offered and was told is void."""
        known = self._peers.pop(peer, None)
        if known is None:
            return
        if self._peer_of.get(known.sender) == peer:
            del self._peer_of[known.sender]
        self._offers.drop_peer(peer)
        for expected in self._expected.values():
            if expected.going.pop(peer, None) is not None:
                self._to_grant.append(expected.name)
        if self._to_grant:
            self._wake.set()

    def _offer(self, peer: bytes, offer: wire.Offer) -> None:
        name, now = offer.name, time.monotonic()
        self._counts = replace(self._counts, offers=self._counts.offers + 1)
        expected = self._expected.get(name)
        if expected is None and self._settled.has(name, now):
            self._send(peer, wire.Done(name))
        elif offer.nbytes > (limit := expected.limit if expected else self._max_nbytes):
            self._refuse(peer, name, f"{offer.nbytes} bytes; at most {limit} are taken")
        else:
            self._withdrawn.discard(name)
            self._offers.add(name, peer, offer.nbytes, now)
            self._grant(name)

    def _retract(self, peer: bytes, name: str) -> None:
        self._offers.pop(name, peer)
        expected = self._expected.get(name)
        if expected is not None and expected.going.pop(peer, None) is not None:
            self._grant(name)

    def _grant(self, name: str) -> None:
        """Tell the first that offers ``name`` to go, unless another is on its way."""
        expected = self._expected.get(name)
        if expected is None:
            return
        for offered in self._offers.of(name):
            now = time.monotonic()
            if expected.going and not self._late(expected, now):
                return
            if self._offers.pop(name, offered.peer) is None:
                continue  # the peer has just turned out to be gone
            if offered.nbytes > expected.limit:
                self._refuse(
                    offered.peer, name, f"{offered.nbytes} bytes; at most {expected.limit} are taken"
                )
            elif self._send(offered.peer, wire.Go(name, self._puller is not None)):
                self._goes(expected, offered.peer, offered.nbytes, now)

    def _goes(self, expected: _Expected, peer: bytes, nbytes: int, now: float) -> None:
        """The peer was told to go, last of all."""
        expected.going.pop(peer, None)
        expected.going[peer] = _Going(nbytes, now, now + self._go_s + nbytes / GO_BYTES_PER_S)

    def _late(self, expected: _Expected, now: float) -> bool:
        """Whether the one told to go last is gone, or takes too long."""
        peer, going = next(reversed(expected.going.items()))
        if not self._send(peer, wire.Welcome()):
            return True
        if now < going.until:
            return False
        self._complaints.warn(
            "late",
            "landing: %s was offered by %s, and has not come for %.0f s: another sender may try",
            wire.short(expected.name),
            self._address(peer),
            now - going.since,
        )
        return True

    def _withdraw(self, peer: bytes, withdraw: wire.Withdraw) -> None:
        now = time.monotonic()
        for name in withdraw.names:
            expected = name in self._expected
            if not expected and self._settled.has(name, now):
                continue
            self._stop_expecting(name)
            if expected:
                self._counts = replace(self._counts, withdrawn=self._counts.withdrawn + 1)
                reason = f"withdrawn by the router at {self._address(peer)}"
                self._landed.append(Landed(name, False, 0, 0.0, reason))
                self.on_landed()
            else:
                self._withdrawn.add(name, now)
                self._stored.discard(name)
        self._do_what_the_owner_wants()
        self._send(peer, wire.Withdrawn())

    def _note_stored(self, peer: bytes, stored: wire.Stored) -> None:
        """Who offers these is told that they are here: they will be, from the tier or computed."""
        now = time.monotonic()
        for name in stored.names:
            if name in self._expected:
                self._stop_expecting(name)
                self._counts = replace(self._counts, stored=self._counts.stored + 1)
                self._landed.append(Landed.in_a_tier(name))
                self.on_landed()
                self._settled.add(name, now)
            elif not self._settled.has(name, now):
                self._withdrawn.discard(name)
                self._stored.add(name, now)
        self._do_what_the_owner_wants()
        self._send(peer, wire.Noted())

    def _data(self, peer: bytes, name: str, data: memoryview, pulled: bool = False) -> None:
        with self._lock:
            if (found := self._going(peer, name)) is None:
                return
            expected, going = found
            del expected.going[peer]
            if len(data) != going.nbytes:
                self._refuse(peer, name, f"{len(data)} bytes; {going.nbytes} were offered")
                self._grant(name)
                return
            self._reading = expected
        verdict, reason = self._read(expected, data)
        with self._lock:
            self._reading = None
            self._lock.notify_all()
            if self._expected.get(name) is not expected:  # withdrawn meanwhile
                self._send(peer, wire.Done(name))
            elif verdict is Verdict.TAKEN:
                now = time.monotonic()
                counts = self._counts
                self._counts = replace(
                    counts,
                    taken=counts.taken + 1,
                    bytes=counts.bytes + going.nbytes,
                    pulled=counts.pulled + pulled,
                )
                self._send(peer, wire.Taken(name))
                self._stop_expecting(name)
                self._settled.add(name, now)
                self._landed.append(Landed(name, True, going.nbytes, now - going.since, "", pulled))
                self.on_landed()
                self._do_what_the_owner_wants()
            else:
                self._refuse(peer, name, reason)
                self._grant(name)

    def _going(self, peer: bytes, name: str) -> tuple[_Expected, _Going] | None:
        """What the peer was told to bring; ``None``, and counted, when it was not.  Lock held."""
        expected = self._expected.get(name)
        if expected is not None and (going := expected.going.get(peer)) is not None:
            return expected, going
        if self._called_off.has(late := f"{name} {peer.hex()}", time.monotonic()):
            self._called_off.discard(late)
            self._counts = replace(self._counts, late=self._counts.late + 1)
        else:
            self._drop(peer, f"data of {wire.short(name)} that nobody asked for")
        return None

    def _pull(self, peer: bytes, held: wire.Held) -> None:
        """Begin to read what a peer holds."""
        with self._lock:
            if (found := self._going(peer, held.name)) is None:
                return
        _, going = found
        if self._puller is None or (peer, held.name, going) in self._pulls.values():
            self._drop(peer, f"{wire.short(held.name)} is to be read, which nobody asked for")
            return
        try:
            pull = self._puller.start(held.metadata, held.address, going.nbytes)
        except PullError as e:
            self._not_pulled(peer, held.name, going, str(e))
        else:
            self._pulls[pull] = peer, held.name, going

    def _end_pulls(self) -> None:
        if self._puller is None:
            return
        for pull in self._puller.poll():
            peer, name, going = self._pulls.pop(pull)
            if pull.fault:
                self._not_pulled(peer, name, going, pull.fault)
                continue
            with self._lock:
                expected = self._expected.get(name)
                wanted = expected is not None and expected.going.get(peer) is going
                self._counts = replace(self._counts, late=self._counts.late + (not wanted))
            if wanted:  # and not offered anew meanwhile: the bytes may be others by now
                self._data(peer, name, pull.data, pulled=True)
            self._puller.release(pull)

    def _not_pulled(self, peer: bytes, name: str, going: _Going, reason: str) -> None:
        """Have the peer send over its connection what cannot be read."""
        with self._lock:
            self._counts = replace(self._counts, unpulled=self._counts.unpulled + 1)
            self._complaints.warn(
                f"unpulled {self._address(peer)}",
                "landing: NIXL did not bring %s of %s, which is asked for over TCP: %s",
                wire.short(name),
                self._address(peer),
                reason,
            )
            expected = self._expected.get(name)
            if expected is not None and expected.going.get(peer) is going and self._send(peer, wire.Go(name)):
                self._goes(expected, peer, going.nbytes, time.monotonic())

    def _read(self, expected: _Expected, data: memoryview) -> tuple[Verdict | None, str]:
        """What the reader makes of the bytes, and the reason when it does not take them."""
        try:
            verdict = expected.reader(data)
            return verdict, f"the record is {verdict.value}"
        except Exception as e:
            self._complaints.warn(
                "reader", "landing: the reader of %s failed", wire.short(expected.name), exc_info=True
            )
            return None, f"the reader failed: {type(e).__name__}: {e}"

    # -- answers

    def _refuse(self, peer: bytes, name: str, reason: str) -> None:
        self._counts = replace(self._counts, refused=self._counts.refused + 1)
        self._complaints.warn(
            f"refused {self._address(peer)}",
            "landing: %s of %s is refused: %s",
            wire.short(name),
            self._address(peer),
            reason,
        )
        self._send(peer, wire.Refused(name, wire.clip(reason)))

    def _drop(self, peer: bytes, reason: str) -> None:
        with self._lock:
            self._counts = replace(self._counts, dropped=self._counts.dropped + 1)
        self._complaints.warn(
            "dropped", "landing: a message of %s is dropped: %s", self._address(peer), reason
        )

    def _send(self, peer: bytes, reply: wire.Reply) -> bool:
        """False when the peer is gone, or reads nothing: it is forgotten, and greets anew if it is back."""
        try:
            self._socket.send_multipart([peer, self._codec.encode(reply)], zmq.NOBLOCK)
        except zmq.ZMQError as e:
            if e.errno not in (zmq.EHOSTUNREACH, zmq.EAGAIN):
                raise
            self._forget(peer)
            return False
        return True

    def _address(self, peer: bytes) -> str:
        known = self._peers.get(peer)
        return known.address if known else "an unknown peer"
