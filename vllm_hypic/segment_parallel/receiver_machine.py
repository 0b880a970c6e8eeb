"""The receiver's half of the protocol: a state machine without sockets, threads and clock.

The owner announces a name by ``expect``; senders offer the name before or after that; one sender at a time is
cleared to send.  Bytes cross the network only for expected names and agreed sizes.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from dataclasses import dataclass, field

from ..store.protocol import Reader
from . import wire
from .complaints import Complaints
from .offers import Offers, Recent
from .received import Outcome, Received, ReceiverCounts
from .transport import Route

MOST_OFFERS = 4096
MOST_SETTLED = 4096
MOST_WITHDRAWN = 4096
MOST_PEERS = 16384
"""Limit on peers; beyond it the least recently heard peer is forgotten, and greets again when it speaks."""
REMEMBER_S = 120.0
"""Seconds that an offer waits for its name to be expected (senders renew offers), and ``settle`` lasts."""
WITHDRAWAL_S = 10.0
"""Seconds that a router's message waits for its name to be expected, as routers may precede the engine."""
SEND_S, SEND_BYTES_PER_S = 10.0, 10e6
"""A cleared sender has ``SEND_S + nbytes / SEND_BYTES_PER_S`` seconds before the next sender is cleared."""


@dataclass(eq=False)
class Grant:
    """A peer's clearance to send a record."""

    name: str
    peer: bytes
    nbytes: int
    pull: bool
    """Whether the peer may send the bytes' address (``Held``) instead of the bytes."""
    since: float
    until: float
    """Time after which another peer may be cleared as well."""
    reading: bool = False
    """Whether the peer has sent the bytes' address."""


@dataclass(eq=False)
class Expected:
    name: str
    limit: int
    reader: Reader
    grants: OrderedDict[bytes, Grant] = field(default_factory=OrderedDict)
    """Grants by peer, the newest last; all grants before the newest are late."""


@dataclass(frozen=True)
class _Peer:
    sender: str
    address: str


class ReceiverMachine:
    """Take messages of peers and calls of the owner; put replies into ``outbox``, and ends of expectations
    into ``ended``.  Only one thread at a time may use a machine; ``now`` is any clock that never goes back.

    The caller sends the replies in ``outbox`` in order, and calls :meth:`lost` for a peer that cannot be
    reached.  When :meth:`handle` returns a grant, its bytes are there or can be read: the caller then calls
    :meth:`arrived` or :meth:`failed`, and :meth:`judged` once the reader has seen the bytes.
    """

    def __init__(
        self, namespace: str, max_nbytes: int, complaints: Complaints, *, pull: bool, send_s: float = SEND_S
    ) -> None:
        """Start without peers and expectations.  ``pull``: senders may send addresses instead of bytes."""
        self._namespace, self._max_nbytes, self._complaints = namespace, max_nbytes, complaints
        self._pull, self._send_s = pull, send_s
        self.outbox: deque[tuple[bytes, wire.Reply]] = deque()
        self.ended: deque[Received] = deque()
        self.counts = ReceiverCounts()
        self._closed = False
        self._expected: dict[str, Expected] = {}
        self._offers = Offers(MOST_OFFERS, REMEMBER_S)
        self._settled = Recent(MOST_SETTLED, REMEMBER_S)
        self._called_off = Recent(MOST_OFFERS, REMEMBER_S)
        """Keys (:func:`_late_key`) of grants called off, whose bytes may still arrive late."""
        self._withdrawn = Recent(MOST_WITHDRAWN, WITHDRAWAL_S)
        self._stored = Recent(MOST_WITHDRAWN, WITHDRAWAL_S)
        self._peers: OrderedDict[bytes, _Peer] = OrderedDict()
        """Peers that have greeted, the least recently heard peer first."""
        self._peer_of: dict[str, bytes] = {}
        """Peers by their sender's id."""

    @property
    def waiting(self) -> bool:
        """Whether both expectations and offers exist: then the caller must call ``tick`` soon."""
        return bool(self._expected) and len(self._offers) > 0

    # -- the owner

    def expect(self, name: str, limit: int, reader: Reader, now: float) -> None:
        """Take a record ``name`` of at most ``limit`` bytes from now on.

        Raises ``ValueError`` for a malformed name, a limit below 1, and a name that is expected already."""
        wire.check_name(name)
        if limit < 1:
            raise ValueError(f"limit={limit}: expected at least 1 byte")
        if name in self._expected:
            raise ValueError(f"segment {name} is expected already")
        self._settled.discard(name)
        if self._closed:
            self._end(name, Outcome.CLOSED, Outcome.CLOSED.value)
        elif self._withdrawn.pop(name, now):
            self._end(name, Outcome.WITHDRAWN, "withdrawn by the router before it was expected")
        elif self._stored.pop(name, now):
            self._stop_expecting(name, now)  # tells the senders that offer the record
            self._end_in_tier(name, now)
        else:
            self._expected[name] = Expected(name, min(limit, self._max_nbytes), reader)
            self._grant(name, now)

    def withdraw(self, name: str, now: float) -> None:
        """Stop expecting ``name``, drop its unread report, and forget that its record is here."""
        self._stop_expecting(name, now)
        self._settled.discard(name)
        if any(received.name == name for received in self.ended):
            self.ended = deque(received for received in self.ended if received.name != name)

    def settle(self, name: str, now: float) -> None:
        """Withdraw ``name``, whose record is here; answer offers of it with ``Done`` for ``REMEMBER_S``."""
        wire.check_name(name)
        self.withdraw(name, now)
        self._settled.add(name, now)

    def is_offered(self, name: str) -> bool:
        """Whether a sender offers or sends ``name``, or ``name`` is no longer expected."""
        expected = self._expected.get(name)
        return expected is None or bool(expected.grants) or bool(self._offers.of(name))

    def close(self) -> None:
        """End all present expectations, and every later expectation at once."""
        self._closed = True
        for name in self._expected:
            self._end(name, Outcome.CLOSED, Outcome.CLOSED.value)
        self._expected.clear()

    # -- peers

    def connected(self, peer: bytes) -> None:
        self._reply(peer, wire.Again())

    def greet(self, peer: bytes, hello: wire.Hello, address: str, now: float) -> None:
        """Admit a peer, or reject a peer of another version or namespace.  ``address``: for the log."""
        self.lost(peer, now)
        reason = ""
        if hello.version != wire.VERSION:
            reason = f"transfer protocol {hello.version}: expected {wire.VERSION}; use one vllm-hypic version"
        elif hello.namespace != self._namespace:
            reason = (
                f"namespace {hello.namespace}: this instance has {self._namespace}; model, weights and "
                "options that change records must be the same"
            )
        if reason:
            self.counts.unwelcome += 1
            self._complaints.warn(f"unwelcome {address}", "receiver: rejects %s: %s", address, reason)
            self._reply(peer, wire.Unwelcome(wire.clip(reason)))
            return
        if (before := self._peer_of.get(hello.sender)) is not None:
            self.lost(before, now)  # the same sender has a new connection
        self._peers[peer] = _Peer(hello.sender, address)
        self._peer_of[hello.sender] = peer
        if len(self._peers) > MOST_PEERS:
            self.lost(next(iter(self._peers)), now)
        self._reply(peer, wire.Welcome())

    def handle(self, peer: bytes, request: wire.Request, now: float) -> Grant | None:
        """Take any message but a greeting; return a grant when the caller must now receive its bytes."""
        if peer not in self._peers:
            self._reply(peer, wire.Again())
            return None
        self._peers.move_to_end(peer)
        match request:
            case wire.Data() | wire.Held():
                return self._used_grant(peer, request, now)
            case wire.Offer():
                self._offer(peer, request, now)
            case wire.Retract():
                self._retract(peer, request.name, now)
            case wire.Withdraw():
                self._withdraw(peer, request.names, now)
            case wire.Stored():
                self._note_stored(peer, request.names, now)
        return None

    def lost(self, peer: bytes, now: float) -> None:
        """Forget a peer that is gone or connects anew, with all its offers and grants."""
        known = self._peers.pop(peer, None)
        if known is None:
            return
        if self._peer_of.get(known.sender) == peer:
            del self._peer_of[known.sender]
        self._offers.drop_peer(peer)
        for expected in list(self._expected.values()):
            if expected.grants.pop(peer, None) is not None:
                self._grant(expected.name, now)

    def drop(self, peer: bytes, reason: str) -> None:
        """Count and log a message of ``peer`` that is malformed or unrequested; no other state changes."""
        self.counts.dropped += 1
        who = self._address(peer)
        self._complaints.warn("dropped", "receiver: drops a message of %s: %s", who, reason)

    # -- bytes

    def arrived(self, grant: Grant, nbytes: int, now: float) -> Expected | None:
        """Return the expectation whose reader must see the ``nbytes`` bytes that have arrived.

        Returns ``None`` when the grant no longer holds, or the number of bytes differs from the offer."""
        expected = self._current(grant)
        if expected is None:  # withdrawn, or offered anew meanwhile, possibly with other bytes
            self.counts.late += 1
            return None
        del expected.grants[grant.peer]
        if nbytes != grant.nbytes:
            self._refuse(grant.peer, grant.name, f"{nbytes} bytes received, {grant.nbytes} offered")
            self._grant(grant.name, now)
            return None
        return expected

    def failed(self, grant: Grant, reason: str, now: float) -> None:
        """Clear the peer to send bytes over TCP that NIXL cannot read, if the grant still holds."""
        self.counts.unpulled += 1
        what, who = wire.short(grant.name), self._address(grant.peer)
        message = "receiver: NIXL did not bring record %s of %s, which now comes over TCP: %s"
        self._complaints.warn(f"unpulled {who}", message, what, who, reason)
        if (expected := self._current(grant)) is not None:
            self._clear_to_send(expected, grant.peer, grant.nbytes, False, now)

    def judged(self, grant: Grant, expected: Expected, fault: str, route: Route, now: float) -> None:
        """Answer the peer after the reader has taken the bytes, or has refused them (reason in ``fault``)."""
        name, counts = grant.name, self.counts
        if self._expected.get(name) is not expected:  # withdrawn meanwhile
            self._reply(grant.peer, wire.Done(name))
        elif fault:
            self._refuse(grant.peer, name, fault)
            self._grant(name, now)
        else:
            counts.taken, counts.bytes = counts.taken + 1, counts.bytes + grant.nbytes
            counts.pulled += route is Route.NIXL
            self._reply(grant.peer, wire.Ack(name))
            self._stop_expecting(name, now)
            self._settled.add(name, now)
            self.ended.append(Received(name, Outcome.TAKEN, "", grant.nbytes, now - grant.since, route))

    def tick(self, now: float) -> None:
        """Forget expired names and offers, and clear the next sender where a cleared sender is late."""
        for memory in (self._settled, self._withdrawn, self._stored, self._called_off, self._offers):
            memory.expire(now)
        if len(self._offers):
            for name in list(self._expected):
                self._grant(name, now)

    # -- what the messages do

    def _offer(self, peer: bytes, offer: wire.Offer, now: float) -> None:
        name = offer.name
        self.counts.offers += 1
        expected = self._expected.get(name)
        limit = expected.limit if expected else self._max_nbytes
        if expected is None and self._settled.has(name, now):
            self._reply(peer, wire.Done(name))
        elif offer.nbytes > limit:
            self._refuse(peer, name, f"the record has {offer.nbytes} bytes; expected at most {limit}")
        else:
            self._withdrawn.discard(name)
            self._offers.add(name, peer, offer.nbytes, now)
            self._grant(name, now)

    def _retract(self, peer: bytes, name: str, now: float) -> None:
        self._offers.pop(name, peer)
        expected = self._expected.get(name)
        if expected is not None and expected.grants.pop(peer, None) is not None:
            self._grant(name, now)

    def _withdraw(self, peer: bytes, names: list[str], now: float) -> None:
        for name in names:
            if name in self._expected:
                self._stop_expecting(name, now)
                self.counts.withdrawn += 1
                self._end(name, Outcome.WITHDRAWN, f"withdrawn by the router at {self._address(peer)}")
            elif not self._settled.has(name, now):
                self._stop_expecting(name, now)  # senders that offer the name are told
                self._withdrawn.add(name, now)
                self._stored.discard(name)
        self._reply(peer, wire.Withdrawn())

    def _note_stored(self, peer: bytes, names: list[str], now: float) -> None:
        """End the expectations of ``names``, which a shared tier has; their senders get ``Done``.

        ``Done`` is right for each name: the record will come from the tier, or be computed here."""
        for name in names:
            if name in self._expected:
                self._stop_expecting(name, now)
                self.counts.stored += 1
                self._end_in_tier(name, now)
            elif not self._settled.has(name, now):
                self._withdrawn.discard(name)
                self._stored.add(name, now)
        self._reply(peer, wire.Noted())

    def _used_grant(self, peer: bytes, message: wire.Data | wire.Held, now: float) -> Grant | None:
        """Return the grant that allows this message; ``None`` without a grant, which counts the message."""
        name = message.name
        expected = self._expected.get(name)
        grant = expected.grants.get(peer) if expected else None
        if grant is None:
            if self._called_off.pop(_late_key(name, peer), now):
                self.counts.late += 1
            else:
                self.drop(peer, f"this receiver did not request record {wire.short(name)}")
        elif isinstance(message, wire.Held):
            if grant.reading or not grant.pull:
                self.drop(peer, f"this receiver did not request record {wire.short(name)} over NIXL")
                return None
            grant.reading = True
        return grant

    # -- clearance to send

    def _grant(self, name: str, now: float) -> None:
        """Clear the first sender that offers ``name``, unless a cleared sender still has time."""
        expected = self._expected.get(name)
        if expected is None:
            return
        for offered in self._offers.of(name):
            if expected.grants and not self._late(expected, now):
                return
            self._offers.pop(name, offered.peer)
            if offered.nbytes > expected.limit:
                reason = f"the record has {offered.nbytes} bytes; expected at most {expected.limit}"
                self._refuse(offered.peer, name, reason)
            else:
                self._clear_to_send(expected, offered.peer, offered.nbytes, self._pull, now)

    def _clear_to_send(self, expected: Expected, peer: bytes, nbytes: int, pull: bool, now: float) -> None:
        until = now + self._send_s + nbytes / SEND_BYTES_PER_S
        expected.grants.pop(peer, None)
        expected.grants[peer] = Grant(expected.name, peer, nbytes, pull, now, until)
        self._reply(peer, wire.ClearToSend(expected.name, pull))

    def _late(self, expected: Expected, now: float) -> bool:
        """Whether the last cleared sender is too slow.  The added ``Welcome`` reveals a peer that is gone."""
        grant = next(reversed(expected.grants.values()))
        self._reply(grant.peer, wire.Welcome())
        if now < grant.until:
            return False
        self._complaints.warn(
            "late",
            "receiver: record %s of %s has not arrived for %.0f s; another sender may send it now",
            wire.short(expected.name),
            self._address(grant.peer),
            now - grant.since,
        )
        return True

    def _current(self, grant: Grant) -> Expected | None:
        """Return the expectation that ``grant`` belongs to; ``None`` when the grant no longer holds."""
        expected = self._expected.get(grant.name)
        return expected if expected is not None and expected.grants.get(grant.peer) is grant else None

    def _stop_expecting(self, name: str, now: float) -> None:
        """Drop expectation, grants and offers of ``name``; each peer with a grant or offer gets ``Done``."""
        expected = self._expected.pop(name, None)
        cleared = list(expected.grants) if expected else []
        for peer in (*cleared, *(offered.peer for offered in self._offers.pop_name(name))):
            self._reply(peer, wire.Done(name))
        for peer in cleared:
            self._called_off.add(_late_key(name, peer), now)

    # -- answers

    def _end(self, name: str, outcome: Outcome, reason: str) -> None:
        self.ended.append(Received(name, outcome, reason))

    def _end_in_tier(self, name: str, now: float) -> None:
        self.ended.append(Received(name, Outcome.IN_TIER, "the record is in a shared tier", route=Route.TIER))
        self._settled.add(name, now)

    def _refuse(self, peer: bytes, name: str, reason: str) -> None:
        self.counts.refused += 1
        what, who = wire.short(name), self._address(peer)
        self._complaints.warn(f"refused {who}", "receiver: refuses record %s of %s: %s", what, who, reason)
        self._reply(peer, wire.Nack(name, wire.clip(reason)))

    def _reply(self, peer: bytes, reply: wire.Reply) -> None:
        self.outbox.append((peer, reply))

    def _address(self, peer: bytes) -> str:
        known = self._peers.get(peer)
        return known.address if known else "an unknown peer"


def _late_key(name: str, peer: bytes) -> str:
    return f"{name} {peer.hex()}"
