"""``model``: first token of composed prompts against full recompute, and the drift of their states."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import click
import torch
from torch import Tensor

from vllm_hypic.harness.numbers import Numbers
from vllm_hypic.harness.report import console, percent

from ..lib import report
from ..lib.report import check_outputs, output_options, seconds
from ..lib.stats import Spread, slope, slopes
from . import gate
from .aims import Aim, aims_table
from .composed import ComposedPass, Composition, Pool, SegmentPass
from .device import Facts, device_option
from .drift import Drift, measure_drift
from .layers import Prefill, Stack
from .operators import Operators, operators_for
from .shapes import REAL, TINY
from .timing import Timer, replayed

KINDS = ("full", "cold", "warm")
REPLAYED = "replayed"
FIRST_STATE = 1e-2
"""Largest relative distance of layer 0's end state from full recompute's. That layer knows no context:
only rounding may part the two. Without transitions it is some tenths."""
ON_CPU = {"segments": (2, 3), "tokens": (48, 96), "query": 8, "chunk": 64, "noise_chunk": 40, "repeats": 2}
"""Sizes that a CPU can try; they replace the defaults."""


@dataclass(frozen=True)
class ModelSettings:
    """``chunk``: tokens of a pass of prefill; segments share one as far as they fit."""

    segments: tuple[int, ...]
    tokens: tuple[int, ...]
    query: int
    window: int
    chunk: int
    noise_chunk: int
    repeats: int
    compile: bool
    graph: bool
    seed: int

    def prompts(self) -> list[Composition]:
        """Raises ``click.UsageError`` for segments without an interior."""
        try:
            return [
                Composition(n, length, self.query, self.window)
                for length in self.tokens
                for n in self.segments
            ]
        except ValueError as e:
            raise click.UsageError(str(e)) from e


@dataclass(frozen=True)
class PromptTimes:
    """First tokens of one shape of prompt, in seconds. ``rows``: of the stream, which alone are computed.

    Relative distances from full recompute's: ``distance`` of warm logits, ``strange`` of those of full
    recompute over other documents, ``first_state`` of the first layer's state.
    """

    prompt: Composition
    rows: int
    seconds: dict[str, Spread]
    distance: float
    strange: float
    first_state: float

    @property
    def name(self) -> str:
        return f"{self.prompt.segments} x {self.prompt.length}"

    def ratio(self, one: str, other: str) -> Spread:
        return self.seconds[one].over(self.seconds[other])


@dataclass(frozen=True)
class CachedSegmentCost:
    """Seconds that one more cached segment of ``tokens`` tokens costs, least squares over the numbers of
    segments; ``alone``: the prefill of such a segment and nothing else; ``full``: one more, recomputed."""

    tokens: int
    warm: float
    spread: Spread
    alone: Spread
    full: float

    @property
    def of_alone(self) -> float:
        return self.warm / self.alone.median


@click.command(help="First token of composed prompts against full recompute, and drift of their states.")
@device_option
@click.option("--segments", type=Numbers(click.IntRange(1, 256)), default="2,4,8,16", show_default=True)
@click.option("--tokens", type=Numbers(click.IntRange(2)), default="1024,2048,4096", show_default=True)
@click.option("--query", type=click.IntRange(1), default=64, show_default=True, help="Tokens of the query.")
@click.option("--window", type=click.IntRange(0), default=8, show_default=True, help="Seam window.")
@click.option("--chunk", type=click.IntRange(1), default=8192, show_default=True, help="Tokens of a pass.")
@click.option(
    "--noise-chunk", type=click.IntRange(1), default=2048, show_default=True, help="Chunk for the noise."
)
@click.option("--repeats", type=click.IntRange(1), default=10, show_default=True)
@click.option(
    "--compile/--eager", default=False, show_default=True, help="torch.compile the code outside the cores."
)
@click.option(
    "--graph/--no-graph", default=False, show_default=True, help="Also replay warm passes as graphs."
)
@click.option("--seed", type=int, default=0, show_default=True)
@output_options
@click.pass_context
@gate.reporting_failures
def model(
    context: click.Context, device: torch.device, json_path: Path | None, plot_path: Path | None, **given: Any
) -> None:
    check_outputs(json_path, plot_path)
    if device.type == "cpu":
        from_default = click.core.ParameterSource.DEFAULT
        given |= {k: v for k, v in ON_CPU.items() if context.get_parameter_source(k) is from_default}
    settings = ModelSettings(**given)
    prompts = settings.prompts()
    if settings.graph and device.type != "cuda":
        raise click.UsageError("--graph: CUDA graphs need --device cuda")
    operators, facts, dtype = operators_for(device), Facts.of(device), torch.bfloat16
    to = console()
    to.print(f"{facts}, {operators.name} operators, {dtype}")
    if facts.meaningless:
        to.print(facts.meaningless, style="bold")
    with torch.inference_mode():
        passed = gate.check_model(operators, device, dtype, compiled=settings.compile)
        points, marginals, drift = _measure(settings, prompts, operators, device, dtype)
    for table in (_points_table(points), _marginal_table(marginals), _drift_table(drift)):
        to.print(table)
    to.print(
        f"Gate passed: {len(passed)} distances from float64, the largest {_largest(passed):.2g}; every warm "
        "answer equals the cold one."
    )
    aims = [] if facts.meaningless else _aims(points, marginals)
    if aims:
        to.print(aims_table(aims))
    if json_path is not None:
        results = {"points": points, "marginals": marginals, "drift": drift, "aims": aims}
        kept = {"device": facts, "operators": operators.name, "dtype": str(dtype), "settings": settings}
        report.write_json(
            json_path,
            report.report("gpu model", kept, results, gate=passed, module="benchmarks.gpu"),
        )
    if plot_path is not None:
        _plot(plot_path, points, drift, f"{facts}" + (": meaningless" if facts.meaningless else ""))


def _measure(
    settings: ModelSettings,
    prompts: Sequence[Composition],
    operators: Operators,
    device: torch.device,
    dtype: torch.dtype,
) -> tuple[list[PromptTimes], list[CachedSegmentCost], Drift]:
    shape = TINY if device.type == "cpu" else REAL
    longest = max(p.tokens for p in prompts)
    stack = Stack.random(shape, longest, dtype, device, settings.seed)
    if settings.compile:
        stack = stack.compile()
    drawn = torch.Generator().manual_seed(settings.seed)
    tokens = torch.randint(0, shape.vocabulary, (longest,), generator=drawn).to(device)
    # A user waits for the host, too.
    timer = Timer(device, settings.repeats, wall=True)
    points: list[PromptTimes] = []
    alone: dict[int, Spread] = {}
    with report.progress(console(), len(prompts) + len(settings.tokens) + 1, "first token") as steps:
        for prompt in prompts:
            steps.show(f"{prompt.segments} x {prompt.length}")
            points.append(_point(_Bench(stack, prompt, tokens[: prompt.tokens], operators, settings), timer))
            steps.done()
        for length in settings.tokens:
            steps.show(f"one segment of {length}")
            one = tokens[:length]
            calls = {"alone": lambda one=one: Prefill.of(stack, one, operators).run(settings.chunk)}
            alone[length] = timer.measure(calls)["alone"]
            steps.done()
        steps.show("drift")
        prompt = _drift_prompt(prompts)
        bench = _Bench(stack, prompt, tokens[: prompt.tokens], operators, settings)
        bench.cold()
        warm = ComposedPass(stack, prompt, bench.pool, operators)
        drift = measure_drift(
            stack, prompt, bench.tokens, warm, operators, settings.chunk, settings.noise_chunk
        )
        steps.done()
    return points, _marginals(points, alone), drift


def _drift_prompt(prompts: Sequence[Composition]) -> Composition:
    """Four of the longest segments, or as near as there is."""
    longest = max(p.length for p in prompts)
    return min((p for p in prompts if p.length == longest), key=lambda p: abs(p.segments - 4))


class _Bench:
    """One prompt's three ways to its first token, each with all that the host does for it.

    Like an engine's, full recompute and segments run in passes of at most `chunk` tokens.
    """

    def __init__(
        self, stack: Stack, prompt: Composition, tokens: Tensor, operators: Operators, settings: ModelSettings
    ) -> None:
        self.stack, self.prompt, self.tokens, self.operators = stack, prompt, tokens, operators
        self.settings = settings
        self.pool = Pool.empty(stack, prompt)
        self.segments = tokens[: prompt.segments * prompt.length].view(prompt.segments, prompt.length)

    def prefill(self, tokens: Tensor) -> tuple[Tensor, Prefill]:
        """Logits, and the pass with its states."""
        run = Prefill.of(self.stack, tokens, self.operators)
        return run.run(self.settings.chunk), run

    def compose(self) -> tuple[Tensor, ComposedPass]:
        """Logits, and the pass with its states."""
        run = ComposedPass(self.stack, self.prompt, self.pool, self.operators)
        return run.run(self.tokens), run

    def full(self) -> Tensor:
        return self.prefill(self.tokens)[0]

    def warm(self) -> Tensor:
        return self.compose()[0]

    def cold(self) -> Tensor:
        n = self.prompt.segments
        together = max(1, self.settings.chunk // self.prompt.length)
        for first in range(0, n, together):
            part = range(first, min(first + together, n))
            SegmentPass(self.stack, self.prompt, self.pool, part, self.operators).run(
                self.segments[part.start : part.stop]
            )
        return self.warm()

    def replayed(self) -> Callable[[], object]:
        """The warm pass on the device alone: planned, and recorded as a graph."""
        planned = ComposedPass(self.stack, self.prompt, self.pool, self.operators)
        return replayed(lambda: planned.run(self.tokens), self.stack.device)


def _point(bench: _Bench, timer: Timer) -> PromptTimes:
    found = _checked(bench)
    calls: dict[str, Callable[[], object]] = {"full": bench.full, "cold": bench.cold, "warm": bench.warm}
    if bench.settings.graph:
        calls[REPLAYED] = bench.replayed()
    return replace(found, seconds=timer.measure(calls))


def _checked(bench: _Bench) -> PromptTimes:
    """The point without its times; raises :class:`gate.GateFailed` where answers cannot be right."""
    name = f"{bench.prompt.segments} x {bench.prompt.length}"
    cold = bench.cold()
    warm, composed = bench.compose()
    if not torch.equal(cold, warm):
        raise gate.GateFailed(f"{name}: the warm answer differs from the cold answer")
    full, prefill = bench.prefill(bench.tokens)
    first = gate.relative(composed.state(0), prefill.state(0))
    other = bench.tokens.clone()
    documents = other[: bench.segments.numel()]
    documents.copy_(documents.flip(0))
    strange = gate.relative(bench.prefill(other)[0], full)
    distance = gate.relative(warm, full)
    gate.require(
        [
            gate.Distance(f"{name}, state of layer 0 from full recompute's", first, FIRST_STATE),
            gate.Distance(
                f"{name}, logits from full recompute's, against other documents'", distance, strange
            ),
        ]
    )
    return PromptTimes(bench.prompt, len(bench.prompt.positions()), {}, distance, strange, first)


def _marginals(points: Sequence[PromptTimes], alone: dict[int, Spread]) -> list[CachedSegmentCost]:
    """Costs for the lengths that were measured with several numbers of segments."""
    found = []
    for length, one in alone.items():
        mine = [p for p in points if p.prompt.length == length]
        x = [float(p.prompt.segments) for p in mine]
        if len(set(x)) < 2:
            continue
        warm, full = ([p.seconds[kind] for p in mine] for kind in ("warm", "full"))
        fits = [slope(x, [s.median for s in spreads]) for spreads in (warm, full)]
        found.append(CachedSegmentCost(length, fits[0], slopes(x, warm), one, fits[1]))
    return found


def _aims(points: Sequence[PromptTimes], marginals: Sequence[CachedSegmentCost]) -> list[Aim]:
    aims = []
    for p in points:
        if (p.prompt.segments, p.prompt.length) == (4, 4096):
            aims.append(Aim("full recompute / warm, 4 x 4096", p.ratio("full", "warm").median, 10, True))
            aims.append(Aim("cold / full recompute, 4 x 4096", p.ratio("cold", "full").median, 1.05, False))
    aims += [
        Aim(f"one more cached segment of {m.tokens} / its prefill", m.of_alone, 0.02, False)
        for m in marginals
    ]
    return aims


def _largest(passed: Sequence[gate.Distance]) -> float:
    return max(d.error for d in passed if not d.planted)


def _points_table(points: Sequence[PromptTimes]) -> Any:
    with_graph = any(REPLAYED in p.seconds for p in points)
    columns = [
        "segments x tokens",
        *KINDS,
        "full / warm",
        "cold / full",
        "rows",
        "warm - full",
        "others - full",
    ]
    if with_graph:
        columns.append(REPLAYED)
    rows = []
    for p in points:
        row = [p.name, *(seconds(p.seconds[kind].median) for kind in KINDS)]
        row += [_range(p.ratio("full", "warm")), _range(p.ratio("cold", "full"))]
        row += [str(p.rows), f"{p.distance:.2g}", f"{p.strange:.2g}"]
        if with_graph:
            row.append(seconds(p.seconds[REPLAYED].median))
        rows.append(row)
    return report.table("first token", columns, rows)


def _marginal_table(marginals: Sequence[CachedSegmentCost]) -> Any:
    columns = ("one more segment of", "warm", "its prefill alone", "warm / alone", "full", "warm / full")
    rows = [
        (
            str(m.tokens),
            f"{seconds(m.warm)} ({seconds(m.spread.min)} to {seconds(m.spread.max)})",
            seconds(m.alone.median),
            percent(m.of_alone),
            seconds(m.full),
            percent(m.warm / m.full),
        )
        for m in marginals
    ]
    return report.table("one more cached segment", columns, rows)


def _drift_table(drift: Drift) -> Any:
    rows = [(str(d.layer), f"{d.composed:.2e}", f"{d.noise:.2e}") for d in drift.layers]
    rows.append(
        ("0, from float64", f"{drift.first_composed:.2e}", f"{drift.first_full:.2e} (full recompute)")
    )
    return report.table(
        "states: relative distance from full recompute's", ("layer", "composed", "other chunk size"), rows
    )


def _range(ratio: Spread) -> str:
    return f"{ratio.median:.3g} ({ratio.min:.3g}-{ratio.max:.3g})"


def _plot(path: Path, points: Sequence[PromptTimes], drift: Drift, title: str) -> None:
    from ..lib.report import COLOURS
    from ..plots import Axes, Line, plot_lines

    names = {"full": "stock", "cold": "cold", "warm": "warm"}
    panels = []
    for length in sorted({p.prompt.length for p in points}):
        mine = [p for p in points if p.prompt.length == length]
        x = [float(p.prompt.segments) for p in mine]
        lines = []
        for kind in KINDS:
            spreads = [p.seconds[kind] for p in mine]
            label = "full recompute" if kind == "full" else kind
            bounds = [s.min for s in spreads], [s.max for s in spreads]
            lines.append(Line(label, x, [s.median for s in spreads], *bounds, COLOURS[names[kind]]))
        panels.append(Axes(f"segments of {length} tokens", "segments", "seconds", lines, log_y=True))
    layers = [float(d.layer) for d in drift.layers]
    states = [
        Line("composed", layers, [d.composed for d in drift.layers], colour=COLOURS["warm"]),
        Line("other chunk size", layers, [d.noise for d in drift.layers], colour=COLOURS["stock"]),
    ]
    panels.append(Axes("states, from full recompute's", "layer", "relative distance", states, log_y=True))
    plot_lines(path, panels, title=title)
