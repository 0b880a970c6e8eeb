"""Transports: carry a record's bytes from a sender to a receiver, once the sender is cleared to send.

| route | the sender's half | the receiver's half |
|---|---|---|
| ``TCP``, always available | sends the bytes behind their header | gets the bytes with the header |
| ``NIXL`` (``nixl.py``) | copies the bytes, sends the copy's address | reads the copy at the address |
| ``TIER``, announced by a router | stores the record (``connector/``) | lets its own store fetch the record |

Only the sender's thread uses the sender's half, and only the receiver's thread the other half.  Neither half
waits for the other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from . import wire


class Route(Enum):
    """Ways in which a record gets from a sender to a receiver."""

    TCP = "tcp"
    NIXL = "nixl"
    TIER = "tier"


class TransportError(Exception):
    """Raised when a record's bytes cannot come by this route, and must take another route."""


@dataclass(frozen=True)
class Handover:
    """A record that a sender's transport has accepted for sending."""

    message: wire.Data | wire.Held
    """The message that tells the receiver how to get the bytes."""
    inline: bool = False
    """True: the caller's bytes follow the message as a second frame, uncopied.  False: the transport has its
    own copy."""


class Outbound:
    """A sender's half of a transport."""

    route: Route

    @property
    def busy(self) -> bool:
        """Whether the owner must call ``progress`` each millisecond."""
        return False

    def hand_over(self, name: str, data: memoryview) -> Handover | None:
        """Accept a record for sending; return ``None`` when the transport has no room at present."""
        raise NotImplementedError

    def release(self, handover: Handover) -> None:
        """Free a handover: the receiver has the record, or must no longer get it by this transport."""

    def progress(self) -> None:
        """Serve receivers that read, where their network needs that."""

    def close(self) -> None:
        """Make all further reads impossible.  No method may be called afterwards."""


@dataclass(eq=False)
class Arrival:
    """A record's bytes on their way to the receiver."""

    data: memoryview
    """The record's bytes; valid when ``over`` without ``fault``, until the arrival is released."""
    over: bool = False
    fault: str = ""
    """Why the bytes did not come; empty unless ``over``."""


class Inbound:
    """A receiver's half of a transport."""

    route: Route

    @property
    def busy(self) -> bool:
        """Whether the owner must call ``poll`` each millisecond."""
        return False

    def start(self, message: wire.Data | wire.Held, payload: memoryview, nbytes: int) -> Arrival:
        """Begin to receive ``nbytes`` bytes as the sender's ``message``, which came with ``payload``, says.

        The arrival may be over at once; else ``poll`` reports its end.  Raises :class:`TransportError` when
        the transport cannot receive the bytes."""
        raise NotImplementedError

    def poll(self) -> Sequence[Arrival]:
        """Return the arrivals that ended since the last call, each once; arrivals without a fault must be
        released."""
        return ()

    def release(self, arrival: Arrival) -> None:
        """Free the bytes of an arrival without a fault."""

    def close(self) -> None:
        """End the transport, including arrivals under way.  No method may be called afterwards."""


class TcpOutbound(Outbound):
    """Sends the caller's bytes through libzmq, on the connection of the message."""

    route = Route.TCP

    def hand_over(self, name: str, data: memoryview) -> Handover:
        return Handover(wire.Data(name), inline=True)


class TcpInbound(Inbound):
    route = Route.TCP

    def start(self, message: wire.Data | wire.Held, payload: memoryview, nbytes: int) -> Arrival:
        return Arrival(payload, over=True)
