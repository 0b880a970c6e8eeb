"""``scale``: segment-parallel prefill of cold requests on 1 to 64 workers, simulated.

Nothing is computed by a model: the costs are constants, measured or published (``scale_model.py``), so that
results are the same on every machine; ``--control`` adds what is measured here and now.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from vllm_hypic.eval.estimates import percentile
from vllm_hypic.harness.numbers import Numbers
from vllm_hypic.harness.report import console

from .lib import report
from .lib.report import check_outputs, output_options
from .scale_model import PRESETS, Costs, Lengths, Request, at_once, poisson
from .scale_results import (
    GOAL_WORKERS,
    LOADED,
    WHOLE,
    Assignment,
    Bandwidth,
    LoadPoint,
    Ratios,
    Results,
    SensitivityCell,
    Sizing,
    TimeShares,
    WorkerCount,
    plot,
    show,
)
from .scale_sim import Cluster, Policy, Times, alone_s, least_s, simulate, simulate_whole

COUNTS = (8, 16, 32, 64, 128)
MEDIANS = (350, 700, 1340, 2700)
BANDWIDTHS = (0.125e9, 1.25e9, 5e9, 12.5e9, 50e9, 200e9)


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
            self.fail(f"{value!r}: {number!r} is not a number", param, ctx)


@click.command(help="Segment-parallel prefill on many workers, by simulation.")
@click.option(
    "--preset", type=click.Choice(tuple(PRESETS)), default="cpu-169m", show_default=True, help="Costs."
)
@click.option(
    "--set",
    "overrides",
    type=Overrides(),
    multiple=True,
    help="Another value for one cost, like compose_segment_s=0.001; repeatable.",
)
@click.option("--segments", type=click.IntRange(1, 4096), default=64, show_default=True, help="Per request.")
@click.option("--median", type=click.FloatRange(1, 1e6), default=1340.0, show_default=True, help="Tokens.")
@click.option(
    "--sigma", type=click.FloatRange(0, 5), default=0.9, show_default=True, help="Sigma of lognormal lengths."
)
@click.option("--shortest", type=click.IntRange(1), default=256, show_default=True, help="Tokens.")
@click.option("--longest", type=click.IntRange(1), default=8192, show_default=True, help="Tokens.")
@click.option(
    "--requests", type=click.IntRange(1, 10**5), default=50, show_default=True, help="Requests without load."
)
@click.option(
    "--arrivals", type=click.IntRange(100, 10**6), default=2000, show_default=True, help="Requests at a load."
)
@click.option(
    "--workers",
    type=Numbers(click.IntRange(1, 4096)),
    default="1,2,4,8,16,32,64",
    show_default=True,
    help="Numbers of workers.",
)
@click.option(
    "--loaded-workers", type=click.IntRange(1, 4096), default=8, show_default=True, help="Workers under load."
)
@click.option(
    "--loads",
    type=Numbers(click.FloatRange(0, 2, min_open=True)),
    default="0.1,0.2,0.3,0.4,0.5,0.6,0.7,0.8,0.9",
    show_default=True,
    help="Loads: requested prefill, as shares of the workers' capacity.",
)
@click.option("--seed", type=click.IntRange(0), default=0, show_default=True, help="Seed of the requests.")
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
        transfer_s=mean(t.received_s - t.prefilled_s for t in times),
        combine_s=mean(t.first_token_s - t.received_s for t in times),
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
