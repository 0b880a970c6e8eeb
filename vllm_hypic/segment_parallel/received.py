"""What a receiver tells its owner: how expectations end, and what it has counted."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from .transport import Route


class Outcome(Enum):
    """How an expectation ends."""

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
    """Why it is not coming here; empty when taken."""
    nbytes: int = 0
    """0 unless taken."""
    seconds: float = 0.0
    """Time from clearing the sender to send until the reader had taken the bytes; 0 unless taken."""
    route: Route | None = None
    """How it came; ``TIER`` when it is still to be fetched from there."""

    @property
    def taken(self) -> bool:
        return self.outcome is Outcome.TAKEN


@dataclass
class ReceiverCounts:
    """Counts since the receiver was opened."""

    offers: int = 0
    taken: int = 0
    refused: int = 0
    """Offers and records: too large, damaged, foreign, or the reader failed."""
    withdrawn: int = 0
    """Names that were expected when a router withdrew them."""
    stored: int = 0
    """Names that were expected when a router said that a shared tier has them."""
    bytes: int = 0
    """Bytes of records taken."""
    pulled: int = 0
    """Records taken that were read over NIXL; the others came over TCP."""
    unpulled: int = 0
    """Records that NIXL could not read: their senders were told to send them over TCP."""
    dropped: int = 0
    """Messages of peers that do not keep to the protocol."""
    late: int = 0
    """Records whose sender had been cleared to send, and that were no longer wanted when they came."""
    unwelcome: int = 0
    """Greetings of other versions or namespaces."""
