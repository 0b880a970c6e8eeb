"""``soak``: all kinds of traffic through a router and past it, while what is behind it fails.

Two workers, two combine nodes with a store of memory, disk and Redis, and a router, on a random model in
float32.  The combine nodes and the router are watched and must not fail; everything else is broken and mended
on a schedule (``soak_faults.py``).  Every answer is held against the one that a server without a store gives
when nothing is cached (``soak_checks.py``).
"""

from __future__ import annotations

import asyncio
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import click
import httpx
import psutil
from rich import box
from rich.console import Console

from vllm_hypic.harness.report import console, table

from .lib.client import separator_of
from .lib.cluster import Cluster, Instance, Setup
from .lib.report import check_outputs, report, write_json
from .lib.serving import Server, ServerError
from .lib.sizes import random_model
from .services import RedisServer, ServiceError, ServiceMissing
from .soak_checks import Failure, Trend, excuse
from .soak_faults import RESET, WATCHED, Breaker
from .soak_traffic import Traffic, prepare

MIB = 2**20
SAMPLE_S = 5.0
JUDGED_S = 1800.0
"""Shorter runs are too much warming up to judge growth."""
COUNTERS = (
    *("segments_hit", "segments_computed", "segments_received", "segments_not_received", "segments_loaded"),
    *("evictions", "pool_waits", "tier_hits", "tier_stored", "tier_evictions"),
    *("tier_errors", "tier_timeouts", "tier_corrupt"),
)
"""Told at the end: whether the faults, and what they should have broken, took place."""
IDLE_S = 60.0
"""Once nobody asks, everything is let go of within this time."""
MANY = 50
"""So many failures end the run."""
GROWTH = {"memory, MiB": (0.05, 20.0), "descriptors": (0.05, 5.0), "threads": (0.05, 3.0)}
"""What may not grow in the second half by more than a share of it, and no less than so much."""
LEVELS = {
    "pool, MiB": ("pool_bytes_used", MIB),
    "records": ("records", 1),
    "records pinned": ("pinned", 1),
    "requests waiting": ("waiting", 1),
    "all tiers, MiB": ("tier_bytes_used", MIB),
    "writes queued, MiB": ("store_queued_bytes", MIB),
}
"""What is shown: metrics and their units."""
HELD = ("pinned", "waiting", "store_queued_bytes", "store_inflight")
"""Of these nothing is left when nobody asks."""


def setup_of(model: Path) -> Setup:
    """Small caches: all tiers evict."""
    return Setup(
        model,
        combines=2,
        at_once=8,
        context=4096,
        cache_bytes=128 * MIB,
        pool_bytes=24 * MIB,
        hypic={"expected_segment_tokens": 160},
        # Prompts of this model are too short to gain by workers.  On two cores a segment waits seconds while
        # one starts.
        router=("--min-gain", "-1", "--straggler-min-s", "10"),
        env={"VLLM_SERVER_DEV_MODE": "1"},  # for /pause and /reset_prefix_cache
    )


def store_of(disk: Path, redis: RedisServer) -> dict[str, Any]:
    tiers = [
        {"type": "memory", "bytes": 16 * MIB},
        {"type": "disk", "path": str(disk), "bytes": 48 * MIB},
        {"type": "redis", "url": redis.url, "shared": True},
    ]
    return {"store": {"tiers": tiers}}


@dataclass
class Watch:
    """Levels of the watched servers over time: memory, descriptors, threads, pages."""

    servers: Mapping[str, Server]
    times: list[float] = field(default_factory=list)
    levels: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))

    def sample(self, now: float) -> None:
        """Raises :class:`ServerError` where a process that was there is gone."""
        found = dict(self._found())
        if self.levels and (gone := self.levels.keys() - found.keys()):
            raise ServerError(f"processes have ended: {', '.join(sorted(gone))}")
        self.times.append(now)
        for name, value in found.items():
            self.levels[name].append(value)

    def _found(self) -> Iterator[tuple[str, float]]:
        for name, server in self.servers.items():
            for process in server.processes():
                role = _role(process)
                if role is None:
                    continue
                who = f"{name}, {role}"
                yield f"{who}: memory, MiB", process.memory_info().rss / MIB
                yield f"{who}: descriptors", process.num_fds()
                yield f"{who}: threads", process.num_threads()
            if isinstance(server, Instance):
                metrics = server.metrics()
                for level, (metric, unit) in LEVELS.items():
                    yield f"{name}: {level}", metrics.get(f"vllm:hypic_{metric}", 0.0) / unit

    def trends(self) -> dict[str, Trend]:
        return {name: Trend.of(self.times, values) for name, values in self.levels.items()}


def _role(process: psutil.Process) -> str | None:
    command = " ".join(process.cmdline())
    if "resource_tracker" in command:
        return None
    return "engine" if "EngineCore" in command else "server"


@dataclass(frozen=True)
class SoakResult:
    """What happened, and what should not have."""

    seconds: float
    requests: Mapping[str, int]
    """Done, by kind."""
    compared: Mapping[str, int]
    """Answers by verdict."""
    largest_distance: float
    """Of logprobs of the same token."""
    faults: Mapping[str, int]
    expected: Mapping[str, int]
    """Failures that the documents allow, by reason."""
    failures: tuple[Failure, ...]
    wrong: tuple[str, ...]
    held: tuple[str, ...]
    """What was not let go of at the end."""
    counters: Mapping[str, Mapping[str, float]]
    """Of each combine node, by metric."""
    grown: tuple[str, ...]
    trends: Mapping[str, Trend]

    @property
    def complaints(self) -> list[str]:
        failed = [
            f"{f.kind} at {f.url}, {f.begin_s:.1f} to {f.end_s:.1f} s: {f.status or ''} {f.message}"
            for f in self.failures
        ]
        return [
            *(f"wrong: {w}" for w in self.wrong),
            *failed,
            *self.held,
            *(f"grows: {g}" for g in self.grown),
        ]


async def soak(
    cluster: Cluster,
    redis: RedisServer,
    disks: list[Path],
    *,
    minutes: float,
    clients: int,
    limit_s: float,
    seed: int,
    out: Console,
) -> SoakResult:
    """Raises :class:`ServerError` where a watched server dies."""
    limits = httpx.Limits(max_connections=None, keepalive_expiry=2.0)  # vLLM's ends after 5 s
    async with httpx.AsyncClient(timeout=None, limits=limits) as http:
        combines = cluster.combines
        control = cluster.instance("control", replace(cluster.setup, at_once=1))
        await asyncio.to_thread(cluster.start, control)
        out.print("computing references")
        separator = separator_of(control.url)
        cases = await prepare(cluster.setup.model, separator, seed, control.url, http)
        await asyncio.to_thread(cluster.stop, control)
        breaker = Breaker(cluster, redis, disks, http)
        urls = {cluster.router.url: 0.6, combines[WATCHED].url: 0.2, combines[RESET].url: 0.2}
        traffic = Traffic(cases, urls, http, breaker.now, limit_s, seed)

        def unexpected() -> list[Failure]:
            return [f for f in traffic.failures if excuse(f, breaker.made) is None]

        watch = Watch({"router": cluster.router, **{c.name: c for c in combines}})
        out.print(f"{minutes:g} minutes of traffic")
        async with asyncio.TaskGroup() as group:
            for number in range(clients):
                group.create_task(traffic.client(number))
            faults = group.create_task(breaker.run(minutes))
            while breaker.now() < 60 * minutes and len(unexpected()) < MANY:
                await asyncio.to_thread(watch.sample, breaker.now())
                await asyncio.sleep(SAMPLE_S)
            breaker.over.set()
            await faults
            traffic.over.set()
        seconds = breaker.now()
        held = await asyncio.to_thread(_held, cluster)
        counted = {c.name: c.metrics() for c in combines}
    excuses = [excuse(f, breaker.made) for f in traffic.failures]
    trends = watch.trends()
    grown = [
        n for n, t in trends.items() if (g := GROWTH.get(n.rpartition(": ")[2])) and t.grows(seconds, *g)
    ]
    return SoakResult(
        seconds=seconds,
        requests=traffic.answered,
        compared=traffic.verdicts,
        largest_distance=traffic.distance,
        faults=Counter(f.kind.value for f in breaker.made),
        expected=Counter(e for e in excuses if e is not None),
        failures=tuple(unexpected()),
        wrong=tuple(traffic.wrong),
        held=tuple(held),
        grown=tuple(grown if seconds >= JUDGED_S else ()),
        counters={c: {n: m.get(f"vllm:hypic_{n}_total", 0.0) for n in COUNTERS} for c, m in counted.items()},
        trends=trends,
    )


def _held(cluster: Cluster) -> list[str]:
    """What is still held when nobody has asked for :data:`IDLE_S`; returns as soon as that is nothing."""
    deadline = time.monotonic() + IDLE_S
    while True:
        held = []
        for combine in cluster.combines:
            # A few steps: an engine tells its levels only in steps.
            nudge = {"prompt": [5, 6, 7], "max_tokens": 2}
            httpx.post(f"{combine.url}/v1/completions", json=nudge, timeout=IDLE_S).raise_for_status()
            metrics = combine.metrics()
            names = [
                "vllm:num_requests_running",
                "vllm:num_requests_waiting",
                *(f"vllm:hypic_{n}" for n in HELD),
            ]
            held += [f"{combine.name} at the end: {n} is {metrics[n]:g}" for n in names if metrics[n]]
        health = httpx.get(f"{cluster.router.url}/healthcheck", timeout=IDLE_S).json()
        if flights := health["in_flight_transfers"]:
            held.append(f"router at the end: {flights} transfers in flight")
        held += [
            f"router at the end: {i['open_requests']} requests open at {i['url']}"
            for i in health["instances"]
            if i["open_requests"]
        ]
        if not held or time.monotonic() > deadline:
            return held
        time.sleep(1)


def _show(result: SoakResult, out: Console) -> None:
    """The report, as Markdown."""
    counts = {
        f"requests in {result.seconds / 60:.0f} minutes": result.requests,
        "answers against full recompute": result.compared,
        "faults": result.faults,
        "failures that the documents allow": result.expected,
    }
    tables = [
        table("", (what, "count"), [(k, str(n)) for k, n in sorted(found.items())])
        for what, found in counts.items()
    ]
    rows = [(n, f"{t.start:.1f}", f"{t.end:.1f}", f"{t.per_hour:+.1f}") for n, t in result.trends.items()]
    tables.append(table("", ("second half of the run", "start", "end", "slope, per hour"), rows))
    counters = result.counters
    told = [(n, *(f"{found[n]:.0f}" for found in counters.values())) for n in COUNTERS]
    tables.append(table("", ("counted", *counters), told))
    for one in tables:
        one.box, one.title = box.MARKDOWN, None
        out.print(one)
    out.print(f"Logprobs of the same token differ by {result.largest_distance:.2g} at most.")


@click.command(help="Hours of mixed traffic while servers fail: answers, errors, leaks.")
@click.option("--minutes", type=click.FloatRange(1, 10_000), default=60, show_default=True)
@click.option("--clients", type=click.IntRange(1, 256), default=6, show_default=True, help="Clients at once.")
@click.option(
    "--limit",
    "limit_s",
    type=click.FloatRange(1),
    default=60,
    show_default=True,
    help="Seconds after which a request counts as hung.",
)
@click.option("--seed", type=int, default=0, show_default=True, help="Seed of the traffic.")
@click.option("--json", "json_path", type=click.Path(dir_okay=False, writable=True, path_type=Path))
def soak_command(minutes: float, clients: int, limit_s: float, seed: int, json_path: Path | None) -> None:
    check_outputs(json_path, None)
    out = console()
    setup = setup_of(random_model("tiny"))
    try:
        with tempfile.TemporaryDirectory(prefix="hypic-soak-") as folder:
            limits = ("--maxmemory", "64mb", "--maxmemory-policy", "allkeys-lru")
            with RedisServer(Path(folder), "", *limits, durable=False) as redis:
                disks = [Path(folder) / f"disk{i}" for i in range(setup.combines)]
                cluster = Cluster(setup)
                cluster.combines[:] = [
                    cluster.instance(
                        c.name, replace(setup, hypic={**setup.hypic, **store_of(disk, redis)}), port=c.port
                    )
                    for c, disk in zip(cluster.combines, disks, strict=True)
                ]
                with cluster:
                    result = asyncio.run(
                        soak(
                            cluster,
                            redis,
                            disks,
                            minutes=minutes,
                            clients=clients,
                            limit_s=limit_s,
                            seed=seed,
                            out=out,
                        )
                    )
    except* (ServerError, ServiceError, ServiceMissing, httpx.HTTPError) as e:
        raise click.ClickException("; ".join(map(repr, e.exceptions))) from e
    _show(result, out)
    if json_path is not None:
        settings = {"setup": setup, "minutes": minutes, "clients": clients, "limit_s": limit_s, "seed": seed}
        gate = "every answer against the one of a server without a store, cold and alone"
        write_json(json_path, report("soak", settings, result, gate=gate, threads=setup.threads))
    if complaints := result.complaints:
        raise click.ClickException("\n".join([f"{len(complaints)} complaints", *complaints[:MANY]]))
