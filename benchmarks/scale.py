"""``scale``: segment-parallel prefill of cold requests on 1 to 64 workers, simulated.

Nothing is computed by a model: the costs are constants, measured or published (``scale_model.py``), so that
results are the same on every machine; ``--control`` adds what is measured here and now.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from rich.console import Console

from vllm_hypic.harness import report
from vllm_hypic.harness.report import check_outputs, console, output_options, percent, seconds
from vllm_hypic.harness.settings import Numbers
from vllm_hypic.harness.stats import percentile

from .scale_model import PRESETS, Costs, Lengths, Request, at_once, poisson
from .scale_sim import Cluster, Policy, Times, alone_s, least_s, simulate, simulate_whole

if TYPE_CHECKING:
    from .scale_control import Control

GOAL_WORKERS, GOAL = 8, 7.0
PUBLISHED = {4: "HYPIC's release: 3.6x by LPT, 2.4x by round robin", 8: "HYPIC's paper: 6.1x"}
COUNTS = (8, 16, 32, 64, 128)
MEDIANS = (350, 700, 1340, 2700)
BANDWIDTHS = (0.125e9, 1.25e9, 5e9, 12.5e9, 50e9, 200e9)
LEAST_PIPELINING = 0.05
"""Of the dispatch phase: what may be left of the transfers to be seen."""


@dataclass(frozen=True)
class Ratios:
    """Over the requests of a sample: mean, 5th and 95th percentile."""

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
    """Until the first segment has reached a worker."""
    ideal_s: float
    """All prefill, over the number of workers."""
    idle_s: float
    """The rest until the last segment is computed: workers with nothing to do, or waiting for a transfer."""
    transfer_s: float
    """From then until the last record has landed: transfers that computation does not hide."""
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
    """Over one instance alone."""
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
    """Of links and of the combine node's way in."""

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
    """Of a request, mean."""
    alone_s: float
    points: tuple[WorkerCount, ...]
    cells: tuple[SensitivityCell, ...]
    bandwidths: tuple[Bandwidth, ...]
    loaded: tuple[LoadPoint, ...]
    sizing: Sizing
    control: Control | None


class Overrides(click.ParamType):
    """``field=number`` of :class:`Costs`."""

    name = "name=number"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[str, float]:
        if isinstance(value, tuple):
            return value
        names = [field.name for field in dataclasses.fields(Costs) if field.name != "records"]
        name, _, number = value.partition("=")
        if name not in names:
            self.fail(f"{value!r}: expected NAME=NUMBER, NAME one of {', '.join(names)}", param, ctx)
        try:
            return name, float(number)
        except ValueError:
            self.fail(f"{value!r}: {number!r} is no number", param, ctx)


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


@click.command(help="Segment-parallel prefill on many workers, by simulation.")
@click.option(
    "--preset", type=click.Choice(tuple(PRESETS)), default="cpu-169m", show_default=True, help="Costs."
)
@click.option(
    "--set",
    "overrides",
    type=Overrides(),
    multiple=True,
    help="Another value for one cost, like compose_segment_s=0.001; several times for several.",
)
@click.option("--segments", type=click.IntRange(1, 4096), default=64, show_default=True, help="A request's.")
@click.option("--median", type=click.FloatRange(1, 1e6), default=1340.0, show_default=True, help="Tokens.")
@click.option(
    "--sigma", type=click.FloatRange(0, 5), default=0.9, show_default=True, help="Of log-normal lengths."
)
@click.option("--shortest", type=click.IntRange(1), default=256, show_default=True, help="Tokens.")
@click.option("--longest", type=click.IntRange(1), default=8192, show_default=True, help="Tokens.")
@click.option(
    "--requests", type=click.IntRange(1, 10**5), default=50, show_default=True, help="Looked at one by one."
)
@click.option(
    "--arrivals", type=click.IntRange(100, 10**6), default=2000, show_default=True, help="Under load, a rate."
)
@click.option(
    "--workers",
    type=Numbers(click.IntRange(1, 4096)),
    default="1,2,4,8,16,32,64",
    show_default=True,
    help="Numbers of workers.",
)
@click.option(
    "--loaded-workers", type=click.IntRange(1, 4096), default=8, show_default=True, help="Under load."
)
@click.option(
    "--loads",
    type=Numbers(click.FloatRange(0, 2, min_open=True)),
    default="0.1,0.2,0.3,0.4,0.5,0.6,0.7,0.8,0.9",
    show_default=True,
    help="Prefill asked for, over what the workers can do.",
)
@click.option("--seed", type=click.IntRange(0), default=0, show_default=True, help="Lengths and arrivals.")
@click.option("--control", is_flag=True, help="Also measure router and directory on this machine.")
@output_options
def scale(
    preset: str,
    overrides: tuple[tuple[str, float], ...],
    segments: int,
    median: float,
    sigma: float,
    shortest: int,
    longest: int,
    requests: int,
    arrivals: int,
    workers: tuple[int, ...],
    loaded_workers: int,
    loads: tuple[float, ...],
    seed: int,
    control: bool,
    json_path: Path | None,
    plot_path: Path | None,
) -> None:
    check_outputs(json_path, plot_path)
    if longest < shortest:
        raise click.UsageError(f"--longest {longest}: expected at least --shortest ({shortest})")
    try:
        costs = dataclasses.replace(PRESETS[preset], **dict[str, Any](overrides))
    except ValueError as e:
        raise click.UsageError(f"--set: {e}") from e
    lengths = Lengths(median, sigma, shortest, longest)
    to = console()
    with report.progress(to, len(workers) + len(loads) + len(MEDIANS) + len(BANDWIDTHS) + control) as steps:
        sample = at_once(requests, segments, lengths, costs, seed)
        points = []
        for m in sorted(workers):
            steps.show(f"{m} workers")
            points.append(measure(sample, m, costs))
            steps.done()
        cells = []
        for middle in MEDIANS:
            steps.show(f"segments of {middle} tokens")
            cells += sensitivity(requests, dataclasses.replace(lengths, median=middle), costs, seed)
            steps.done()
        bandwidths = []
        for bytes_s in BANDWIDTHS:
            steps.show("bandwidth")
            bandwidths.append(bandwidth(sample, bytes_s, costs))
            steps.done()
        loaded = []
        crowd = at_once(arrivals, segments, lengths, costs, seed + 1)
        for offered in sorted(loads):
            steps.show(f"load {offered:g}")
            loaded.append(under_load(crowd, offered, loaded_workers, costs, seed + 2))
            steps.done()
        measured = None
        if control:
            from .scale_control import control_plane  # needs msgspec and aiohttp, which vLLM brings

            steps.show("router and directory")
            measured = control_plane()
            steps.done()
    results = Results(
        tokens=statistics.fmean(request.tokens for request in sample),
        alone_s=statistics.fmean(alone_s(request, costs) for request in sample),
        points=tuple(points),
        cells=tuple(cells),
        bandwidths=tuple(bandwidths),
        loaded=tuple(loaded),
        sizing=sizing(crowd, costs),
        control=measured,
    )
    show(to, results, segments, loaded_workers)
    if json_path is not None:
        settings = {
            "preset": preset,
            "overrides": dict(overrides),
            "costs": costs,
            "segments": segments,
            "lengths": lengths,
            "requests": requests,
            "arrivals": arrivals,
            "loaded_workers": loaded_workers,
            "seed": seed,
        }
        report.write_json(json_path, report.report("scale", settings, results))
    if plot_path is not None:
        plot(
            plot_path,
            results,
            f"{preset}: {segments} cold segments of median {median:g} tokens",
            loaded_workers,
        )


# -- what is simulated


def measure(sample: Sequence[Request], workers: int, costs: Costs) -> WorkerCount:
    """Each request of the sample by itself on idle workers, in every way."""
    alone = [alone_s(request, costs) for request in sample]
    ways = []
    for policy in (Policy.LPT_TIME, Policy.LPT_FLOPS, Policy.LPT, Policy.ROUND_ROBIN):
        for pipelined in (True, False):
            times = [
                simulate([request], Cluster(workers, policy, pipelined), costs).times[0] for request in sample
            ]
            speed_up = Ratios.of([a / t.ttft_s for a, t in zip(alone, times, strict=True)])
            ways.append(Assignment(policy.value, pipelined, speed_up, parts(sample, times, workers)))
    least = [least_s(request, workers, costs) for request in sample]
    best = Ratios.of([a / time for a, (time, _) in zip(alone, least, strict=True)])
    return WorkerCount(workers, tuple(ways), best, sum(proven for _, proven in least))


def parts(sample: Sequence[Request], times: Sequence[Times], workers: int) -> TimeShares:
    mean = statistics.fmean
    ideal = mean(request.prefill_s / workers for request in sample)
    return TimeShares(
        dispatch_s=mean(t.begun_s - t.arrival_s for t in times),
        ideal_s=ideal,
        idle_s=mean(t.prefilled_s - t.begun_s for t in times) - ideal,
        transfer_s=mean(t.landed_s - t.prefilled_s for t in times),
        combine_s=mean(t.first_token_s - t.landed_s for t in times),
    )


def sensitivity(n: int, lengths: Lengths, costs: Costs, seed: int) -> list[SensitivityCell]:
    """Speed-ups on the goal's workers over numbers of segments."""
    found = []
    for segments in COUNTS:
        sample = at_once(n, segments, lengths, costs, seed)
        lpt = [_speed_up(request, Cluster(GOAL_WORKERS, Policy.LPT_TIME), costs) for request in sample]
        best = [alone_s(request, costs) / least_s(request, GOAL_WORKERS, costs)[0] for request in sample]
        found.append(SensitivityCell(segments, lengths.median, statistics.fmean(lpt), statistics.fmean(best)))
    return found


def bandwidth(sample: Sequence[Request], bytes_s: float, costs: Costs) -> Bandwidth:
    costs = dataclasses.replace(costs, link_bytes_s=bytes_s, ingress_bytes_s=bytes_s)
    cluster = Cluster(GOAL_WORKERS, Policy.LPT_TIME)
    times = [simulate([request], cluster, costs).times[0] for request in sample]
    waiting = dataclasses.replace(cluster, pipelined=False)
    spent = parts(sample, times, GOAL_WORKERS)
    return Bandwidth(
        bytes_s,
        statistics.fmean(alone_s(r, costs) / t.ttft_s for r, t in zip(sample, times, strict=True)),
        statistics.fmean(_speed_up(request, waiting, costs) for request in sample),
        spent.transfer_s / spent.dispatch_phase_s,
    )


def _speed_up(request: Request, cluster: Cluster, costs: Costs) -> float:
    return alone_s(request, costs) / simulate([request], cluster, costs).times[0].ttft_s


def under_load(crowd: Sequence[Request], offered: float, workers: int, costs: Costs, seed: int) -> LoadPoint:
    """Poisson arrivals at ``offered`` of the workers' capacity, one combine node.

    Whole requests get the combine node as one more instance, so that both have the same hardware.
    """
    per_s = offered * workers / statistics.fmean(request.prefill_s for request in crowd)
    requests = poisson(crowd, per_s, seed)
    times: dict[str, Sequence[Times]] = {
        label: simulate(requests, Cluster(workers, policy), costs).times for label, policy in LOADED
    }
    times[WHOLE] = simulate_whole(requests, workers + 1, costs)
    ttft = {label: [t.ttft_s for t in found] for label, found in times.items()}
    return LoadPoint(
        offered,
        per_s,
        {label: percentile(values, 50) for label, values in ttft.items()},
        {label: percentile(values, 99) for label, values in ttft.items()},
    )


def sizing(crowd: Sequence[Request], costs: Costs) -> Sizing:
    prefill = statistics.fmean(request.prefill_s for request in crowd)
    tokens = statistics.fmean(request.tokens for request in crowd)
    nbytes = statistics.fmean(sum(piece.nbytes for piece in request.pieces) for request in crowd)
    compose = statistics.fmean(request.compose_s for request in crowd)
    ingress = nbytes / costs.ingress_bytes_s
    return Sizing(
        by_compose=prefill / compose if compose else math.inf,
        by_ingress=prefill / ingress if ingress else math.inf,
        record_bytes_per_token=nbytes / tokens,
    )


# -- what is shown


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
    to.print("waiting: a worker waits until its record has landed; the other columns are pipelined")
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
    to.print(
        report.table(
            f"{GOAL_WORKERS} workers, lpt by time (no better than), over median length in tokens",
            ("segments", *map(str, MEDIANS)),
            [
                (str(k), *(f"{cells[k, x].lpt:.2f}x ({cells[k, x].best:.2f})" for x in MEDIANS))
                for k in COUNTS
            ],
        )
    )
    to.print(
        report.table(
            f"{GOAL_WORKERS} workers over the bandwidth of links and of the combine node's way in",
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
        f"{size.by_ingress:.1f} by its way in ({size.record_bytes_per_token:,.0f} bytes of record a token)"
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
    from vllm_hypic.harness.plots import Axes, Line, plot_lines

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
