"""Names and descriptions of the metrics ``vllm:hypic_*``; ``tools/reference.py`` writes their page.

This module imports no vLLM.
"""

from __future__ import annotations

from ..primitives.segmenter import COUNTS as PIECE_COUNTS
from ..primitives.segmenter import SEGMENT_MODES

COUNTERS = {
    "requests": "Requests with segments or padding, or with a prefix that the pool records.",
    "segments_queried": "Segments, and their contexts, that requests looked up in the pool.",
    "segments_hit": "Segments found in the pool, in a tier or in a computation under way, or received.",
    "segments_computed": "Segments, and prefixes with prefix=sparse, that the engine computed.",
    "segments_loaded": "Segments and checkpoints fetched from the store's tiers; segments_hit counts the "
    "segments, too.",
    "segments_received": "Segments received from other instances directly; segments_loaded counts those of a "
    "shared tier.",
    "segments_received_nixl": "Segments received from other instances over NIXL; the rest came over TCP.",
    "segments_not_received": "Segments that requests awaited from other instances and that did not arrive.",
    "segments_pushed": "Segments delivered to other instances, or to a tier shared with them.",
    "segments_unpushed": "Segments that could not be delivered to another instance or to a shared tier.",
    "tokens_reused": "Prompt tokens read from records.",
    "tokens_computed": "Prompt tokens of requests with segments that no record held; tokens from vLLM's own "
    "prefix cache count, too.",
    "tokens_resumed": "Tokens of segments that a checkpoint spared the engine from computing again.",
    "seam_tokens": "Prompt tokens recomputed in seam windows.",
    "island_tokens": "Prompt tokens recomputed in islands.",
    "evictions": "Records evicted from the pool.",
    "pool_waits": "Scheduling attempts that waited for room in the pool.",
}
GAUGES = {
    "pool_bytes_used": "Bytes of the pool in use.",
    "pool_bytes_capacity": "Bytes of the pool.",
    "records": "Records in the pool.",
    "pinned": "Records that running or waiting requests hold.",
    "waiting": "Requests that wait for records.",
}
MODES = (*(mode for mode in SEGMENT_MODES if mode != "off"), "named", "separators", "prefix")
"""Ways to find segments: ``segment`` modes, names by tokens, separators; or a prefix is the only segment."""
MODE_COUNTERS = {
    "requests": "Requests with segments.",
    "tokens_reused": "Prompt tokens of requests with segments, read from records.",
    "tokens_computed": "Prompt tokens of requests with segments that no record held; tokens from vLLM's own "
    "prefix cache count, too.",
    **PIECE_COUNTS,
}
STORE_COUNTERS = {
    "dropped_writes": "Attempts to store a record that found the write queue full. The engine tries again "
    "while the pool holds the record.",
    "failed_writes": "Records that were not stored, because their bytes could not be copied or sealed.",
}
STORE_GAUGES = {
    "queued_bytes": "Bytes of records in the write queue of the tiers.",
    "inflight": "Records that the store fetches from tiers now.",
}
TIER_COUNTERS = {
    "hits": "Intact records found in the tier and used.",
    "misses": "Records that the tier did not have. Only a miss of the faster tiers asks a slower tier.",
    "corrupt": "Damaged or foreign objects found in the tier and deleted.",
    "stored": "Records written to the tier.",
    "refused": "Records that the tier did not take: by admission, for want of room, or while bypassed.",
    "evictions": "Records evicted from the tier by this engine. Redis and LMCache count their own evictions.",
    "expired": "Records dropped at the end of their time to live.",
    "errors": "Operations of the tier that failed.",
    "timeouts": "Operations of the tier that passed their deadline.",
    "read_bytes": "Bytes read from the tier.",
    "written_bytes": "Bytes written to the tier.",
}
TIER_GAUGES = {
    "bytes_used": "Bytes that the tier holds; for Redis and LMCache the memory of the whole server.",
    "bytes_budget": "Byte budget of the tier; 0 means unknown or unlimited.",
    "objects": "Records that the tier holds; 0 for redis, lmcache and a shared disk.",
    "up": "1 while the store uses the tier, 0 while the store bypasses the tier.",
}
TIER_HISTOGRAMS = {
    "read_seconds": "Time of one read from the tier, in seconds.",
    "write_seconds": "Time of one write to the tier, in seconds.",
}
