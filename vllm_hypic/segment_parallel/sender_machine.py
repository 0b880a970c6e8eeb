"""The sender's half of the protocol, on one connection: a state machine without sockets, threads, clock."""

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
"""An offer without an answer is made again after so long, so that the other side does not forget it."""


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
    """Time since ``send``."""


class State(Enum):
    """How far a transfer is, in the words of its failure."""

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
    """The destination as its sender wrote it."""
    url: str
    """The same, in the one form that names its connection."""
    started: float
    deadline: float
    state: State = State.NEW
    offered: float = 0.0
    trackers: list[zmq.MessageTracker] = field(default_factory=list)
    """Trackers of ``data`` on its way through libzmq, on this connection or one that was lost."""
    outcome: Sent | None = None
    """Set once it is over; reported when libzmq has let go of ``data``."""
    _handed: tuple[Outbound, Handover] | None = None

    @property
    def released(self) -> bool:
        self.trackers = [tracker for tracker in self.trackers if not tracker.done]
        return not self.trackers

    def hand_over(self, transport: Outbound) -> Handover | None:
        """Have a transport take charge of the bytes; ``None`` when it has no room."""
        if (handover := transport.hand_over(self.name, self.data)) is not None:
            self._handed = transport, handover
        return handover

    def take_back(self) -> None:
        """No transport has charge of the bytes any more."""
        if self._handed is not None:
            transport, handover = self._handed
            transport.release(handover)
            self._handed = None

    def end(self, delivered: bool, reason: str, now: float) -> None:
        self.take_back()
        seconds = now - self.started
        self.outcome = Sent(self.ticket, self.name, self.destination, delivered, reason, seconds)


class Next(Enum):
    """What is to become of the connection."""

    KEEP = "nothing"
    RENEW = "closed and made anew, so that libzmq lets go of what it still has to send"
    CLOSE = "closed: the other side takes nothing"


class SenderMachine:
    """Brings transfers to one destination.  ``now`` is any clock that does not go back.

    Whoever moves the messages sends what is in ``outbox`` in order, each with the transfer's bytes as a
    second frame where there is one, and says ``lost`` when that cannot be done.  Of the transfers of one name
    the first is under way, and the others wait for it.
    """

    def __init__(
        self,
        url: str,
        hello: wire.Hello,
        transports: Sequence[Outbound],
        ended: list[Transfer],
        complaints: Complaints,
    ) -> None:
        """``transports``: the first that the other side can use and that has room takes a record.  ``ended``:
        where transfers that are over are put."""
        self._url, self._hello, self._transports, self._complaints = url, hello, transports, complaints
        self.ended = ended
        self.outbox: deque[tuple[wire.Request, Transfer | None]] = deque()
        self._queues: dict[str, deque[Transfer]] = {}
        self._greeted = False
        self._heard = False
        """Whether the destination has ever answered."""
        self.used: float = 0.0
        """When a transfer last began or ended."""

    @property
    def idle(self) -> bool:
        return not self._queues

    def transfers(self) -> Iterator[Transfer]:
        """Transfers that are not over."""
        return itertools.chain.from_iterable(self._queues.values())

    def send(self, transfer: Transfer, now: float) -> None:
        self.used = now
        queue = self._queues.setdefault(transfer.name, deque())
        queue.append(transfer)
        if self._greeted and queue[0] is transfer:
            self._offer(transfer, now)

    def lost(self) -> None:
        """The connection is lost, or the other side forgot it: all begins anew with ``Again``."""
        self.outbox.clear()
        self._greeted = False
        for transfer in self._firsts():
            transfer.state = State.NEW
            transfer.take_back()

    def handle(self, reply: wire.Reply, now: float) -> Next:
        """Take an answer.  :class:`~vllm_hypic.segment_parallel.wire.Malformed`: it answers nothing."""
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
                return Next.CLOSE  # it may become another: what is sent later asks again
            case wire.Withdrawn() | wire.Noted():
                raise wire.Malformed("it answers no request")
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
        """Time has passed: give up what is late, and renew offers."""
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
        """No transfer will be delivered."""
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
        """The record may be sent, or read where the other side says that it can do that."""
        if cleared.name not in self._queues:
            self._say(wire.Retract(cleared.name))
            return
        transfer = self._queues[cleared.name][0]
        if transfer.state is State.HELD and not cleared.pull:
            transfer.take_back()  # it could not be read
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
