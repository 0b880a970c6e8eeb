"""Counters of the scheduler side and their way into vLLM's log line and Prometheus endpoint."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats


@dataclass
class HypicCounters:
    """Counts since the last report, then (from ``pool_bytes_used`` on) present levels."""

    requests: int = 0
    segments_queried: int = 0
    segments_hit: int = 0
    segments_computed: int = 0
    tokens_reused: int = 0
    tokens_computed: int = 0
    seam_tokens: int = 0
    evictions: int = 0
    pool_waits: int = 0
    pool_bytes_used: int = 0
    pool_bytes_capacity: int = 0
    records: int = 0
    pinned: int = 0
    waiting: int = 0


COUNTERS = {
    "requests": "Requests with at least one primitive token.",
    "segments_queried": "Segments looked up in the public pool.",
    "segments_hit": "Segments found resident or already being computed.",
    "segments_computed": "Internal segment requests started.",
    "tokens_reused": "Prompt tokens read from cached segments.",
    "tokens_computed": "Prompt tokens of such requests computed, their cold segments included.",
    "seam_tokens": "Tokens recomputed in seam windows.",
    "evictions": "Segments evicted from the public pool.",
    "pool_waits": "Scheduling attempts that waited for room in the public pool.",
}
GAUGES = {
    "pool_bytes_used": "Bytes of the public pool in use.",
    "pool_bytes_capacity": "Bytes of the public pool.",
    "records": "Segments in the public pool.",
    "pinned": "Segments held by requests.",
    "waiting": "Requests waiting for segments.",
}


class HypicStats(KVConnectorStats):
    """Serializable counters; ``data`` is ``asdict(HypicCounters)``."""

    @staticmethod
    def of(counters: HypicCounters) -> HypicStats:
        return HypicStats(data=dataclasses.asdict(counters))

    def reset(self) -> None:
        self.data = dataclasses.asdict(HypicCounters())

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        """Counters add up, levels are the latest."""
        merged = {k: self.data.get(k, 0) + other.data.get(k, 0) for k in COUNTERS}
        merged |= {k: other.data.get(k, self.data.get(k, 0)) for k in GAUGES}
        return HypicStats(data=merged)

    def reduce(self) -> dict[str, int | float]:
        return {k: v for k, v in self.data.items() if v}

    def is_empty(self) -> bool:
        return not any(self.data.values())


class HypicPromMetrics(KVConnectorPromMetrics):
    """``vllm:hypic_*`` on the server's own ``/metrics``."""

    def __init__(
        self,
        vllm_config: Any,
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._counters = {
            name: self._counter_cls(name=f"vllm:hypic_{name}", documentation=text, labelnames=labelnames)
            for name, text in COUNTERS.items()
        }
        self._gauges = {
            name: self._gauge_cls(name=f"vllm:hypic_{name}", documentation=text, labelnames=labelnames)
            for name, text in GAUGES.items()
        }

        # A series exists from the first scrape on, at 0.
        for labels in per_engine_labelvalues.values():
            for metric in (*self._counters.values(), *self._gauges.values()):
                metric.labels(*labels)

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        labels = self.per_engine_labelvalues[engine_idx]
        for name, counter in self._counters.items():
            counter.labels(*labels).inc(transfer_stats_data.get(name, 0))
        for name, gauge in self._gauges.items():
            if name in transfer_stats_data:
                gauge.labels(*labels).set(transfer_stats_data[name])
