"""``ttft``, ``ttft-length``, ``ttft-segments``: time to first token of stock vLLM, cold and warm requests."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from vllm_hypic.harness.engine_calls import Ask
from vllm_hypic.harness.engines import Engine, running
from vllm_hypic.harness.numbers import Numbers
from vllm_hypic.harness.report import console, percent
from vllm_hypic.harness.settings import EngineSettings

from .lib import gate, report
from .lib.prompts import BESIDE, Shape, Writer
from .lib.report import check_outputs, described, output_options, seconds
from .lib.settings import SHORTEST, engine_options
from .lib.stats import Spread, slope, slopes
from .options import needed_context, repeat_options
from .points import COLUMNS, KINDS, LABELS, ShapeTimes, gate_text, measure, rounds, rows

SEGMENTS = click.IntRange(1, 256)
TOKENS = click.IntRange(SHORTEST, 65536)


@dataclass(frozen=True)
class CachedSegmentCost:
    """What one more segment of ``tokens`` tokens costs, in seconds; least squares over the points.

    ``*_fit`` are fitted to the medians, the spreads hold the fit of every repeat.
    """

    tokens: int
    warm_fit: float
    warm: Spread
    stock_fit: float
    stock: Spread
    alone: Spread
    """Stock vLLM's time for a prompt of one such segment and nothing else."""

    @property
    def of_stock_slope(self) -> float:
        """One more cached segment over one more computed segment."""
        return self.warm_fit / self.stock_fit

    @property
    def of_alone(self) -> float:
        return self.warm_fit / self.alone.median


@click.command(help="First token at one point: stock vLLM, its prefix caching, hypic cold and warm.")
@engine_options()
@repeat_options
@click.option("--segments", type=SEGMENTS, default=4, show_default=True)
@click.option("--tokens", type=TOKENS, default=2048, show_default=True)
@output_options
@gate.reporting_failures
def ttft(
    engine: EngineSettings,
    segments: int,
    tokens: int,
    repeats: int,
    seed: int,
    json_path: Path | None,
    plot_path: Path | None,
) -> None:
    check_outputs(json_path, plot_path)
    settings = {"engine": engine, "shapes": [Shape(segments, tokens)], "repeats": repeats, "seed": seed}
    points, _, engines = _measure(engine, [Shape(segments, tokens)], repeats, seed)
    to = console()
    to.print(report.table(f"time to first token, {engine.model.name}", COLUMNS, rows(points)))
    to.print(gate_text(points))
    _write("ttft", settings, points, {"engines": engines}, json_path)
    if plot_path is not None:
        from .plots import plot_bars

        bars = {LABELS[kind]: {"": points[0].seconds[kind].median} for kind in KINDS}
        plot_bars(plot_path, bars, title=f"time to first token, {points[0].shape}", label="seconds")


@click.command("ttft-length", help="First token over the length of segments (HYPIC's figure 12a).")
@engine_options()
@repeat_options
@click.option("--segments", type=SEGMENTS, default=4, show_default=True)
@click.option(
    "--tokens",
    type=Numbers(click.IntRange(SHORTEST, 65536)),
    default="1024,2048,3072,4096",
    show_default=True,
)
@output_options
@gate.reporting_failures
def ttft_length(
    engine: EngineSettings,
    segments: int,
    tokens: tuple[int, ...],
    repeats: int,
    seed: int,
    json_path: Path | None,
    plot_path: Path | None,
) -> None:
    check_outputs(json_path, plot_path)
    shapes = [Shape(segments, n) for n in tokens]
    points, _, engines = _measure(engine, shapes, repeats, seed)
    to = console()
    to.print(report.table(f"time to first token, {engine.model.name}", COLUMNS, rows(points)))
    to.print(gate_text(points))
    settings = {"engine": engine, "shapes": shapes, "repeats": repeats, "seed": seed}
    _write("ttft-length", settings, points, {"engines": engines}, json_path)
    if plot_path is not None:
        x = [float(n) for n in tokens]
        _plot(plot_path, points, x, "tokens per segment", f"{segments} segments")


@click.command("ttft-segments", help="First token over the number of segments (HYPIC's figure 12b).")
@engine_options()
@repeat_options
@click.option("--segments", type=Numbers(click.IntRange(1, 256)), default="4,8,12,16", show_default=True)
@click.option("--tokens", type=TOKENS, default=1024, show_default=True)
@output_options
@gate.reporting_failures
def ttft_segments(
    engine: EngineSettings,
    segments: tuple[int, ...],
    tokens: int,
    repeats: int,
    seed: int,
    json_path: Path | None,
    plot_path: Path | None,
) -> None:
    if len(segments) < 2:
        raise click.UsageError("--segments: a marginal cost needs at least two numbers of segments")
    check_outputs(json_path, plot_path)
    shapes = [Shape(n, tokens) for n in segments]
    points, alone, engines = _measure(engine, shapes, repeats, seed, alone=tokens)
    assert alone is not None
    marginal = _marginal(points, tokens, alone)
    to = console()
    to.print(report.table(f"time to first token, {engine.model.name}", COLUMNS, rows(points)))
    to.print(_marginal_table(marginal))
    to.print(gate_text(points))
    settings = {"engine": engine, "shapes": shapes, "repeats": repeats, "seed": seed}
    more = {
        "engines": engines,
        "marginal": marginal,
        "marginal_shares": {"of_stock_slope": marginal.of_stock_slope, "of_alone": marginal.of_alone},
    }
    _write("ttft-segments", settings, points, more, json_path)
    if plot_path is not None:
        x = [float(n) for n in segments]
        _plot(plot_path, points, x, "segments", f"segments of {tokens} tokens")


def _measure(
    engine: EngineSettings, shapes: Sequence[Shape], repeats: int, seed: int, alone: int | None = None
) -> tuple[list[ShapeTimes], Spread | None, dict[str, Any]]:
    """The points, stock vLLM's time for one segment of ``alone`` tokens, and what the engines are."""
    context = needed_context([(s.segments, s.tokens) for s in shapes], BESIDE)
    stock, hypic = Engine(engine, context, hypic=False), Engine(engine, context, hypic=True)
    total = rounds(len(shapes), repeats) + (repeats if alone else 0)
    with report.progress(console(), total, "starting engines") as steps, running(stock, hypic):
        points = measure(stock, hypic, shapes, repeats, seed, steps)
        if alone is None:
            return points, None, described(stock, hypic)
        writer = Writer(stock.vocabulary, seed + 1)
        times = []
        for _ in range(repeats):
            steps.show("one segment alone")
            answer = stock.ask(Ask(list(writer.document(alone))))
            gate.require_fresh(answer, "stock vLLM")
            times.append(answer.first_token_s)
            steps.done()
        return points, Spread.of(times), described(stock, hypic)


def _marginal(points: Sequence[ShapeTimes], tokens: int, alone: Spread) -> CachedSegmentCost:
    x = [float(p.shape.segments) for p in points]
    warm, stock = ([p.seconds[kind] for p in points] for kind in ("warm", "stock"))
    return CachedSegmentCost(
        tokens,
        warm_fit=slope(x, [s.median for s in warm]),
        warm=slopes(x, warm),
        stock_fit=slope(x, [s.median for s in stock]),
        stock=slopes(x, stock),
        alone=alone,
    )


def _marginal_table(m: CachedSegmentCost) -> Any:
    def row(name: str, value: float, spread: Spread, share: str) -> list[str]:
        return [name, seconds(value), seconds(spread.min), seconds(spread.max), share]

    return report.table(
        f"one more segment of {m.tokens} tokens",
        ("", "least squares", "min", "max", "warm costs"),
        [
            row("hypic, warm", m.warm_fit, m.warm, ""),
            row("stock vLLM, one more", m.stock_fit, m.stock, percent(m.of_stock_slope)),
            row("stock vLLM, alone", m.alone.median, m.alone, percent(m.of_alone)),
        ],
    )


def _write(
    name: str, settings: Any, points: Sequence[ShapeTimes], more: dict[str, Any], json_path: Path | None
) -> None:
    if json_path is None:
        return
    passed = {
        "cold_equals_warm": True,
        "distance_from_stock": {str(p.shape): p.distance for p in points},
    }
    results = {"points": points, **more}
    engine: EngineSettings = settings["engine"]
    report.write_json(json_path, report.report(name, settings, results, gate=passed, threads=engine.threads))


def _plot(path: Path, points: Sequence[ShapeTimes], x: list[float], x_label: str, title: str) -> None:
    from .lib.report import COLOURS
    from .plots import Axes, Line, plot_lines

    times, ratios = [], []
    for kind in KINDS:
        spreads = [p.seconds[kind] for p in points]
        times.append(
            Line(
                LABELS[kind],
                x,
                [s.median for s in spreads],
                [s.min for s in spreads],
                [s.max for s in spreads],
                COLOURS[kind],
            )
        )
        if kind != "stock":
            speed = [p.speedup[kind].median for p in points]
            ratios.append(Line(LABELS[kind], x, speed, colour=COLOURS[kind]))
    plot_lines(
        path,
        [
            Axes("time to first token", x_label, "seconds", times, log_y=True),
            Axes("times sooner than full recompute", x_label, "ratio", ratios, log_y=True),
        ],
        title=title,
    )
