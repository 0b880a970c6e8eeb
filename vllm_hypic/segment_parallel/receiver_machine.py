"""The receiver's half of the protocol: a state machine without sockets, threads and clock.

Who expects a name says so (``expect``); who has it offers it, before or after that; one sender at a time is
cleared to send.  Bytes cross the network only for names that are expected and sizes that were agreed to.
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
"""Peers that are more must greet again, which they do unasked."""
REMEMBER_S = 120.0
"""How long an offer waits for its name to be expected (senders renew theirs), and ``settle`` lasts."""
WITHDRAWAL_S = 10.0
"""How long a router's word on a name waits for it to be expected: a router may be faster than the engine."""
SEND_S, SEND_BYTES_PER_S = 10.0, 10e6
"""Who was cleared to send has ``SEND_S + nbytes / SEND_BYTES_PER_S`` before another may try as well."""


@dataclass(eq=False)
class Grant:
    """A peer was cleared to send a record."""

    name: str
    peer: bytes
    nbytes: int
    pull: bool
    """It may say where the bytes lie instead of sending them."""
    since: float
    until: float
    """Then another may try as well."""
    reading: bool = False
    """It has said where."""


@dataclass(eq=False)
class Expected:
    name: str
    limit: int
    reader: Reader
    grants: OrderedDict[bytes, Grant] = field(default_factory=OrderedDict)
    """Grants by peer, the newest last: those before it are late."""


@dataclass(frozen=True)
class _Peer:
    sender: str
    address: str


class ReceiverMachine:
    """Takes messages of peers and calls of the owner; leaves replies in ``outbox``, ends of expectations in
    ``ended``.  For one thread at a time; ``now`` is any clock that does not go back.

    Whoever moves the messages sends what is in ``outbox`` in order, and says ``lost`` of a peer to which
    that cannot be done.  :meth:`handle` returns a grant whose bytes are there or can be read: then
    :meth:`arrived` or :meth:`failed` follows, and :meth:`judged` once the reader has looked at them.
    """

    def __init__(
        self, namespace: str, max_nbytes: int, complaints: Complaints, *, pull: bool, send_s: float = SEND_S
    ) -> None:
        """``pull``: senders may say where the bytes lie instead of sending them."""
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
        """Name and peer of what may still come late."""
        self._withdrawn = Recent(MOST_WITHDRAWN, WITHDRAWAL_S)
        self._stored = Recent(MOST_WITHDRAWN, WITHDRAWAL_S)
        self._peers: OrderedDict[bytes, _Peer] = OrderedDict()
        """Peers that have greeted, the least recently heard first."""
        self._peer_of: dict[str, bytes] = {}
        """Peers by their sender's id."""

    @property
    def waiting(self) -> bool:
        """Whether something is expected and something offered: then ``tick`` is due soon."""
        return bool(self._expected) and len(self._offers) > 0

    # -- the owner

    def expect(self, name: str, limit: int, reader: Reader, now: float) -> None:
        """From now on a record ``name`` of at most ``limit`` bytes is taken.

        ``ValueError``: no object name, a limit below 1, or expected already."""
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
            self._stop_expecting(name, now)  # who offers it as well is told
            self._end_in_tier(name, now)
        else:
            self._expected[name] = Expected(name, min(limit, self._max_nbytes), reader)
            self._grant(name, now)

    def withdraw(self, name: str, now: float) -> None:
        """Expect ``name`` no longer, report nothing of it, and forget that it is there."""
        self._stop_expecting(name, now)
        self._settled.discard(name)
        if any(received.name == name for received in self.ended):
            self.ended = deque(received for received in self.ended if received.name != name)

    def settle(self, name: str, now: float) -> None:
        """``name`` is there: withdrawn, and who offers it is told so for a while."""
        wire.check_name(name)
        self.withdraw(name, now)
        self._settled.add(name, now)

    def is_offered(self, name: str) -> bool:
        """Whether somebody offers or sends ``name``, or it is expected no longer."""
        expected = self._expected.get(name)
        return expected is None or bool(expected.grants) or bool(self._offers.of(name))

    def close(self) -> None:
        """End all expectations, those to come included."""
        self._closed = True
        for name in self._expected:
            self._end(name, Outcome.CLOSED, Outcome.CLOSED.value)
        self._expected.clear()

    # -- peers

    def connected(self, peer: bytes) -> None:
        self._reply(peer, wire.Again())

    def greet(self, peer: bytes, hello: wire.Hello, address: str, now: float) -> None:
        """Let a peer in, or turn it away.  ``address``: where it is, for the log."""
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
            self.lost(before, now)  # it has connected anew
        self._peers[peer] = _Peer(hello.sender, address)
        self._peer_of[hello.sender] = peer
        if len(self._peers) > MOST_PEERS:
            self.lost(next(iter(self._peers)), now)
        self._reply(peer, wire.Welcome())

    def handle(self, peer: bytes, request: wire.Request, now: float) -> Grant | None:
        """Take a message that is no greeting.  A grant is returned when its bytes are to be got."""
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
        """The peer is gone, or begins anew: what it offered and was told is void."""
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
        """A message of the peer is not understood, or was not asked for: it changes nothing."""
        self.counts.dropped += 1
        who = self._address(peer)
        self._complaints.warn("dropped", "receiver: drops a message of %s: %s", who, reason)

    # -- bytes

    def arrived(self, grant: Grant, nbytes: int, now: float) -> Expected | None:
        """The bytes are there: what expects them, whose reader is to see them; ``None`` when nothing does,
        or they are not as many as were offered."""
        expected = self._current(grant)
        if expected is None:  # withdrawn, or offered anew meanwhile: the bytes may be others by now
            self.counts.late += 1
            return None
        del expected.grants[grant.peer]
        if nbytes != grant.nbytes:
            self._refuse(grant.peer, grant.name, f"it has {nbytes} bytes; the offer said {grant.nbytes}")
            self._grant(grant.name, now)
            return None
        return expected

    def failed(self, grant: Grant, reason: str, now: float) -> None:
        """The bytes cannot be read where they lie: their peer is to send them."""
        self.counts.unpulled += 1
        what, who = wire.short(grant.name), self._address(grant.peer)
        message = "receiver: NIXL did not bring record %s of %s, which now comes over TCP: %s"
        self._complaints.warn(f"unpulled {who}", message, what, who, reason)
        if (expected := self._current(grant)) is not None:
            self._clear_to_send(expected, grant.peer, grant.nbytes, False, now)

    def judged(self, grant: Grant, expected: Expected, fault: str, route: Route, now: float) -> None:
        """The reader has taken the bytes, or says why not (``fault``)."""
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
        """Time has passed: forget what is old, and let others try where somebody takes too long."""
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
            self._refuse(peer, name, f"it has {offer.nbytes} bytes; expected at most {limit}")
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
                self._stop_expecting(name, now)  # who offers it is told
                self._withdrawn.add(name, now)
                self._stored.discard(name)
        self._reply(peer, wire.Withdrawn())

    def _note_stored(self, peer: bytes, names: list[str], now: float) -> None:
        """Who offers these is told that they are here: they will be, from the tier or computed."""
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
        """The grant that allows this message; ``None``, and counted, when there is none."""
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

    # -- who may send

    def _grant(self, name: str, now: float) -> None:
        """Clear the first that offers ``name`` to send, unless another is on its way."""
        expected = self._expected.get(name)
        if expected is None:
            return
        for offered in self._offers.of(name):
            if expected.grants and not self._late(expected, now):
                return
            self._offers.pop(name, offered.peer)
            if offered.nbytes > expected.limit:
                reason = f"it has {offered.nbytes} bytes; expected at most {expected.limit}"
                self._refuse(offered.peer, name, reason)
            else:
                self._clear_to_send(expected, offered.peer, offered.nbytes, self._pull, now)

    def _clear_to_send(self, expected: Expected, peer: bytes, nbytes: int, pull: bool, now: float) -> None:
        until = now + self._send_s + nbytes / SEND_BYTES_PER_S
        expected.grants.pop(peer, None)
        expected.grants[peer] = Grant(expected.name, peer, nbytes, pull, now, until)
        self._reply(peer, wire.ClearToSend(expected.name, pull))

    def _late(self, expected: Expected, now: float) -> bool:
        """Whether the one cleared last takes too long.  If it is gone, the welcome finds that out."""
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
        """What expects the grant's bytes, if it still does."""
        expected = self._expected.get(grant.name)
        return expected if expected is not None and expected.grants.get(grant.peer) is grant else None

    def _stop_expecting(self, name: str, now: float) -> None:
        """Whoever sends or offers it is told."""
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
        self.ended.append(Received(name, Outcome.IN_TIER, "it is in a shared tier", route=Route.TIER))
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
