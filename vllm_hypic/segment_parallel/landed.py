"""What a landing tells its owner: how expectations end, and what it has counted."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Landed:
    """The end of an expectation."""

    name: str
    taken: bool
    nbytes: int
    """0 unless taken."""
    seconds: float
    """From telling the sender to go until the reader had taken the bytes; 0 unless taken."""
    reason: str
    """Why it is not coming here; empty when taken."""
    pulled: bool = False
    """It was read over NIXL."""
    stored: bool = False
    """It can be read from a tier that its maker shares with this instance."""

    @staticmethod
    def in_a_tier(name: str) -> Landed:
        return Landed(name, False, 0, 0.0, "it is in a shared tier", stored=True)


@dataclass(frozen=True)
class LandingCounts:
    """Since the landing was opened."""

    offers: int = 0
    taken: int = 0
    refused: int = 0
    """Offers and records: too large, damaged, foreign, or the reader failed."""
    withdrawn: int = 0
    """Names that were expected when a router withdrew them."""
    stored: int = 0
    """Names that were expected when a router said that a shared tier has them."""
    bytes: int = 0
    """Of records taken."""
    pulled: int = 0
    """Records taken that were read over NIXL; the others came over TCP."""
    unpulled: int = 0
    """Records that NIXL could not read: their senders were told to send them over TCP."""
    dropped: int = 0
    """Messages of peers that do not keep to the protocol."""
    late: int = 0
    """Records whose sender had been told to go, and that were no longer wanted when they came."""
    unwelcome: int = 0
    """Greetings of other versions or namespaces."""
