"""Functions of the benchmark ``tiers`` that run beside an engine, in its process: see ``beside.py``."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from typing import Any

from vllm_hypic.harness.engine_calls import scheduler_of

DRAIN_S = 120.0
CLEAR_S = 30.0


@dataclass(frozen=True)
class TierCounts:
    """Of one tier since the engine's start.  ``read_seconds``: single reads since the last look."""

    hits: int
    stored: int
    corrupt: int
    errors: int
    timeouts: int
    read_bytes: int
    read_seconds: list[float]
    bytes_used: int


def tier_counts(llm: Any) -> dict[str, TierCounts]:
    """Counts of every tier, by its name."""
    fields = TierCounts.__dataclass_fields__
    stats = _store(llm).stats().tiers
    return {name: TierCounts(**{f: getattr(tier, f) for f in fields}) for name, tier in stats.items()}


def report_here_only(llm: Any) -> None:
    """From now on the store reports to :func:`tier_counts` alone: who looks first gets the latencies."""
    _link(llm)._reported_at = math.inf


def computed(llm: Any) -> int:
    """Segments that were prefilled since the engine's start."""
    return int(scheduler_of(llm).hypic._jobs)


def drain(llm: Any) -> None:
    """Wait until every tier has what was handed to it."""
    if not _store(llm).drain(DRAIN_S):
        raise RuntimeError(f"the tiers were not written within {DRAIN_S:g} s")


def forget_streams(llm: Any) -> None:
    """Empty vLLM's prefix cache, which holds the last request's stream; records stay."""
    if not llm.reset_prefix_cache():
        raise RuntimeError("vLLM's prefix cache did not become empty")


def empty_pool(llm: Any) -> None:
    """Drop all records of the pool, as if others had pushed them out, and all streams.  Tiers keep theirs."""
    drain(llm)
    forget_streams(llm)
    directory = scheduler_of(llm).hypic.directory
    directory.drop_unpinned()
    if len(directory):
        raise RuntimeError(f"{len(directory)} records are still pinned")


def ask_first(llm: Any, tier: str) -> None:
    """Fetches ask this tier before all others; as it is then the fastest, what it has moves nowhere."""
    _store(llm)._lanes.sort(key=lambda lane: lane.name != tier)


def drop_lmcache_memory(llm: Any, tier: str) -> None:
    """Drop what an embedded LMCache holds in memory; its adapters keep everything."""
    drain(llm)
    [lane] = [lane for lane in _store(llm)._lanes if lane.name == tier]
    objects = lane.tier._objects
    end = time.monotonic() + CLEAR_S
    while used := objects.used()[0]:
        if time.monotonic() > end:
            raise RuntimeError(f"LMCache still holds {used} bytes in memory after {CLEAR_S:g} s")
        if not objects._evict_oldest():
            time.sleep(0.01)  # it has locked what it has just written


def _store(llm: Any) -> Any:
    return _link(llm).store


def _link(llm: Any) -> Any:
    """The worker's ``StoreLink``; it runs in this process."""
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    return get_kv_transfer_group().worker.store
