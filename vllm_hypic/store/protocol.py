"""Types that the store and its callers exchange: names and cache values of objects, requests and answers.

A cache value is the FLOPs that a hit saves, and the bytes that the object takes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from typing import NewType

ObjectName = NewType("ObjectName", str)
"""The name of one object in a tier: a segment key (64 hex digits) and ``.<rank>-<world>``.  The name has
at most 96 characters of ``[0-9a-f.-]``, so that a file can have it."""


def object_name(key: str, rank: int = 0, world: int = 1) -> ObjectName:
    """Return the name of one rank's record in the tiers: every rank stores its own heads."""
    return ObjectName(f"{key}.{rank}-{world}")


@dataclass(frozen=True)
class CacheValue:
    """The ``tokens`` and ``flops`` of the prefill that a hit saves, and the ``nbytes`` of the record."""

    tokens: int
    flops: float
    nbytes: int

    @property
    def flops_per_byte(self) -> float:
        return self.flops / max(1, self.nbytes)


class Verdict(Enum):
    """A reader's answer to an object's bytes."""

    TAKEN = "taken"
    DAMAGED = "damaged"
    """A truncated or altered object, or no record: the store deletes and counts it, then asks the next
    tier."""
    FOREIGN = "foreign"
    """A whole record of another model, version or layout: the store treats it like a damaged object."""


Reader = Callable[[memoryview], Verdict]
"""Checks an object's bytes and takes them over.  A reader runs on a thread of the store, at most once at a
time per fetch, and never after ``poll`` reports the fetch.  A reader may keep the view, which stays valid
as long as it is referenced."""


@dataclass
class Reservation:
    """Room for one object: the caller fills ``buffer``, a writable view of exactly ``value.nbytes`` bytes."""

    name: ObjectName
    buffer: memoryview
    value: CacheValue


@dataclass(frozen=True)
class Fetched:
    """The end of a prefetch.  ``tier``: the object's source; ``None``: no tier had a sound object in time.
    ``absent``: all tiers answered, and no tier has the object."""

    name: ObjectName
    tier: str | None
    seconds: float
    absent: bool = False


@dataclass
class LookupResult:
    """The result of a search for objects, which the store fills in."""

    found: frozenset[ObjectName] | None = None
    """The objects that the store found; ``None``: the search still runs."""
    error: str = ""
    """The reason why a tier cannot answer, or did not take an object; empty without a fault."""


@dataclass
class TierStats:
    """Counts since the store was opened, then levels."""

    hits: int = 0
    misses: int = 0
    corrupt: int = 0
    stored: int = 0
    refused: int = 0
    """Objects that the tier did not take because of admission, missing room, or a bypass."""
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
    """Budget in bytes; 0 when unknown or unlimited."""
    objects: int = 0
    up: bool = True
    """False while the tier is bypassed."""


@dataclass
class StoreStats:
    tiers: dict[str, TierStats] = field(default_factory=dict)
    queued_bytes: int = 0
    """Bytes of committed objects that are not yet in every tier."""
    dropped_writes: int = 0
    """Reservations that the store refused because writes lag behind."""
    inflight: int = 0
    failed_writes: int = 0
    """Objects whose bytes the store could not complete."""
