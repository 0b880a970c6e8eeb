"""What ``scale`` finds: its results, as tables and as plots."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from vllm_hypic.eval.estimates import percentile
from vllm_hypic.harness.report import percent

from .lib import report
from .lib.report import seconds
from .scale_sim import Policy

if TYPE_CHECKING:
    from .scale_control import Control

GOAL_WORKERS, GOAL = 8, 7.0
PUBLISHED = {4: "HYPIC's release: 3.6x by LPT, 2.4x by round robin", 8: "HYPIC's paper: 6.1x"}
LEAST_PIPELINING = 0.05
"""Share of the dispatch phase that transfers may take and count as hidden."""


LOADED = (
    ("lpt by time", Policy.LPT_TIME),
    ("lpt by tokens", Policy.LPT),
    ("lpt, loads unknown", Policy.LPT_BLIND),
    ("round robin", Policy.ROUND_ROBIN),
)
WHOLE = "whole requests"
COLOURS = {
    "lpt by time": "#2ca02c",
    "lpt by tokens": "#ff7f0e",
    "lpt, loads unknown": "#9467bd",
    "round robin": "#1f77b4",
    WHOLE: "#7f7f7f",
}


@dataclass(frozen=True)
class Ratios:
    """A ratio over the requests of a sample: mean, 5th and 95th percentile."""

    mean: float
    low: float
    high: float

    @staticmethod
    def of(values: Sequence[float]) -> Ratios:
        return Ratios(statistics.fmean(values), percentile(list(values), 5), percentile(list(values), 95))


@dataclass(frozen=True)
class TimeShares:
    """Where the time to first token goes, means.  Their sum is the time to first token."""

    dispatch_s: float
    """Time until the first segment has reached a worker."""
    ideal_s: float
    """All prefill, over the number of workers."""
    idle_s: float
    """The rest until the last segment is computed: workers with nothing to do, or waiting for a transfer."""
    transfer_s: float
    """Time from then until the last record was received: transfers that computation does not hide."""
    combine_s: float

    @property
    def ttft_s(self) -> float:
        return self.dispatch_s + self.ideal_s + self.idle_s + self.transfer_s + self.combine_s

    @property
    def dispatch_phase_s(self) -> float:
        """Everything before combining."""
        return self.ttft_s - self.combine_s


@dataclass(frozen=True)
class Assignment:
    """One way to spread segments on one number of workers."""

    policy: str
    pipelined: bool
    speed_up: Ratios
    """Speed-up over one instance alone."""
    parts: TimeShares


@dataclass(frozen=True)
class WorkerCount:
    workers: int
    ways: tuple[Assignment, ...]
    best: Ratios
    """The speed-up that no assignment exceeds: exact makespans where proven, else their lower bound."""
    proven: int
    """Requests whose optimal makespan is proven."""

    def way(self, policy: Policy, pipelined: bool = True) -> Assignment:
        [found] = (way for way in self.ways if way.policy == policy.value and way.pipelined == pipelined)
        return found


@dataclass(frozen=True)
class LoadPoint:
    """One rate of arrivals; times to first token by policy."""

    offered: float
    """Prefill asked for, over what the workers can do."""
    per_s: float
    p50_s: Mapping[str, float]
    p99_s: Mapping[str, float]


@dataclass(frozen=True)
class SensitivityCell:
    """Speed-up on the goal's number of workers: by number and median length of segments."""

    segments: int
    median: float
    lpt: float
    best: float


@dataclass(frozen=True)
class Bandwidth:
    """Bandwidth of links and of the combine node's way in."""

    bytes_s: float
    pipelined: float
    """Speed-up."""
    waiting: float
    exposed: float
    """Share of the dispatch phase, pipelined."""


@dataclass(frozen=True)
class Sizing:
    """How many workers one combine node keeps busy, by each of its resources."""

    by_compose: float
    by_ingress: float
    record_bytes_per_token: float


@dataclass(frozen=True)
class Results:
    tokens: float
    """Tokens of a request, mean."""
    alone_s: float
    points: tuple[WorkerCount, ...]
    cells: tuple[SensitivityCell, ...]
    bandwidths: tuple[Bandwidth, ...]
    loaded: tuple[LoadPoint, ...]
    sizing: Sizing
    control: Control | None


def show(to: Console, results: Results, segments: int, loaded_workers: int) -> None:
    to.print(
        f"{segments} cold segments a request, {results.tokens:,.0f} tokens; alone on one instance: "
        f"first token after {seconds(results.alone_s)}. Means of requests, one by one on idle workers."
    )
    lpt, turns = Policy.LPT_TIME, Policy.ROUND_ROBIN
    rows = [
        (
            str(point.workers),
            seconds(point.way(lpt).parts.ttft_s),
            _times(point.way(lpt)),
            _times(point.way(Policy.LPT_FLOPS)),
            _times(point.way(Policy.LPT)),
            _times(point.way(turns)),
            f"{point.best.mean:.2f}x",
            _times(point.way(lpt, False)),
            _times(point.way(turns, False)),
        )
        for point in results.points
    ]
    heads = ("workers", "ttft", "lpt by time", "by flops", "by tokens", "round robin", "no better than")
    to.print(report.table("speed-up over one instance", (*heads, "lpt, waiting", "rr, waiting"), rows))
    to.print("waiting: a worker waits until the receiver has its record; the other columns are pipelined")
    spent = [(point.workers, point.way(lpt).parts) for point in results.points]
    to.print(
        report.table(
            "where the time goes: lpt by time, pipelined",
            ("workers", "ttft", "dispatch", "prefill / workers", "idle", "transfer, exposed", "combine"),
            [
                (
                    str(m),
                    *map(seconds, (p.ttft_s, p.dispatch_s, p.ideal_s, p.idle_s, p.transfer_s, p.combine_s)),
                )
                for m, p in spent
            ],
        )
    )
    cells = {(cell.segments, cell.median): cell for cell in results.cells}
    counts, medians = (list(dict.fromkeys(x)) for x in zip(*cells, strict=True))
    to.print(
        report.table(
            f"{GOAL_WORKERS} workers, lpt by time (no better than), over median length in tokens",
            ("segments", *map(str, medians)),
            [
                (str(k), *(f"{cells[k, x].lpt:.2f}x ({cells[k, x].best:.2f})" for x in medians))
                for k in counts
            ],
        )
    )
    to.print(
        report.table(
            f"{GOAL_WORKERS} workers over the bandwidth of links and of the combine node's network",
            ("GB/s", "pipelined", "waiting", "exposed transfer, of the dispatch phase"),
            [
                (f"{b.bytes_s / 1e9:g}", f"{b.pipelined:.2f}x", f"{b.waiting:.2f}x", percent(b.exposed))
                for b in results.bandwidths
            ],
        )
    )
    labels = [*(label for label, _ in LOADED), WHOLE]
    for title, which in (("p50", "p50_s"), ("p99", "p99_s")):
        to.print(
            report.table(
                f"{title} of the time to first token under load, {loaded_workers} workers and a combine node "
                f"({WHOLE}: {loaded_workers + 1} instances)",
                ("load", "requests/s", *labels),
                [
                    (
                        f"{row.offered:g}",
                        f"{row.per_s:.3g}",
                        *(seconds(getattr(row, which)[label]) for label in labels),
                    )
                    for row in results.loaded
                ],
            )
        )
    size = results.sizing
    to.print(
        f"one combine node keeps {size.by_compose:.1f} workers busy by its computation and "
        f"{size.by_ingress:.1f} by its network ({size.record_bytes_per_token:,.0f} bytes of record a token)"
    )
    if results.control is not None:
        results.control.show(to)
    for point in results.points:
        if point.workers in PUBLISHED:
            found = f"lpt by time {_times(point.way(lpt))}, round robin {_times(point.way(turns))}"
            to.print(f"{point.workers} workers: {found} ({PUBLISHED[point.workers]})")
        if point.workers == GOAL_WORKERS:
            reached = point.way(lpt).speed_up.mean
            verdict = "yes" if reached >= GOAL else "NO"
            to.print(
                f"at least {GOAL:g}x on {GOAL_WORKERS} workers: {verdict} ({reached:.2f}x, "
                f"and no assignment exceeds {point.best.mean:.2f}x)"
            )


def _times(way: Assignment) -> str:
    return f"{way.speed_up.mean:.2f}x"


def plot(path: Path, results: Results, title: str, loaded_workers: int) -> None:
    from .plots import Axes, Line, plot_lines

    workers = [point.workers for point in results.points]

    def of(label: str, policy: Policy, pipelined: bool, colour: str) -> Line:
        ups = [point.way(policy, pipelined).speed_up for point in results.points]
        low, high = ([up.low for up in ups], [up.high for up in ups]) if pipelined else (None, None)
        return Line(label, workers, [up.mean for up in ups], low, high, colour)

    ways = (
        Line("no better than", workers, [point.best.mean for point in results.points], colour="#c7c7c7"),
        of("lpt by time", Policy.LPT_TIME, True, COLOURS["lpt by time"]),
        of("lpt by time, waiting", Policy.LPT_TIME, False, "#98df8a"),
        of("lpt by tokens", Policy.LPT, True, COLOURS["lpt by tokens"]),
        of("round robin", Policy.ROUND_ROBIN, True, COLOURS["round robin"]),
        of("round robin, waiting", Policy.ROUND_ROBIN, False, "#aec7e8"),
    )
    ttft = tuple(
        dataclasses.replace(
            line,
            y=[point.way(policy, pipelined).parts.ttft_s for point in results.points],
            low=None,
            high=None,
        )
        for line, policy, pipelined in (
            (ways[1], Policy.LPT_TIME, True),
            (ways[2], Policy.LPT_TIME, False),
            (ways[4], Policy.ROUND_ROBIN, True),
        )
    )
    panels = [
        Axes("speed-up over one instance", "workers", "times", ways, log_x=True, log_y=True),
        Axes("first token", "workers", "s", ttft, log_x=True, log_y=True),
    ]
    offered = [row.offered for row in results.loaded]
    for name, which in (("p50", "p50_s"), ("p99", "p99_s")):
        lines = tuple(
            Line(label, offered, [getattr(row, which)[label] for row in results.loaded], colour=colour)
            for label, colour in COLOURS.items()
        )
        where = f"load ({loaded_workers} workers, one combine node)"
        panels.append(Axes(f"{name} of the first token under load", where, "s", lines, log_y=True))
    plot_lines(path, panels, title=title)
