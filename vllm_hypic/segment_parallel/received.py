"""A receiver's reports to its owner: ends of expectations, and counts."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from .transport import Route


class Outcome(Enum):
    """Ways in which an expectation ends."""

    TAKEN = "taken"
    IN_TIER = "in a tier that its maker shares with this instance"
    WITHDRAWN = "withdrawn by a router"
    CLOSED = "the receiver is closed"


@dataclass(frozen=True)
class Received:
    """The end of an expectation."""

    name: str
    outcome: Outcome
    reason: str = ""
    """Why no sender brings the record; empty for a taken record."""
    nbytes: int = 0
    """Size of a taken record; else 0."""
    seconds: float = 0.0
    """Time from the clear-to-send until the reader took the bytes; 0 unless the record was taken."""
    route: Route | None = None
    """Route that the record took; ``TIER``: the owner must still fetch the record from the tier."""

    @property
    def taken(self) -> bool:
        return self.outcome is Outcome.TAKEN


@dataclass
class ReceiverCounts:
    """Counts since the receiver was opened."""

    offers: int = 0
    taken: int = 0
    refused: int = 0
    """Offers and records refused: too large, damaged or foreign, or the reader failed."""
    withdrawn: int = 0
    """Expected names that a router withdrew."""
    stored: int = 0
    """Expected names that a router reported to be in a shared tier."""
    bytes: int = 0
    """Bytes of records taken."""
    pulled: int = 0
    """Taken records that were read over NIXL; all other taken records came over TCP."""
    unpulled: int = 0
    """Records that NIXL could not read: the receiver told their senders to use TCP."""
    dropped: int = 0
    """Messages that violate the protocol."""
    late: int = 0
    """Records that arrived after a clear-to-send, when the receiver no longer wanted them."""
    unwelcome: int = 0
    """Greetings with another version or namespace."""
