"""The sender's half of the protocol on one connection: a state machine without sockets, threads and clock."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING

from . import wire
from .complaints import Complaints
from .transport import Handover, Outbound, Route

if TYPE_CHECKING:
    import zmq

RENEW_S = 10.0
"""Seconds after which an unanswered offer is repeated, so that the receiver does not forget the offer."""


@dataclass(frozen=True)
class Sent:
    """The end of a transfer."""

    ticket: int
    name: str
    destination: str
    delivered: bool
    """True when the receiver has taken the record, or does not need it."""
    reason: str
    """Why the record was not delivered or not needed; empty when the receiver took this record."""
    seconds: float
    """Seconds from ``send`` to the end."""


class State(Enum):
    """Progress of a transfer; the values are the reasons reported if the transfer fails in that state."""

    NEW = "the record was not offered"
    OFFERED = "the receiver did not expect the record"
    HELD = "the receiver did not confirm reading the record"
    SENDING = "the receiver did not confirm the record"


@dataclass(eq=False)
class Transfer:
    ticket: int
    name: str
    data: memoryview
    destination: str
    """The destination as the caller of ``send`` wrote it."""
    url: str
    """The destination in normal form, which is the key of its connection."""
    started: float
    deadline: float
    state: State = State.NEW
    offered: float = 0.0
    trackers: list[zmq.MessageTracker] = field(default_factory=list)
    """libzmq's trackers of ``data``, for the present connection and for lost connections."""
    outcome: Sent | None = None
    """Outcome of an ended transfer, which is reported once libzmq no longer reads ``data``."""
    _handed: tuple[Outbound, Handover] | None = None

    @property
    def released(self) -> bool:
        self.trackers = [tracker for tracker in self.trackers if not tracker.done]
        return not self.trackers

    def hand_over(self, transport: Outbound) -> Handover | None:
        """Hand the bytes over to ``transport`` and return its handover; ``None`` without room there."""
        if (handover := transport.hand_over(self.name, self.data)) is not None:
            self._handed = transport, handover
        return handover

    def take_back(self) -> None:
        """Release the handover, if any, so that no transport holds the bytes."""
        if self._handed is not None:
            transport, handover = self._handed
            transport.release(handover)
            self._handed = None

    def end(self, delivered: bool, reason: str, now: float) -> None:
        self.take_back()
        seconds = now - self.started
        self.outcome = Sent(self.ticket, self.name, self.destination, delivered, reason, seconds)


class Next(Enum):
    """Action that the caller must take on the connection."""

    KEEP = "nothing"
    RENEW = "closed and made anew, so that libzmq lets go of what it still has to send"
    CLOSE = "closed: the other side takes nothing"


class SenderMachine:
    """Bring transfers to one destination.  ``now`` is any clock that never goes back.

    The caller sends the messages in ``outbox`` in order, and calls :meth:`lost` when sending is impossible.
    A message with a transfer needs the transfer's bytes as a second frame.  Of several transfers with one
    name only the first is under way; all further transfers wait for its end.
    """

    def __init__(
        self,
        url: str,
        hello: wire.Hello,
        transports: Sequence[Outbound],
        ended: list[Transfer],
        complaints: Complaints,
    ) -> None:
        """Start without transfers.  ``transports``: in order of preference; a record takes the first
        transport that the receiver supports and that has room.  ``ended``: gets the ended transfers."""
        self._url, self._hello, self._transports, self._complaints = url, hello, transports, complaints
        self.ended = ended
        self.outbox: deque[tuple[wire.Request, Transfer | None]] = deque()
        self._queues: dict[str, deque[Transfer]] = {}
        self._greeted = False
        self._heard = False
        """Whether the destination has ever answered."""
        self.used: float = 0.0
        """Time at which a transfer last began or ended."""

    @property
    def idle(self) -> bool:
        return not self._queues

    def transfers(self) -> Iterator[Transfer]:
        """Return the open transfers."""
        return itertools.chain.from_iterable(self._queues.values())

    def send(self, transfer: Transfer, now: float) -> None:
        self.used = now
        queue = self._queues.setdefault(transfer.name, deque())
        queue.append(transfer)
        if self._greeted and queue[0] is transfer:
            self._offer(transfer, now)

    def lost(self) -> None:
        """Reset the transfers under way, after a lost connection or when the receiver has forgotten it.

        The next ``Again`` and ``Welcome`` restart the transfers."""
        self.outbox.clear()
        self._greeted = False
        for transfer in self._firsts():
            transfer.state = State.NEW
            transfer.take_back()

    def handle(self, reply: wire.Reply, now: float) -> Next:
        """Take an answer of the receiver, and return the action that the connection needs.

        Raises :class:`~vllm_hypic.segment_parallel.wire.Malformed` for an answer that only routers get."""
        self._heard = True
        match reply:
            case wire.Again():
                self.lost()
                self._say(self._hello)
            case wire.Welcome():
                self._greeted = True
                for transfer in self._firsts():
                    if transfer.state is State.NEW:
                        self._offer(transfer, now)
            case wire.Unwelcome():
                self._complaints.warn(self._url, "sender: rejected by %s: %s", self._url, reply.reason)
                self.end(f"rejected: {reply.reason}", now)
                return Next.CLOSE  # another receiver may listen there later: the next transfer greets again
            case wire.Withdrawn() | wire.Noted():
                raise wire.Malformed("the sender made no such request")
            case wire.ClearToSend():
                self._clear(reply)
            case wire.Ack():
                self._answered(reply.name, True, "", now)
            case wire.Done():
                self._answered(reply.name, True, "not needed", now)
            case wire.Nack():
                self._answered(reply.name, False, f"refused: {reply.reason}", now)
        return Next.KEEP

    def tick(self, now: float) -> Next:
        """Give up transfers past their deadline, repeat old offers, and return the action needed."""
        after = Next.KEEP
        for transfer in [t for t in self.transfers() if t.deadline <= now]:
            within = f"within {transfer.deadline - transfer.started:.3g} s"
            self._complaints.warn(
                self._url,
                "sender: record %s was not delivered to %s %s: %s",
                wire.short(transfer.name),
                self._url,
                within,
                self._why(transfer),
            )
            self._over(transfer, False, f"{self._why(transfer)} {within}", now)
            if not transfer.released:
                after = Next.RENEW
            if transfer.state is not State.NEW and transfer.name not in self._queues:
                self._say(wire.Retract(transfer.name))
        if self._greeted:
            for transfer in self._firsts():
                if transfer.state is State.OFFERED and now >= transfer.offered + RENEW_S:
                    self._offer(transfer, now)
        return after

    def end(self, reason: str, now: float) -> None:
        """End all transfers as not delivered, for ``reason``."""
        for transfer in self.transfers():
            transfer.end(False, reason, now)
            self.ended.append(transfer)
        self._queues.clear()
        self.used = now

    def _firsts(self) -> list[Transfer]:
        return [queue[0] for queue in self._queues.values()]

    def _answered(self, name: str, delivered: bool, reason: str, now: float) -> None:
        if queue := self._queues.get(name):
            self._over(queue[0], delivered, reason, now)

    def _clear(self, cleared: wire.ClearToSend) -> None:
        """Send the cleared record by the first transport with room that the receiver supports."""
        if cleared.name not in self._queues:
            self._say(wire.Retract(cleared.name))
            return
        transfer = self._queues[cleared.name][0]
        if transfer.state is State.HELD and not cleared.pull:
            transfer.take_back()  # the receiver could not read the bytes over NIXL
        elif transfer.state is not State.OFFERED:
            return
        for transport in self._transports:
            if transport.route is Route.NIXL and not cleared.pull:
                continue
            if handover := transfer.hand_over(transport):
                transfer.state = State.SENDING if handover.inline else State.HELD
                self.outbox.append((handover.message, transfer if handover.inline else None))
                return

    def _over(self, transfer: Transfer, delivered: bool, reason: str, now: float) -> None:
        queue = self._queues[transfer.name]
        was_first = queue[0] is transfer
        queue.remove(transfer)
        self.used = now
        transfer.end(delivered, reason, now)
        self.ended.append(transfer)
        if not queue:
            del self._queues[transfer.name]
        elif was_first and self._greeted:
            self._offer(queue[0], now)

    def _offer(self, transfer: Transfer, now: float) -> None:
        transfer.state, transfer.offered = State.OFFERED, now
        self._say(wire.Offer(transfer.name, transfer.data.nbytes))

    def _say(self, message: wire.Request) -> None:
        self.outbox.append((message, None))

    def _why(self, transfer: Transfer) -> str:
        if not self._heard:
            return "no answer (no receiver listens there, or its secret differs)"
        if not self._greeted:
            return "the connection was lost"
        return transfer.state.value
