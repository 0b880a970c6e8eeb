"""``prefix``: prompts that begin alike, replayed through policies of what a cache of states keeps.

Nothing is computed by a model: results are the same on every machine.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import click
from rich.console import Console

from vllm_hypic.harness.report import console, percent, size

from .eviction import Fractions
from .eviction_replay import Saved
from .eviction_shapes import SHAPES, RecordShape
from .lib import report
from .lib.report import check_outputs, output_options
from .placers import PLACERS
from .prefix_lines import GRID, Tree, foreseen, kept, planned
from .prefix_options import asked_traces, trace_options
from .prefix_replay import PASS, Outcome, Policy, replay
from .prefix_traces import PrefixKind, Turn

STATES = (1, 2, 4, 8)
"""States a line in the comparison of placements."""


@dataclass(frozen=True)
class SizeResult:
    """One cache size: outcomes by policy, and FLOPs that no cache of this size can exceed."""

    budget: int
    of_footprint: float
    outcomes: dict[str, Outcome]
    bound_flops: float


@dataclass(frozen=True)
class PrefixResult:
    """One trace.  ``seen``: what a cache that keeps all texts and a state of every token would save;
    ``placements``: by rule and states a line, the part of the work in shared beginnings that is saved."""

    trace: str
    requests: int
    footprint: int
    block: int
    asked: Saved
    seen: Saved
    rows: tuple[SizeResult, ...]
    placements: dict[str, tuple[float, ...]]


@click.command(
    help="Token hit rate and FLOPs saved of prompts with shared prefixes, over cache sizes, by policy."
)
@click.option("--simulate", is_flag=True, help="Replay traces; needs no engine.")
@trace_options(requests=1000)
@click.option(
    "--shape", type=click.Choice(tuple(SHAPES)), default=next(iter(SHAPES)), show_default=True, help="Model."
)
@click.option("--states", type=click.IntRange(1), default=4, show_default=True, help="States per line.")
@click.option(
    "--sizes",
    type=Fractions(),
    default="0.02,0.05,0.1,0.3",
    show_default=True,
    help="Cache sizes, as shares of K and V of all texts and a state for every end and fork.",
)
@click.option("--block-32", "fine", is_flag=True, help="Also keep a state every 32 tokens: slow.")
@output_options
def prefix(
    simulate: bool,
    kinds: tuple[PrefixKind, ...],
    files: tuple[Path, ...],
    chunk: int,
    shape: str,
    requests: int,
    seed: int,
    states: int,
    sizes: tuple[float, ...],
    fine: bool,
    json_path: Path | None,
    plot_path: Path | None,
) -> None:
    if not simulate:
        raise click.UsageError("expected --simulate; engines are measured by prefix-engines")
    check_outputs(json_path, plot_path)
    traces = asked_traces(kinds, files, chunk, requests, seed)
    to, found = console(), []
    with report.progress(to, len(traces) * len(sizes)) as steps:
        for name, turns in traces.items():
            steps.show(name)
            found.append(measure(name, turns, SHAPES[shape], sizes, states, fine=fine, steps=steps))
    for one in found:
        _print(to, one)
    if json_path is not None:
        settings = {"shape": shape, "requests": requests, "seed": seed, "sizes": sizes, "states": states}
        report.write_json(json_path, report.report("prefix", settings, {"traces": found}))
    if plot_path is not None:
        _plot(plot_path, found, shape)


def policies(tree: Tree, shape: RecordShape, states: int, fine: bool) -> list[Policy]:
    """Those that are compared; LRU unless they say otherwise."""
    block = block_tokens(shape)
    dp, equal = (planned(tree, shape, PLACERS[name], states) for name in ("optimal", "equal"))
    sparse = planned(tree, shape, PLACERS["optimal"], states, ends_kept=False, thrifty=True)
    return [
        *([Policy("block-32", 32, branch=False, every=32)] if fine else ()),
        Policy("all", block, branch=False, every=block),
        Policy("stock", block, prompt_end=True, every=PASS // block * block),
        Policy("branches", GRID),
        Policy("marconi", GRID, alpha=None),
        Policy("equal", GRID, alpha=None, plans=equal),
        Policy("dp", GRID, alpha=None, plans=dp),
        Policy("sparse", GRID, alpha=None, end=False, plans=sparse),
    ]


def block_tokens(shape: RecordShape) -> int:
    """vLLM's block of a hybrid: so many tokens that a layer's K and V fill the page of a state."""
    state = shape.state_bytes / max(1, shape.linear_layers)
    token = shape.token_bytes / max(1, shape.attention_layers)
    return 16 * math.ceil(state / token / 16)


def measure(
    name: str,
    turns: Sequence[Turn],
    shape: RecordShape,
    sizes: Sequence[float],
    states: int,
    *,
    fine: bool = False,
    steps: report.Steps | None = None,
) -> PrefixResult:
    """Replay the trace by every policy at every size, and compare placements."""
    tree = Tree.of(turns)
    work, footprint = shape.flops.prefill, tree.footprint(shape)
    compared = policies(tree, shape, states, fine)
    rows = []
    for fraction in sorted(sizes):
        budget = int(footprint * fraction)
        outcomes = {policy.name: replay(tree, shape, budget, policy) for policy in compared}
        rows.append(SizeResult(budget, fraction, outcomes, tree.bound(shape, budget)))
        if steps is not None:
            steps.done()
    placements = {"oracle": tuple(kept(tree, shape, foreseen(tree, shape, n)) for n in STATES)}
    for placer in PLACERS:
        plans = (planned(tree, shape, PLACERS[placer], n, alone=True) for n in STATES)
        placements[placer] = tuple(kept(tree, shape, found) for found in plans)
    return PrefixResult(
        trace=name,
        requests=len(tree.lines),
        footprint=footprint,
        block=block_tokens(shape),
        asked=Saved(sum(x.prompt for x in tree.lines), sum(work(x.prompt) for x in tree.lines)),
        seen=Saved(sum(x.shared for x in tree.lines), sum(work(x.shared) for x in tree.lines)),
        rows=tuple(rows),
        placements=placements,
    )


def _print(to: Console, found: PrefixResult) -> None:
    asked = found.asked
    to.print(
        f"[bold]{found.trace}[/bold]: {found.requests} requests, {size(found.footprint)}; seen before: "
        f"{percent(found.seen.tokens / asked.tokens)} of the tokens, "
        f"{percent(found.seen.flops / asked.flops)} of the FLOPs; vLLM's block: {found.block} tokens"
    )
    names = list(found.rows[0].outcomes)
    for what in ("tokens", "flops"):
        table = []
        for row in found.rows:
            shares = [getattr(o.saved, what) / getattr(asked, what) for o in row.outcomes.values()]
            shares += [row.bound_flops / asked.flops] * (what == "flops")
            table.append([f"{size(row.budget)} ({row.of_footprint:.0%})", *map(percent, shares)])
        title = {"tokens": "token hit rate", "flops": "FLOPs saved"}[what]
        to.print(report.table(title, ("cache", *names, *["bound"] * (what == "flops")), table))
    table = [[name, *map(percent, values)] for name, values in found.placements.items()]
    title = "work saved in shared prefixes, by states per line"
    to.print(report.table(title, ("placement", *map(str, STATES)), table))


def _plot(path: Path, found: Sequence[PrefixResult], shape: str) -> None:
    from .plots import Axes, Line, plot_lines

    panels = []
    for one in found:
        x = [row.budget / 2**30 for row in one.rows]
        lines = [Line("bound", x, [row.bound_flops / one.asked.flops for row in one.rows], colour="#c7c7c7")]
        for name in one.rows[0].outcomes:
            shares = [row.outcomes[name].saved.flops / one.asked.flops for row in one.rows]
            lines.append(Line(name, x, shares))
        panels.append(Axes(one.trace, "cache, GiB", "FLOPs saved", lines, log_x=len(x) > 1))
    plot_lines(path, panels, title=f"prefix reuse, states of {shape}")
