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


@dataclass
class Look:
    """A look for objects, which the store fills in."""

    there: frozenset[ObjectName] | None = None
    """``None``: it is not known yet."""
    fault: str = ""
    """Why a tier cannot say, or did not take an object; else empty."""


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


class SegmentStore(Protocol):
    """Records outside the pool.  One thread calls it (the worker's); no call waits for a tier."""

    def reserve(self, name: ObjectName, value: CacheValue) -> Reservation | None:
        """Room to write an object of ``value.nbytes``; ``None`` when writing lags behind (try later)."""

    def commit(
        self,
        reservation: Reservation,
        finish: Callable[[memoryview], None] | None = None,
        rests_on: tuple[ObjectName, ...] = (),
    ) -> None:
        """Hand the filled buffer over: ``finish`` (checksum) and the tiers' writes follow behind.  What the
        object ``rests_on`` counts as used, so that tiers keep it longer."""

    def abort(self, reservation: Reservation) -> None:
        """Give the room back unwritten."""

    def prefetch(self, name: ObjectName, limit: int, reader: Reader, spent_s: float = 0.0) -> bool:
        """Start fetching; False when no tier can have it (nothing started, nothing will be reported).

        Objects that are still being written are found.  One fetch per name at a time.  ``spent_s``: the part
        of the deadline that fetching what comes before it has taken.
        """

    def poll(self) -> list[Fetched]:
        """Fetches that ended since the last call; each is reported once, and within the deadline."""

    def holds(self, name: ObjectName) -> bool:
        """Whether a tier that can tell has it, or it is being written.  Changes nothing."""

    def in_all_tiers(self, name: ObjectName) -> bool | None:
        """Whether every tier has it, or is to get it; ``None``: none is known to lack it, but some cannot
        tell.  Changes nothing."""

    def look_for(self, names: Sequence[ObjectName], tier: str | None = None) -> Look:
        """Find out within the deadline which of ``names`` a tier has: all of these where it can tell at once,
        else the first one at least.  ``tier``: this one is asked, once their present writes to it have ended
        (``KeyError``: there is none); otherwise all are, and what is being written is there."""

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
