"""Numbers of one router, for Prometheus."""

from __future__ import annotations

from collections.abc import Iterable

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from ...config.router import RecordRoute
from .instances import Instance, InstanceState

_SECONDS = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100)


class RouterMetrics:
    """Counts what the router does; ``instances`` are looked at when somebody asks."""

    def __init__(self, instances: Iterable[Instance]) -> None:
        self.registry = registry = CollectorRegistry()
        self.requests = Counter(
            "hypic_router_requests",
            "Completion and chat requests; kind: parallel, whole, or proxied for all others.",
            ["kind"],
            registry=registry,
        )
        self.whole = Counter(
            "hypic_router_whole", "Requests that went whole to one instance.", ["reason"], registry=registry
        )
        self.segments = Counter(
            "hypic_router_segments",
            "Segments of parallel requests: dispatched, joined and held ones were asked of workers, local "
            "ones left to the combine node; failed and redispatched count attempts.",
            ["outcome"],
            registry=registry,
        )
        self.records = Counter(
            "hypic_router_records",
            "Records delivered to combine nodes; way: direct, or tiers: left in a tier that both share.",
            ["way"],
            registry=registry,
        )
        self.failures = Counter(
            "hypic_router_failures", "What went wrong.", ["what", "instance"], registry=registry
        )
        self.disconnects = Counter(
            "hypic_router_disconnects",
            "Clients that left before their answer was complete.",
            registry=registry,
        )
        self.plan_s = Histogram(
            "hypic_router_plan_seconds",
            "Tokenising, planning and assigning of one request.",
            buckets=_SECONDS,
            registry=registry,
        )
        self.dispatch_s = Histogram(
            "hypic_router_dispatch_seconds",
            "First segment request of a request to its last delivered record.",
            buckets=_SECONDS,
            registry=registry,
        )
        self.combine_s = Histogram(
            "hypic_router_combine_seconds",
            "Last delivered record to the first byte of the answer.",
            buckets=_SECONDS,
            registry=registry,
        )
        self.exposed_s = Histogram(
            "hypic_router_exposed_transfer_seconds",
            "From when all records of a request were computed to when all were delivered.",
            buckets=_SECONDS,
            registry=registry,
        )
        # All label values from the start: a rate is then right from the first event on.
        for kind in ("parallel", "whole", "proxied"):
            self.requests.labels(kind)
        for outcome in ("dispatched", "joined", "held", "local", "failed", "redispatched"):
            self.segments.labels(outcome)
        for route in RecordRoute:
            self.records.labels(route.value)
        registry.register(_Instances(tuple(instances)))

    def text(self) -> bytes:
        """All numbers in Prometheus' text format."""
        return generate_latest(self.registry)


class _Instances(Collector):
    def __init__(self, instances: tuple[Instance, ...]) -> None:
        self._instances = instances

    def collect(self) -> Iterable[Metric]:
        up = GaugeMetricFamily("hypic_router_instance_up", "1: known and given work.", labels=["instance"])
        excluded = GaugeMetricFamily(
            "hypic_router_instance_excluded",
            "1: of another namespace, or described as another one is.",
            labels=["instance"],
        )
        load = GaugeMetricFamily(
            "hypic_router_instance_load_tokens", "Tokens still to be prefilled.", labels=["instance"]
        )
        resident = GaugeMetricFamily(
            "hypic_router_instance_records", "Records it holds.", labels=["instance"]
        )
        clients = GaugeMetricFamily(
            "hypic_router_instance_open_requests", "Requests of clients open there.", labels=["instance"]
        )
        for i in self._instances:
            label = [i.url]
            up.add_metric(label, float(i.up))
            excluded.add_metric(label, float(i.state is InstanceState.EXCLUDED))
            load.add_metric(label, i.load)
            resident.add_metric(label, len(i.view.resident))
            clients.add_metric(label, i.open_requests)
        return [up, excluded, load, resident, clients]
