"""Settings of the store for its tiers: times, sizes, numbers of threads."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class StoreSettings:
    """Settings of one store.  Times are in seconds, sizes in bytes."""

    deadline_s: float = 5.0
    """The most time of a fetch.  The tiers that a fetch asks in turn share the time evenly; unused time
    passes to the next tiers."""
    write_deadline_s: float = 30.0
    """The most time of one write or delete in one tier."""
    open_s: float = 10.0
    """The most time that the start waits for tiers to open.  A slower tier joins when it is open."""
    close_s: float = 5.0
    """The most time for :meth:`TieredStore.close` to write queued objects, and again for tiers to close."""
    queue_bytes: int = 512 << 20
    """The most bytes that are reserved, committed, or on their way up to faster tiers."""
    ttl_s: float | None = None
    """The time from an object's commit to its expiry; ``None``: objects do not expire."""
    back_off_s: float = 1.0
    """The time of a tier's bypass after a failure; each failed probe doubles the time."""
    most_back_off_s: float = 30.0
    readers: int = 2
    """The number of a tier's threads that read.  One more thread writes."""
    most_hung: int = 4
    """The number of hung reads, or writes, at which a tier starts no more of them until one returns."""
