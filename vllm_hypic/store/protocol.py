"""What the store and its callers give each other."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum

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
    """Latencies since the last :meth:`.tiered.TieredStore.stats`."""
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
