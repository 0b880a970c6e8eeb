"""Sums and differences of the store's statistics."""

from __future__ import annotations

import dataclasses

from .protocol import StoreStats, TierStats

COUNTS = (
    "hits",
    "misses",
    "corrupt",
    "stored",
    "refused",
    "evictions",
    "expired",
    "errors",
    "timeouts",
    "read_bytes",
    "written_bytes",
)
"""Fields of :class:`TierStats` that only grow."""
_STORE_COUNTS = ("dropped_writes", "failed_writes")
LEVELS = ("bytes_used", "bytes_budget", "objects")


def add_stats(one: StoreStats | None, other: StoreStats | None) -> StoreStats | None:
    """Return the summed statistics of two ranks: counts and levels add up; both ranks must say ``up``."""
    if one is None or other is None:
        return one or other
    names = [*one.tiers, *(n for n in other.tiers if n not in one.tiers)]
    return StoreStats(
        {n: _add_tiers(one.tiers.get(n), other.tiers.get(n)) for n in names},
        one.queued_bytes + other.queued_bytes,
        one.dropped_writes + other.dropped_writes,
        one.inflight + other.inflight,
        one.failed_writes + other.failed_writes,
    )


def _add_tiers(one: TierStats | None, other: TierStats | None) -> TierStats:
    if one is None or other is None:
        return one or other or TierStats()
    summed = {f: getattr(one, f) + getattr(other, f) for f in (*COUNTS, *LEVELS)}
    return TierStats(
        **summed,
        read_seconds=one.read_seconds + other.read_seconds,
        write_seconds=one.write_seconds + other.write_seconds,
        up=one.up and other.up,
    )


def numbers_of(tier: TierStats) -> dict[str, float]:
    """Return the counts and levels of the tier, without latencies; ``up`` is 1 or 0."""
    return {f: float(getattr(tier, f)) for f in (*COUNTS, *LEVELS, "up")}


def without_latencies(stats: StoreStats) -> StoreStats:
    """Return a copy of ``stats`` with counts and levels only."""
    tiers = {
        name: dataclasses.replace(tier, read_seconds=[], write_seconds=[])
        for name, tier in stats.tiers.items()
    }
    return dataclasses.replace(stats, tiers=tiers)


def append_stats(before: StoreStats | None, now: StoreStats) -> StoreStats:
    """Combine two consecutive reports of one store: counts and latencies add up, levels come from ``now``."""
    if before is None:
        return now
    tiers = dict(before.tiers)
    for name, tier in now.tiers.items():
        earlier = tiers.get(name, TierStats())
        counts = {f: getattr(earlier, f) + getattr(tier, f) for f in COUNTS}
        tiers[name] = dataclasses.replace(
            tier,
            **counts,
            read_seconds=earlier.read_seconds + tier.read_seconds,
            write_seconds=earlier.write_seconds + tier.write_seconds,
        )
    counts = {f: getattr(before, f) + getattr(now, f) for f in _STORE_COUNTS}
    return dataclasses.replace(now, tiers=tiers, **counts)


def since(now: StoreStats, before: StoreStats | None) -> StoreStats:
    """Return the counts after ``before``; levels and latencies come from ``now``."""
    if before is None:
        return now
    tiers = {}
    for name, tier in now.tiers.items():
        earlier = before.tiers.get(name, TierStats())
        counts = {f: getattr(tier, f) - getattr(earlier, f) for f in COUNTS}
        tiers[name] = dataclasses.replace(tier, **counts)
    counts = {f: getattr(now, f) - getattr(before, f) for f in _STORE_COUNTS}
    return dataclasses.replace(now, tiers=tiers, **counts)
