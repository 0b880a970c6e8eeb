"""Transports: what carries a record's bytes from a sender to a receiver, once that was cleared to send.

| route | the sender's half | the receiver's half |
|---|---|---|
| ``TCP``, always there | has the bytes follow its header | gets them with the header |
| ``NIXL`` (``nixl.py``) | lays a copy out, and says where | reads it from there |
| ``TIER``, said by a router instead | stores it (``connector/``) | has its own store fetch it |

Each half belongs to one thread: that of the sender, or of the receiver.  None waits for the other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from . import wire


class Route(Enum):
    """How a record gets there."""

    TCP = "tcp"
    NIXL = "nixl"
    TIER = "tier"


class TransportError(Exception):
    """These bytes cannot come by this route: they have to take another one."""


@dataclass(frozen=True)
class Handover:
    """A record that a sender's transport has taken charge of."""

    message: wire.Data | wire.Held
    """Tells the receiver how to get the bytes."""
    inline: bool = False
    """The bytes follow the message as a frame of their own, uncopied; else nobody needs the caller's."""


class Outbound:
    """A sender's half."""

    route: Route

    @property
    def busy(self) -> bool:
        """Whether ``progress`` is to be called each millisecond."""
        return False

    def hand_over(self, name: str, data: memoryview) -> Handover | None:
        """Take charge of a record; ``None`` when there is no room at present."""
        raise NotImplementedError

    def release(self, handover: Handover) -> None:
        """The receiver has the record, or shall not get it this way any more."""

    def progress(self) -> None:
        """Serve those who read, as far as their network needs that."""

    def close(self) -> None:
        """Nobody can read from now on.  Nothing may be called afterwards."""


@dataclass(eq=False)
class Arrival:
    """A record's bytes on their way in."""

    data: memoryview
    """Whole once ``over`` without a ``fault``, and until the arrival is released."""
    over: bool = False
    fault: str = ""
    """Why they did not come; of an arrival that is over."""


class Inbound:
    """A receiver's half."""

    route: Route

    @property
    def busy(self) -> bool:
        """Whether ``poll`` is to be called each millisecond."""
        return False

    def start(self, message: wire.Data | wire.Held, payload: memoryview, nbytes: int) -> Arrival:
        """Begin to get ``nbytes`` as the sender's ``message`` says, which came with ``payload``.  The arrival
        may be over at once; else ``poll`` tells.  :class:`TransportError`: it cannot be done."""
        raise NotImplementedError

    def poll(self) -> Sequence[Arrival]:
        """Arrivals that are over since the last call, each told once.  Those without a fault are to be
        released."""
        return ()

    def release(self, arrival: Arrival) -> None:
        """The bytes of an arrival without a fault are no longer needed."""

    def close(self) -> None:
        """End everything, arrivals under way included.  Nothing may be called afterwards."""


class TcpOutbound(Outbound):
    """libzmq has the bytes on its connection."""

    route = Route.TCP

    def hand_over(self, name: str, data: memoryview) -> Handover:
        return Handover(wire.Data(name), inline=True)


class TcpInbound(Inbound):
    route = Route.TCP

    def start(self, message: wire.Data | wire.Held, payload: memoryview, nbytes: int) -> Arrival:
        return Arrival(payload, over=True)
