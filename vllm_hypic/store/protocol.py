"""The store as the engine's worker sees it: nothing here blocks, nothing here raises for a tier's fault."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Protocol

from .cache_value import CacheValue, ObjectName


class Verdict(Enum):
    """A reader's answer to an object's bytes."""

    TAKEN = "taken"
    DAMAGED = "damaged"
    """Truncated, altered, or not a record: deleted and counted; the next tier is asked."""
    FOREIGN = "foreign"
    """A whole record of another model, version or layout: deleted and counted like a damaged one."""


Reader = Callable[[memoryview], Verdict]
"""Checks an object's bytes and takes them over.  Runs on a thread of the store, at most once at a time per
fetch, and never after that fetch was reported by ``poll``.  It may keep the view, which stays valid
as long as it is referenced."""


@dataclass
class Reservation:
    """Room for one object, to be filled by the caller: ``buffer`` of exactly ``nbytes``, writable."""

    name: ObjectName
    buffer: memoryview
    value: CacheValue


@dataclass(frozen=True)
class Fetched:
    """The end of a prefetch: ``tier`` that had the object, or ``None``: no tier has a sound one in time."""

    name: ObjectName
    tier: str | None
    seconds: float


class Presence(Enum):
    """Whether an object is in one tier."""

    THERE = "there"
    ABSENT = "absent"
    FAILED = "failed"
    """The tier cannot say, or did not take the object."""


@dataclass(frozen=True)
class Located:
    """The end of a ``locate``."""

    ticket: int
    presence: Presence
    reason: str
    """The fault, if it failed; else empty."""


@dataclass
class TierStats:
    """Counts since the store was opened, then levels."""

    hits: int = 0
    misses: int = 0
    corrupt: int = 0
    stored: int = 0
    refused: int = 0
    """Objects not taken, by admission or for want of room."""
    evictions: int = 0
    expired: int = 0
    errors: int = 0
    timeouts: int = 0
    read_bytes: int = 0
    written_bytes: int = 0
    read_seconds: list[float] = field(default_factory=list)
    """Latencies since the last :meth:`SegmentStore.stats`."""
    write_seconds: list[float] = field(default_factory=list)
    bytes_used: int = 0
    bytes_budget: int = 0
    """Bytes; 0 when unknown or unlimited."""
    objects: int = 0
    up: bool = True
    """False while the tier is bypassed."""


@dataclass
class StoreStats:
    tiers: dict[str, TierStats] = field(default_factory=dict)
    queued_bytes: int = 0
    """Bytes that were committed and are not yet in every tier."""
    dropped_writes: int = 0
    """Reservations refused because writing lags behind."""
    inflight: int = 0
    failed_writes: int = 0
    """Objects whose bytes could not be put together."""


@dataclass(frozen=True)
class Found:
    """The end of a ``find``: those of its names that a tier has, or only the first of them."""

    ticket: int
    names: tuple[ObjectName, ...]


class SegmentStore(Protocol):
    """Records outside the pool.  One thread calls it (the worker's); no call waits for a tier."""

    def reserve(self, name: ObjectName, value: CacheValue) -> Reservation | None:
        """Room to write an object of ``value.nbytes``; ``None`` when writing lags behind (try later)."""

    def commit(self, reservation: Reservation, finish: Callable[[memoryview], None] | None = None) -> None:
        """Hand the filled buffer over: ``finish`` (checksum) and the tiers' writes follow behind."""

    def abort(self, reservation: Reservation) -> None:
        """Give the room back unwritten."""

    def prefetch(self, name: ObjectName, limit: int, reader: Reader) -> bool:
        """Start fetching; False when no tier can have it (nothing started, nothing will be reported).

        Objects that are still being written are found.  One fetch per name at a time.
        """

    def poll(self) -> list[Fetched]:
        """Fetches that ended since the last call; each is reported once, and within the deadline."""

    def holds(self, name: ObjectName) -> bool:
        """Whether a tier that can tell has it, or it is being written.  Changes nothing."""

    def in_all_tiers(self, name: ObjectName) -> bool | None:
        """Whether every tier has it, or is to get it; ``None``: none is known to lack it, but some cannot
        tell.  Changes nothing."""

    def locate(self, name: ObjectName, tier: str) -> int:
        """Find out whether ``tier`` has the object: when its present write ends, else at once, by asking the
        tier.  Returns a ticket.  ``KeyError``: no such tier."""

    def located(self) -> list[Located]:
        """The answers found out since the last call; each ticket is reported once, within the deadlines."""

    def find(self, names: Sequence[ObjectName]) -> int:
        """Find out which of ``names`` a tier has: all of these, where it can tell at once, else the first one
        at least.  Returns a ticket."""

    def found(self) -> list[Found]:
        """The answers found out since the last call; each ticket is reported once, within the deadlines."""

    def delete(self, name: ObjectName) -> None: ...

    def pin(self, name: ObjectName) -> None: ...

    def unpin(self, name: ObjectName) -> None: ...

    def expire(self, name: ObjectName, at: float | None) -> None: ...

    def clear(self) -> None: ...

    def drain(self, timeout_s: float) -> bool:
        """Wait until all that was committed is in the tiers that are up.  False: time is over."""

    def stats(self) -> StoreStats: ...

    def close(self) -> None:
        """Write what is queued (for a bounded time), then release everything."""
