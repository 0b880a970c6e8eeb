"""Counters of the scheduler side and their way into vLLM's log line and Prometheus endpoint."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats

from ..store.protocol import StoreStats
from ..store.totals import COUNTS
from .metrics import (
    COUNTERS,
    GAUGES,
    MODE_COUNTERS,
    MODES,
    STORE_COUNTERS,
    STORE_GAUGES,
    TIER_COUNTERS,
    TIER_GAUGES,
    TIER_HISTOGRAMS,
)


@dataclass
class HypicCounters:
    """Counts since the last report, and present levels (``pool_bytes_used`` to ``waiting``)."""

    requests: int = 0
    segments_queried: int = 0
    segments_hit: int = 0
    segments_computed: int = 0
    segments_loaded: int = 0
    segments_received: int = 0
    segments_received_nixl: int = 0
    segments_not_received: int = 0
    segments_pushed: int = 0
    segments_unpushed: int = 0
    tokens_reused: int = 0
    tokens_computed: int = 0
    tokens_resumed: int = 0
    seam_tokens: int = 0
    island_tokens: int = 0
    evictions: int = 0
    pool_waits: int = 0
    pool_bytes_used: int = 0
    pool_bytes_capacity: int = 0
    records: int = 0
    pinned: int = 0
    waiting: int = 0
    store: StoreStats | None = None
    by_mode: dict[str, dict[str, int]] = field(default_factory=dict)
    """Counts since the last report, by the way in which segments were found."""

    def take(self) -> HypicCounters:
        """Return the counts since the last report, and begin to count anew."""
        taken = dataclasses.replace(self)
        vars(self).update(vars(HypicCounters()))
        return taken

    def levels(self) -> HypicCounters:
        """Return the present levels alone: the next report if nothing happens."""
        return HypicCounters(**{name: getattr(self, name) for name in GAUGES})

    def count(self, mode: str, **counts: int) -> None:
        """Add to the counts of ``mode``, by names of :data:`~.metrics.MODE_COUNTERS`."""
        mine = self.by_mode.setdefault(mode, {})
        for name, n in counts.items():
            mine[name] = mine.get(name, 0) + n


_SECONDS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
assert set(TIER_COUNTERS) == set(COUNTS)


class HypicStats(KVConnectorStats):
    """Serializable counters; ``data`` is ``asdict(HypicCounters)``."""

    @staticmethod
    def of(counters: HypicCounters) -> HypicStats:
        return HypicStats(data=dataclasses.asdict(counters))

    def reset(self) -> None:
        self.data = dataclasses.asdict(HypicCounters())

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        """Return the sum of both counters, with the latest levels."""
        merged: dict[str, Any] = {k: self.data.get(k, 0) + other.data.get(k, 0) for k in COUNTERS}
        merged |= {k: other.data.get(k, self.data.get(k, 0)) for k in GAUGES}
        merged["by_mode"] = _aggregate_modes(self.data.get("by_mode"), other.data.get("by_mode"))
        merged["store"] = _aggregate_stores(self.data.get("store"), other.data.get("store"))
        return HypicStats(data=merged)

    def reduce(self) -> dict[str, int | float]:
        reduced = {k: v for k, v in self.data.items() if v and k not in ("store", "by_mode")}
        for mode, counts in self.data.get("by_mode", {}).items():
            reduced |= {f"{mode}_{k}": n for k, n in counts.items() if n}
        for name, tier in tiers_of(self.data):
            reduced |= {f"{name}_{k}": tier[k] for k in (*TIER_COUNTERS, "bytes_used") if tier[k]}
        return reduced

    def is_empty(self) -> bool:
        return not any(self.data.values())


def tiers_of(data: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the names and ``asdict(TierStats)`` of the tiers in ``HypicStats.data``."""
    yield from ((data.get("store") or {}).get("tiers") or {}).items()


def _aggregate_modes(
    one: dict[str, dict[str, int]] | None, other: dict[str, dict[str, int]] | None
) -> dict[str, dict[str, int]]:
    merged = HypicCounters(by_mode={mode: dict(counts) for mode, counts in (one or {}).items()})
    for mode, counts in (other or {}).items():
        merged.count(mode, **counts)
    return merged.by_mode


def _aggregate_stores(one: dict[str, Any] | None, other: dict[str, Any] | None) -> dict[str, Any] | None:
    if not one or not other:
        return one or other
    tiers = dict(one["tiers"])
    for name, tier in other["tiers"].items():
        before = tiers.get(name)
        added = (*TIER_COUNTERS, *TIER_HISTOGRAMS)
        tiers[name] = tier if before is None else tier | {k: before[k] + tier[k] for k in added}
    counted = {k: one[k] + other[k] for k in STORE_COUNTERS}
    return other | counted | {"tiers": tiers}


class HypicPromMetrics(KVConnectorPromMetrics):
    """Exports the metrics ``vllm:hypic_*`` on the server's own ``/metrics``."""

    def __init__(
        self,
        vllm_config: Any,
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)

        def made(
            kind: Any, prefix: str, texts: Mapping[str, str], *by: str, **options: object
        ) -> dict[str, Any]:
            labels = [*labelnames, *by]
            return {
                name: kind(
                    name=f"vllm:hypic_{prefix}{name}", documentation=text, labelnames=labels, **options
                )
                for name, text in texts.items()
            }

        self._counters = made(self._counter_cls, "", COUNTERS)
        self._gauges = made(self._gauge_cls, "", GAUGES)
        self._store_counters = made(self._counter_cls, "store_", STORE_COUNTERS)
        self._store_gauges = made(self._gauge_cls, "store_", STORE_GAUGES)
        self._mode_counters = made(self._counter_cls, "mode_", MODE_COUNTERS, "mode")
        self._tier_counters = made(self._counter_cls, "tier_", TIER_COUNTERS, "tier")
        self._tier_gauges = made(self._gauge_cls, "tier_", TIER_GAUGES, "tier")
        self._tier_histograms = made(self._histogram_cls, "tier_", TIER_HISTOGRAMS, "tier", buckets=_SECONDS)

        # A series exists from the first scrape on, at 0.
        for labels in per_engine_labelvalues.values():
            for metrics in (self._counters, self._gauges, self._store_counters, self._store_gauges):
                for metric in metrics.values():
                    metric.labels(*labels)
            for metric in self._mode_counters.values():
                for mode in MODES:
                    metric.labels(*labels, mode)

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        labels = self.per_engine_labelvalues[engine_idx]
        for name, counter in self._counters.items():
            counter.labels(*labels).inc(transfer_stats_data.get(name, 0))
        for name, gauge in self._gauges.items():
            if name in transfer_stats_data:
                gauge.labels(*labels).set(transfer_stats_data[name])
        for mode, counts in (transfer_stats_data.get("by_mode") or {}).items():
            for name, counter in self._mode_counters.items():
                counter.labels(*labels, mode).inc(counts.get(name, 0))
        self._observe_store(transfer_stats_data, labels)

    def _observe_store(self, data: dict[str, Any], labels: list[object]) -> None:
        store = data.get("store")
        if not store:
            return
        for name, counter in self._store_counters.items():
            counter.labels(*labels).inc(store[name])
        for name, gauge in self._store_gauges.items():
            gauge.labels(*labels).set(store[name])
        for tier_name, tier in tiers_of(data):
            by_tier = [*labels, tier_name]
            for name, counter in self._tier_counters.items():
                counter.labels(*by_tier).inc(tier[name])
            for name, gauge in self._tier_gauges.items():
                gauge.labels(*by_tier).set(tier[name])
            for name, histogram in self._tier_histograms.items():
                for seconds in tier[name]:
                    histogram.labels(*by_tier).observe(seconds)
