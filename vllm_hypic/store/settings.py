"""How the store treats its tiers: times, sizes, numbers of threads."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from .record import aligned_buffer


@dataclass(frozen=True)
class StoreSettings:
    """Times in seconds, sizes in bytes."""

    deadline_s: float = 5.0
    """A fetch ends within this time.  Tiers that are asked in turn share it evenly: what one leaves unused,
    the next ones have."""
    write_deadline_s: float = 30.0
    """One write or delete in one tier."""
    open_s: float = 10.0
    """How long the start waits for tiers to open; slower ones join when they are ready."""
    close_s: float = 5.0
    """How long :meth:`TieredStore.close` writes what is queued, and again how long it waits for the tiers."""
    queue_bytes: int = 512 << 20
    """Reserved and committed bytes, and those on their way up to faster tiers."""
    ttl_s: float | None = None
    """Objects expire so long after they were committed."""
    back_off_s: float = 1.0
    """A tier that failed is bypassed so long; each failed probe doubles it."""
    most_back_off_s: float = 30.0
    readers: int = 2
    """Threads of a tier that read; one writes."""
    most_hung: int = 4
    """Threads of either kind that may hang in a tier before it is left alone until one returns."""
    allocate: Callable[[int], memoryview] = aligned_buffer
    """Memory of that many bytes for a reservation; the memory tier keeps it.  Runs on the caller's thread."""
