"""``eviction``: traces replayed through the engine's eviction policies, over cache sizes.

Nothing is computed by a model, so that results are the same on every machine.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import click
from rich.console import Console

from vllm_hypic.harness.report import console, percent, size
from vllm_hypic.store.eviction.flop_aware import FlopAwarePolicy
from vllm_hypic.store.eviction.policy import LruPolicy

from .eviction_replay import Accesses, Saved, offline_greedy, replay, upper_bound
from .eviction_shapes import SHAPES, RecordShape
from .eviction_traces import KINDS, Request, generate, load
from .lib import report
from .lib.report import check_outputs, output_options
from .trace import TraceError

LEAST_GAIN = -0.01
"""Gain over LRU that flop-aware must have in every row."""
MODERATE = (1 / 3, 2 / 3)
"""Contention is moderate when LRU's hit rate is between these shares of an unlimited cache's."""


@dataclass(frozen=True)
class BudgetResult:
    """One cache size.  Rates are shares of all tokens, or FLOPs, that the trace asks for."""

    budget: int
    of_footprint: float
    lru: Saved
    always: Saved
    """Flop-aware, every newcomer let in."""
    flop_aware: Saved
    """Flop-aware with admission: the default."""
    greedy: Saved
    bound_flops: float

    def gain(self) -> tuple[float, float]:
        """Gain of flop-aware over LRU: tokens and FLOPs, as ratios minus 1."""
        return self.flop_aware.tokens / max(1, self.lru.tokens) - 1, self.flop_aware.flops / max(
            1.0, self.lru.flops
        ) - 1


@dataclass(frozen=True)
class TraceResult:
    """One trace with one model's records.  ``unlimited``: what a cache that evicts nothing saves."""

    trace: str
    shape: str
    requests: int
    accesses: int
    objects: int
    footprint: int
    asked: Saved
    unlimited: Saved
    rows: tuple[BudgetResult, ...]

    def contention(self, row: BudgetResult) -> str:
        share = row.lru.tokens / max(1, self.unlimited.tokens)
        return "tight" if share < MODERATE[0] else "moderate" if share <= MODERATE[1] else "ample"


class Fractions(click.ParamType[tuple[float, ...]]):
    name = "fractions"

    def convert(
        self, value: object, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[float, ...]:
        if isinstance(value, tuple):
            return value
        try:
            found = tuple(float(part) for part in str(value).split(","))
        except ValueError:
            found = ()
        if not found or min(found) <= 0:
            self.fail(f"{value!r}: expected numbers > 0 like 0.01,0.1", param, ctx)
        return found


@click.command(help="Token hit rate and FLOPs saved of eviction policies over cache sizes, by replay.")
@click.option(
    "--kind",
    "kinds",
    type=click.Choice(KINDS),
    multiple=True,
    help="Generated traces; repeatable.  [default: all]",
)
@click.option(
    "--trace",
    "files",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    multiple=True,
    help="Trace files (JSONL), instead of generated traces.",
)
@click.option(
    "--shape", type=click.Choice(tuple(SHAPES)), default=next(iter(SHAPES)), show_default=True, help="Model."
)
@click.option("--requests", type=click.IntRange(1), default=10_000, show_default=True, help="Per trace.")
@click.option("--seed", type=click.IntRange(0), default=0, show_default=True, help="Seed of traces.")
@click.option(
    "--sizes",
    type=Fractions(),
    default="0.01,0.015,0.02,0.03,0.05,0.08,0.12,0.2,0.4",
    show_default=True,
    help="Cache sizes, as shares of the bytes of all records of the trace.",
)
@output_options
def eviction(
    kinds: tuple[str, ...],
    files: tuple[Path, ...],
    shape: str,
    requests: int,
    seed: int,
    sizes: tuple[float, ...],
    json_path: Path | None,
    plot_path: Path | None,
) -> None:
    check_outputs(json_path, plot_path)
    traces = _traces(kinds, files, requests, seed)
    to = console()
    found = []
    with report.progress(to, len(traces) * len(sizes)) as steps:
        for name, trace in traces.items():
            steps.show(name)
            found.append(measure(name, trace, SHAPES[shape], sizes, steps))
    for one in found:
        _print(to, one)
    if json_path is not None:
        settings = {"shape": shape, "requests": requests, "seed": seed, "sizes": sizes}
        report.write_json(json_path, report.report("eviction", settings, {"traces": found}))
    if plot_path is not None:
        _plot(plot_path, found)


def _traces(
    kinds: Sequence[str], files: Sequence[Path], requests: int, seed: int
) -> dict[str, Sequence[Request]]:
    if files and kinds:
        raise click.UsageError("--trace and --kind: expected only one of the two")
    try:
        if files:
            return {path.stem: load(path) for path in files}
    except TraceError as e:
        raise click.ClickException(str(e)) from e
    return {kind: generate(kind, requests, seed) for kind in KINDS if not kinds or kind in kinds}


def measure(
    name: str,
    trace: Sequence[Request],
    shape: RecordShape,
    sizes: Sequence[float],
    steps: report.Steps | None = None,
) -> TraceResult:
    """Replay the trace by every policy at every size."""
    accesses = Accesses.of(trace, shape)
    footprint = accesses.footprint
    rows = []
    for fraction in sorted(sizes):
        budget = int(footprint * fraction)
        rows.append(
            BudgetResult(
                budget=budget,
                of_footprint=fraction,
                lru=replay(accesses, budget, LruPolicy()),
                always=replay(accesses, budget, FlopAwarePolicy("always")),
                flop_aware=replay(accesses, budget, FlopAwarePolicy()),
                greedy=offline_greedy(accesses, budget),
                bound_flops=upper_bound(accesses, budget),
            )
        )
        if steps is not None:
            steps.done()
    return TraceResult(
        trace=name,
        shape=shape.name,
        requests=len(accesses.requests),
        accesses=accesses.count,
        objects=len(accesses.cache_values),
        footprint=footprint,
        asked=accesses.asked(),
        unlimited=replay(accesses, footprint, LruPolicy()),
        rows=tuple(rows),
    )


def _print(to: Console, found: TraceResult) -> None:
    asked = found.asked
    to.print(
        f"[bold]{found.trace}[/bold], records of {found.shape}: {found.requests} requests, {found.objects} "
        f"segments of {size(found.footprint)} together; an unlimited cache saves "
        f"{percent(found.unlimited.tokens / asked.tokens)} of the tokens, "
        f"{percent(found.unlimited.flops / asked.flops)} of the FLOPs"
    )
    rates = ("lru", "flop-aware", "gain", "no admission", "offline greedy")
    columns = [("cache", "contention", *rates), ("cache", *rates, "bound")]
    to.print(report.table("token hit rate", columns[0], [_tokens(found, row) for row in found.rows]))
    to.print(report.table("FLOPs saved", columns[1], [_flops(found, row) for row in found.rows]))
    worst = min(min(row.gain()) for row in found.rows)
    verdict = "yes" if worst >= LEAST_GAIN else "NO"
    to.print(f"never more than 1 % below lru: {verdict} (least gain {worst:+.1%})\n")


def _tokens(found: TraceResult, row: BudgetResult) -> tuple[str, ...]:
    shares = [s.tokens / found.asked.tokens for s in (row.lru, row.flop_aware, row.always, row.greedy)]
    lru, flop_aware, always, greedy = map(percent, shares)
    return _cache(row), found.contention(row), lru, flop_aware, f"{row.gain()[0]:+.1%}", always, greedy


def _flops(found: TraceResult, row: BudgetResult) -> tuple[str, ...]:
    saved = (row.lru.flops, row.flop_aware.flops, row.always.flops, row.greedy.flops, row.bound_flops)
    lru, flop_aware, always, greedy, bound = (percent(flops / found.asked.flops) for flops in saved)
    return _cache(row), lru, flop_aware, f"{row.gain()[1]:+.1%}", always, greedy, bound


def _cache(row: BudgetResult) -> str:
    return f"{size(row.budget)} ({row.of_footprint:.1%})"


def _plot(path: Path, found: Sequence[TraceResult]) -> None:
    from .plots import Axes, Line, plot_lines

    panels = []
    for one in found:
        x = [row.budget / 2**30 for row in one.rows]

        def line(label: str, flops: Sequence[float], colour: str, one: TraceResult = one) -> Line:
            share = [f / one.asked.flops for f in flops]
            return Line(label, [row.budget / 2**30 for row in one.rows], share, colour=colour)

        lines = (
            line("upper bound", [row.bound_flops for row in one.rows], "#c7c7c7"),
            line("offline greedy", [row.greedy.flops for row in one.rows], "#7f7f7f"),
            line("flop-aware", [row.flop_aware.flops for row in one.rows], "#2ca02c"),
            line("flop-aware, no admission", [row.always.flops for row in one.rows], "#ff7f0e"),
            line("lru", [row.lru.flops for row in one.rows], "#1f77b4"),
        )
        limit = {"unlimited": one.unlimited.flops / one.asked.flops}
        panels.append(Axes(one.trace, "cache, GiB", "FLOPs saved", lines, log_x=len(x) > 1, horizontal=limit))
    plot_lines(path, panels, title=f"eviction, records of {found[0].shape}")
