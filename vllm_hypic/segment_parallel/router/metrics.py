"""Metrics of one router, for Prometheus."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from ...config.router import RecordRoute
from .instances import Instance, InstanceState

_SECONDS = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100)


class RouterMetrics:
    """The router's counters and histograms; gauges of ``instances`` are computed at each scrape."""

    def __init__(self, instances: Iterable[Instance]) -> None:
        self.registry = registry = CollectorRegistry()
        counter = partial(Counter, registry=registry)
        histogram = partial(Histogram, buckets=_SECONDS, registry=registry)
        self.requests = counter(
            "hypic_router_requests",
            "Requests by kind: parallel and whole for completions and chats, proxied for all other requests. "
            "A completion or chat that is sent again counts again.",
            ["kind"],
        )
        self.whole = counter(
            "hypic_router_whole", "Requests that went whole to one instance, by reason.", ["reason"]
        )
        self.segments = counter(
            "hypic_router_segments",
            "Segments of parallel requests by outcome: dispatched to a worker, held by a worker, joined to a "
            "computation under way, local to the combine node; failed and redispatched count attempts.",
            ["outcome"],
        )
        self.records = counter(
            "hypic_router_records",
            "Records delivered to combine nodes, by way: direct, or tiers for records left in shared tiers.",
            ["way"],
        )
        self.failures = counter(
            "hypic_router_failures",
            "Failures at an instance, by kind: segment, answer, stream, proxied, tokenize, withdraw, stored, "
            "tier, namespace or landing (the receiver).",
            ["what", "instance"],
        )
        self.disconnects = counter(
            "hypic_router_disconnects", "Clients that disconnected before their answer was complete."
        )
        self.plan_s = histogram(
            "hypic_router_plan_seconds", "Time to tokenise, plan and assign one request, in seconds."
        )
        self.dispatch_s = histogram(
            "hypic_router_dispatch_seconds",
            "Time from a request's first segment request to its last delivered record, in seconds.",
        )
        self.combine_s = histogram(
            "hypic_router_combine_seconds",
            "Time from a request's last delivered record to the answer's first byte, in seconds.",
        )
        self.exposed_s = histogram(
            "hypic_router_exposed_transfer_seconds",
            "Time from when all records of a request were computed to when all were delivered, in seconds.",
        )
        # All label values exist from the start, so that a rate is right from the first event on.
        for kind in ("parallel", "whole", "proxied"):
            self.requests.labels(kind)
        for outcome in ("dispatched", "joined", "held", "local", "failed", "redispatched"):
            self.segments.labels(outcome)
        for route in RecordRoute:
            self.records.labels(route.value)
        registry.register(_Instances(tuple(instances)))

    def text(self) -> bytes:
        """Return all metrics in Prometheus' text format."""
        return generate_latest(self.registry)


class _Instances(Collector):
    def __init__(self, instances: tuple[Instance, ...]) -> None:
        self._instances = instances

    def collect(self) -> Iterable[Metric]:
        told: tuple[tuple[str, str, Callable[[Instance], float]], ...] = (
            ("up", "1 while the router knows the instance and gives it work, else 0.", lambda i: i.up),
            (
                "excluded",
                "1 while the instance is left out, for its namespace or its description.",
                lambda i: i.state is InstanceState.EXCLUDED,
            ),
            ("load_tokens", "Tokens that the instance still has to prefill.", lambda i: i.load),
            ("records", "Records that the instance holds.", lambda i: len(i.view.resident)),
            (
                "open_requests",
                "Requests of clients that are open at the instance.",
                lambda i: i.open_requests,
            ),
        )
        for name, text, value in told:
            gauge = GaugeMetricFamily(f"hypic_router_instance_{name}", text, labels=["instance"])
            for instance in self._instances:
                gauge.add_metric([instance.url], float(value(instance)))
            yield gauge
