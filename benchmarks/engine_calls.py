"""Functions that benchmarks run in an engine's process: profiles, memory in use, tiers.

They are called like those of ``vllm_hypic.harness.engine_calls``: their first argument is the engine's
``vllm.LLM``.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import psutil

from vllm_hypic.harness.engine_calls import Answer, Ask, add, forget_streams, generate, scheduler_of

# -- calls, profiles and memory -----------------------------------------------------------------------------


@dataclass(frozen=True)
class Operator:
    """Time of one operator, without the operators it called, in the requests that were profiled.

    ``inside`` is the nearest custom operator of vLLM's or the plugin's that called it, or empty.
    """

    name: str
    inside: str
    self_s: float
    calls: int


@dataclass(frozen=True)
class Profile:
    """Operators of one request, and how long it took while they were recorded."""

    first_token_s: float
    operators: list[Operator]
    answer: Answer


def hypic_calls(llm: Any) -> dict[str, int]:
    """Return how often each operator of the plugin has run."""
    [calls] = llm.collective_rpc("hypic_calls")
    return dict(calls)


def resident_bytes(llm: Any) -> int:
    """Return the memory of the engine's process."""
    return int(psutil.Process().memory_info().rss)


CUSTOM = ("vllm::", "vllm_hypic::", "_C::")
"""Namespaces of custom operators: what their insides are for can be told by their name."""


def profiled(llm: Any, ask: Ask) -> Profile:
    """One request under torch's profiler."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU]) as recorded:
        [answer] = generate(llm, [ask])
    totals: dict[tuple[str, str], list[float]] = {}
    for event in recorded.events():
        total = totals.setdefault((event.name, _inside(event)), [0.0, 0])
        total[0] += event.self_cpu_time_total / 1e6
        total[1] += 1
    operators = [Operator(name, inside, s, int(n)) for (name, inside), (s, n) in totals.items()]
    return Profile(answer.first_token_s, sorted(operators, key=lambda o: -o.self_s), answer)


def _inside(event: Any) -> str:
    parent = event.cpu_parent
    while parent is not None:
        if parent.name.startswith(CUSTOM):
            return str(parent.name)
        parent = parent.cpu_parent
    return ""


@dataclass(frozen=True)
class Usage:
    """Memory in use, by the engine's own books: vLLM's block pool and, with the plugin, the directory.

    ``blocks`` are those that requests hold: what is merely kept in the prefix cache counts as free.
    """

    running: int
    """Requests that have produced a token and are not over."""
    blocks: int
    block_bytes: int
    records: int = 0
    pinned: int = 0
    pool_bytes: int = 0

    @property
    def kv_bytes(self) -> int:
        return self.blocks * self.block_bytes

    @property
    def total_bytes(self) -> int:
        return self.kv_bytes + self.pool_bytes


@dataclass(frozen=True)
class Crowd:
    """What concurrent requests held once all of them were generating."""

    usage: Usage
    cached: list[int]
    """Prompt tokens of each request that were read from a cache."""
    prompt_tokens: int
    preemptions: int


def crowd(llm: Any, asks: Sequence[Ask]) -> Crowd:
    """Send all requests at once and look at the memory when all are generating; then end them.

    Raises ``RuntimeError`` when a request ends before the last one starts: the cache holds too few.
    """
    ids = [add(llm, ask) for ask in asks]
    cached: dict[str, int] = {}
    prompt_tokens = preemptions = 0
    while len(cached) < len(ids):
        for output in llm.llm_engine.step():
            if output.finished:
                raise RuntimeError(
                    f"a request ended while only {len(cached)} of {len(ids)} were running: "
                    "the KV cache holds too few requests; raise --kv-gib or lower --requests"
                )
            if output.request_id not in cached:
                cached[output.request_id] = output.num_cached_tokens or 0
                prompt_tokens += len(output.prompt_token_ids)
    usage = usage_of(llm)
    preemptions = sum(r.num_preemptions for r in scheduler_of(llm).requests.values())
    llm.llm_engine.abort_request(ids, internal=False)
    while llm.llm_engine.has_unfinished_requests():
        llm.llm_engine.step()
    return Crowd(usage, [cached[i] for i in ids], prompt_tokens, preemptions)


def usage_of(llm: Any) -> Usage:
    """Memory in use now."""
    scheduler = scheduler_of(llm)
    pool = scheduler.kv_cache_manager.block_pool
    config = scheduler.kv_cache_config
    # All tensors lie in one allocation, whose size each of them names.
    block_bytes = max(t.size for t in config.kv_cache_tensors) // config.num_blocks
    running = sum(r.num_output_tokens > 0 for r in scheduler.running)
    # The null block is nobody's.
    blocks = pool.num_gpu_blocks - 1 - pool.get_num_free_blocks()
    side = getattr(scheduler, "hypic", None)
    if side is None:
        return Usage(running, blocks, block_bytes)
    return Usage(
        running,
        blocks,
        block_bytes,
        records=len(side.directory),
        pinned=side.directory.pinned,
        pool_bytes=side.geometry.bytes_of(side.directory.used),
    )


@dataclass(frozen=True)
class RecordBytes:
    """Bytes that a record holds of the public pool; ``live_heads``: share of heads with a transition."""

    pages: float
    states: float
    transitions: float
    live_heads: float

    @property
    def total(self) -> float:
        return self.pages + self.states + self.transitions

    @staticmethod
    def mean(records: Sequence[RecordBytes]) -> RecordBytes:
        n = len(records)
        return RecordBytes(
            sum(r.pages for r in records) / n,
            sum(r.states for r in records) / n,
            sum(r.transitions for r in records) / n,
            sum(r.live_heads for r in records) / n,
        )


def records_held(llm: Any) -> list[RecordBytes]:
    """All resident records; none where the model has no linear-attention layers."""
    side = scheduler_of(llm).hypic
    geometry = side.geometry
    if not geometry.record_transition_blocks:
        return []
    return [
        RecordBytes(
            len(entry.pages) * geometry.page_bytes,
            geometry.slot_bytes,
            entry.transition_blocks * geometry.transition_block_bytes,
            entry.transition_blocks / geometry.record_transition_blocks,
        )
        for entry in side.directory.resident()
    ]


# -- tiers -------------------------------------------------------------------------------------------


DRAIN_S = 120.0
CLEAR_S = 30.0


@dataclass(frozen=True)
class TierCounts:
    """Counts of one tier since the engine's start.  ``read_seconds``: single reads since the last look."""

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
    """Have the store report to :func:`tier_counts` alone: who looks first gets the latencies."""
    _link(llm)._reported_at = math.inf


def computed(llm: Any) -> int:
    """Segments that were prefilled since the engine's start."""
    return int(scheduler_of(llm).hypic.segment_requests.started)


def drain(llm: Any) -> None:
    """Wait until every tier has what was handed to it."""
    if not _store(llm).drain(DRAIN_S):
        raise RuntimeError(f"the tiers were not written within {DRAIN_S:g} s")


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
    _store(llm)._tiers.sort(key=lambda one: one.name != tier)


def drop_lmcache_memory(llm: Any, tier: str) -> None:
    """Drop what an embedded LMCache holds in memory; its adapters keep everything."""
    drain(llm)
    [asked] = [one for one in _store(llm)._tiers if one.name == tier]
    objects = asked.tier._objects
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

    from vllm_hypic.connector.worker.store_link import StoreLink

    return next(link for link in get_kv_transfer_group().worker.links if isinstance(link, StoreLink))
